# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks: all-to-all with counts, and the swap of these counts that comes before it.

`EngineExchange` does it by what started the processes, `NcclExchange` does it for tensors on a GPU over the core's NCCL
communicator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from sparse_operation_kit import core
from sparse_operation_kit.nccl import NcclUnavailable, SharedGpu, connect, logger
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.devices import HOST
from sparse_operation_kit.tensorflow.engine import Engine


class Exchange(Protocol):
    """Moves pieces of a tensor between ranks; differentiable.

    All ranks make the same calls in the same order. Tensors on the CPU travel by the engine that started the processes.
    """

    engine: Engine

    def all_to_all(
        self,
        tensor: tf.Tensor,
        send_splits: tf.Tensor | None = None,
        receive_splits: tf.Tensor | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        """Sends the first send_splits[0] entries to rank 0, the next send_splits[1] to rank 1, ...

        Args:
          tensor: [n, ...] what to send.
          send_splits: [num_ranks] int32 or int64 entries for each rank, in host memory; None: n / num_ranks for each.
          receive_splits: [num_ranks] as many come from each rank, in host memory; None: found out, which takes an
            exchange of its own where the engine does not do it.
          name: of the operation. Ranks meet by name, so it must be the same on all of them, and in a graph it must not
            depend on how often that graph was traced.

        Returns:
          [m, ...] what came, by source rank.
        """
        ...

    def swap_counts(self, sent: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends row r of `sent` to rank r.

        Args:
          sent: [num_ranks, k] int64, on the CPU or a GPU; the last column says whether this rank has failed.
          name: as for all_to_all.

        Returns:
          (sent, received), both [num_ranks, k] int64 in host memory; row s of `received` came from rank s. On a GPU
          this is where a step waits: what was enqueued before it is done when the two are there. The last column may
          be 1 there although `sent` had 0, since the GPU has found something wrong.
        """
        ...

    def agree(self, located: Any, agreed: Callable[[tf.Tensor], tf.Tensor], name: str | None = None) -> tf.Tensor:
        """The slots of `located`, what SokLocate gave, once all ranks have inserted; or an error on all of them.

        Args:
          agreed: SokAgreed, of what came of `located.failed` from each rank, [num_ranks, 1] in host memory.
          name: as for all_to_all.

        On a GPU nothing waits. Over NCCL, where a rank's GPU has found that it cannot insert, no rank's tables change
        any more, and the next lookup or check_errors raises on all. Over the engine that rank's tables alone stop
        changing; the others learn of it with the counts of the next lookup.
        """
        ...

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], op: str, name: str | None = None, device: str | None = None
    ) -> list[tf.Tensor]:
        """As of an engine (engine.py).

        device: where the tensors will be, all of them; None: where they say. In a graph a tensor does not always know:
        then the exchange decides.
        """
        ...

    def communicator(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """The handle of what tensors that are where this one is travel over; None: the engine."""
        ...

    def meeting_place(self) -> str:
        """The device for a tensor that all ranks reduce, whatever else each has: the same on all of them."""
        ...

    def tell_failure(self, device: str) -> None:
        """Tells the other ranks, whose step on the device asks for it, that this one cannot do its part. Eagerly, where
        there is a communicator.
        """
        ...

    def close(self) -> None:
        """Frees what the exchange holds; functions that were traced with it fail from then on."""
        ...


class EngineExchange:
    """Exchange by the engine: where it wants, or through host memory."""

    def __init__(self, engine: Engine, through_host: bool = False) -> None:
        self.engine = engine
        self._through_host = through_host

    def all_to_all(
        self,
        tensor: tf.Tensor,
        send_splits: tf.Tensor | None = None,
        receive_splits: tf.Tensor | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        del receive_splits  # the engine tells the ranks itself
        with tf.device("CPU:0") if self._through_host else contextlib.nullcontext():
            return self.engine.all_to_all(tensor, send_splits, name)

    def swap_counts(self, sent: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):
            sent = tf.identity(sent)
            received = self.engine.all_to_all(sent, None, name, alike=True)
        received.set_shape(sent.shape)
        return sent, received

    def agree(self, located: Any, agreed: Callable[[tf.Tensor], tf.Tensor], name: str | None = None) -> tf.Tensor:
        return agreed(self.swap_counts(located.failed, name)[1])

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], op: str, name: str | None = None, device: str | None = None
    ) -> list[tf.Tensor]:
        del device
        return self.engine.all_reduce(tensors, op, name)

    def communicator(self, tensor: tf.Tensor) -> tf.Tensor | None:
        del tensor
        return None

    def meeting_place(self) -> str:
        return HOST

    def tell_failure(self, device: str) -> None:
        del device

    def close(self) -> None:
        pass


class NcclExchange:
    """Tensors on a GPU travel over the core's NCCL communicator on TensorFlow's stream, others by the engine.

    Where a tensor is, is known by its device: in a graph that of the scope (`tf.device`) in which it was made. One that
    has none in a `tf.function` goes to this rank's GPU (`_placed`). The communicator is made by the first exchange on a
    GPU, on all ranks together, in a `tf.function` when it is traced; what is enqueued on the GPU is waited for then.
    With required=False the ranks go on with the engine when they cannot have one, and say so once.

    Ranks must run exchanges in the same order. In a `tf.function` and in what computes its gradient they run in the
    order in which they were made. `tf.compat.v1` graphs outside of functions use the engine, which pairs exchanges by
    their names.
    """

    def __init__(self, engine: Engine, required: bool) -> None:
        self.engine = engine
        self._by_engine = EngineExchange(engine)
        self._required = required
        self._lock = threading.Lock()
        self._communicator: core.Communicator | None = None
        self._handle: tf.Tensor | None = None
        self._gpu: str | None = None  # of the communicator
        self._handles: dict[str, tf.Tensor | None] = {}  # eagerly, by the device of what is sent
        self._unusable = False
        self._reduces: core.Communicator | None = None  # that is connected for all_reduce

    def all_to_all(
        self,
        tensor: tf.Tensor,
        send_splits: tf.Tensor | None = None,
        receive_splits: tf.Tensor | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        tensor = self._placed(tensor)
        handle = self._handle_for(tensor)
        if handle is None:
            return self._by_engine.all_to_all(tensor, send_splits, receive_splits, name)
        if send_splits is None:
            with tf.device(tensor.device):
                shape = tf.shape(tensor, tf.int64)  # is in host memory; on the host the whole tensor would go there
            with tf.device("CPU:0"):
                send_splits = tf.fill([self.engine.size], shape[0] // self.engine.size)
        if receive_splits is None:
            with tf.device(tensor.device):
                splits = tf.cast(send_splits, tf.int64)
                counts = tf.stack([splits, tf.zeros_like(splits)], axis=1)
                sent, received = ordered(lambda: ops.sok_swap_counts(communicator=handle, counts=counts))
            with tf.device("CPU:0"):
                send_splits, receive_splits = sent[:, 0], received[:, 0]
        with _beside(tensor):
            return all_to_all(handle, tensor, send_splits, receive_splits)

    def swap_counts(self, sent: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        handle = self._handle_for(sent)
        if handle is None:
            return self._by_engine.swap_counts(sent, name)
        with _beside(sent):
            return tuple(ordered(lambda: ops.sok_swap_counts(communicator=handle, counts=sent)))

    def agree(self, located: Any, agreed: Callable[[tf.Tensor], tf.Tensor], name: str | None = None) -> tf.Tensor:
        handle = self._handle_for(located.slots)
        if handle is None:
            return self._by_engine.agree(located, agreed, name)
        with _beside(located.slots):
            return ordered(
                lambda: ops.sok_share_errors(
                    communicator=handle, failed=located.failed, message=located.message, slots=located.slots
                )
            )

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], op: str, name: str | None = None, device: str | None = None
    ) -> list[tf.Tensor]:
        tensors = tensors if device else list(map(self._placed, tensors))
        result = list(tensors)
        by_nccl: dict[tuple[str, tf.DType], list[int]] = {}
        rest = []
        for i, tensor in enumerate(tensors):
            where = device or tensor.device
            is_known = tensor.dtype in _REDUCED and not (op == "average" and tensor.dtype.is_integer)
            if is_known and self._handle_on(where) is not None:
                by_nccl.setdefault((where, tensor.dtype), []).append(i)
            else:
                rest.append(i)
        for (where, _), places in by_nccl.items():
            with _NO_SCOPE if tf.executing_eagerly() else tf.device(where):
                reduced = all_reduce(self._reducing(where), [tensors[i] for i in places], op)
            for i, tensor in zip(places, reduced, strict=True):
                result[i] = tensor
        if rest:
            for i, tensor in zip(rest, self.engine.all_reduce([tensors[i] for i in rest], op, name), strict=True):
                result[i] = tensor
        return result

    def communicator(self, tensor: tf.Tensor) -> tf.Tensor | None:
        return self._handle_for(tensor)

    def meeting_place(self) -> str:
        usable = tf.compat.v1.executing_eagerly_outside_functions()  # as in `_find_handle`
        return self._gpu if usable and self._gpu is not None else HOST  # of a communicator that all made together

    def tell_failure(self, device: str) -> None:
        handle = self._handle_on(device)
        if handle is not None:
            with tf.device(device), contextlib.suppress(tf.errors.AbortedError):
                ops.sok_share_errors(
                    communicator=handle,
                    failed=np.array([tf.errors.ABORTED], np.int64),
                    message="this rank's own error says why",
                    slots=tf.zeros([0], tf.int64),
                )

    def close(self) -> None:
        with self._lock:
            communicator, handle = self._communicator, self._handle
            self._communicator, self._handle, self._unusable, self._reduces = None, None, True, None
            self._gpu = None
            self._handles = {}
        if communicator is not None:
            with tf.init_scope():
                ops.sok_communicator_close(communicator=handle)
            communicator.close()

    def _placed(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor with a device, as far as that can be told.

        In a function an argument, or what is made without `tf.device`, has none before it runs, and TensorFlow then
        puts on a GPU what it can. So it goes by the scope around, else to the communicator's GPU, or to the only one
        that this process sees. A tensor that lies on the host when the function runs is copied there and its result
        back.
        """
        known = tf.executing_eagerly() or tensor.device or tensor.dtype not in _REDUCED
        if known or self._unusable or not tf.inside_function():
            return tensor
        here = tf.identity(tensor)
        gpu = self._gpu or ("GPU:0" if len(tf.config.get_visible_devices("GPU")) == 1 else None)
        if here.device or gpu is None:
            return here
        with tf.device(gpu):
            return tf.identity(tensor)

    def _handle_for(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """The communicator's handle, or None where the engine has to do."""
        return self._handle_on(tensor.device)

    def _handle_on(self, where: str) -> tf.Tensor | None:
        if not tf.executing_eagerly():
            return self._find_handle(where)
        try:
            return self._handles[where]
        except KeyError:
            handles = self._handles
            handles[where] = handle = self._find_handle(where)
            return handle

    def _reducing(self, where: str) -> tf.Tensor:
        """The handle, of a communicator that is connected for reductions: by the first call, as by `_connect`."""
        handle, communicator = self._handle_on(where), self._communicator
        assert handle is not None and communicator is not None, "whoever asks has seen the handle"
        with self._lock:
            if self._reduces is not communicator:
                with tf.init_scope(), tf.device(where):
                    ops.sok_gpu_index()  # waits for the GPU
                communicator.prepare_all_reduce()
                self._reduces = communicator
        return handle

    def _find_handle(self, where: str) -> tf.Tensor | None:
        device = tf.DeviceSpec.from_string(where or "")
        if device.device_type != "GPU" or not tf.compat.v1.executing_eagerly_outside_functions():
            return None
        with self._lock, tf.init_scope():
            if self._handle is None and not self._unusable:
                self._connect(f"GPU:{device.device_index or 0}")
            return self._handle

    def _connect(self, device: str) -> None:
        with tf.device(device):
            index = int(ops.sok_gpu_index())  # waits for the GPU
        try:
            self._communicator = connect(index, self.engine.size, self.engine.rank, self._allgather)
        except NcclUnavailable as error:
            if self._required:
                raise
            self._unusable = True
            if isinstance(error, SharedGpu):
                self._by_engine = EngineExchange(self.engine, through_host=True)
            if self.engine.rank == 0:
                logger.warning("%s. Tensors on GPUs are exchanged by the engine instead", error)
            return
        with tf.device(device):
            self._handle, self._gpu = ops.sok_communicator_handle(address=self._communicator.handle), device

    def _allgather(self, data: bytes) -> list[bytes]:
        with tf.device("CPU:0"):
            mine = tf.constant(np.frombuffer(data, np.uint8)[np.newaxis])
            replies = self.engine.all_gather(mine, "sok_nccl")
        return [reply.tobytes() for reply in replies.numpy()]


def all_to_all(handle: tf.Tensor, tensor: tf.Tensor, send_splits: tf.Tensor, receive_splits: tf.Tensor) -> tf.Tensor:
    """SokAllToAll, after the exchanges that the graph holds already."""
    return ordered(
        lambda: ops.sok_all_to_all(
            communicator=handle, values=tensor, send_splits=send_splits, receive_splits=receive_splits
        )
    )


def all_reduce(handle: tf.Tensor, tensors: Sequence[tf.Tensor], op: str) -> list[tf.Tensor]:
    """SokAllReduce of tensors of one dtype, after the exchanges that the graph holds already."""
    return ordered(lambda: ops.sok_all_reduce(communicator=handle, values=tensors, reduction=core.REDUCTIONS[op]))


def _beside(tensor: tf.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A scope for an op that takes the communicator; eagerly TensorFlow places it there without being told."""
    return _NO_SCOPE if tf.executing_eagerly() else tf.device(tensor.device)


_NO_SCOPE = contextlib.nullcontext()
_REDUCED = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int64)  # by SokAllReduce


def ordered(make: Any) -> Any:
    """Calls `make`, which makes an exchange.

    In a graph it runs after the one that was made before it. A `tf.function` orders ops that take the same resource
    itself, but not in the function that computes its gradient: there nothing else would order the exchanges of two
    lookups, and ranks could run them the other way round.
    """
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    last = getattr(graph, "_sok_last_exchange", None)
    with contextlib.ExitStack() as scopes:
        if last is not None:
            scopes.enter_context(tf.control_dependencies([last]))
        made = make()
    first = made[0] if isinstance(made, (tuple, list)) else made
    graph._sok_last_exchange = first if isinstance(first, tf.Operation) else first.op
    return made


@tf.RegisterGradient("SokAllToAll")
def _all_to_all_gradient(op: Any, gradient: Any) -> list[Any]:
    handle, _, send_splits, receive_splits = op.inputs
    return [None, all_to_all(handle, gradient, receive_splits, send_splits), None, None]


@tf.RegisterGradient("SokAllReduce")
def _all_reduce_gradient(op: Any, *gradients: Any) -> list[Any]:
    number = op.get_attr("reduction")
    (reduction,) = (name for name, each in core.REDUCTIONS.items() if each == number)
    if reduction not in ("sum", "average"):
        raise LookupError(f'all_reduce has a gradient with "sum" and "average", not {reduction!r}')
    handle, *values = op.inputs
    given = [tf.zeros_like(v) if g is None else g for g, v in zip(gradients, values, strict=True)]
    return [None, *all_reduce(handle, given, reduction)]


for _name in ("SokSwapCounts", "SokShareErrors", "SokCommunicatorHandle", "SokCommunicatorClose", "SokGpuIndex"):
    tf.no_gradient(_name)
