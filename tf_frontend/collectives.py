# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's own collectives as an engine: the workers of a MultiWorkerMirroredStrategy, without Horovod.

TensorFlow's operations move pieces of one size, and never none: what travels is laid out in pieces of the largest size
that any rank has, after the ranks have told each other how much they have.

TensorFlow lets operations of all processes meet by two numbers, of a group and of an instance, and remembers the shape
of an instance for good. Here each name is a group, and the size of a piece its instance. Sizes are rounded up, so that
there are few: below 2^31 elements 8 for each power of two.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import collective_ops, resource_variable_ops

from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.engine import unique_name

_LEAVING_SECONDS = 10.0
_JOBS = ("chief", "master", "worker")  # by rank, as tf.distribute numbers them
_FIRST_GROUP = 1 << 20  # strategies number theirs from 1

# What carries an element of so many bytes, bit by bit: CollectiveGatherV2 and AllToAllV2 know few dtypes.
_CARRIERS = {2: tf.float16, 4: tf.int32, 8: tf.int64}


def place() -> tuple[int, int]:
    """(this process's number, how many there are) among the workers that a MultiWorkerMirroredStrategy has connected;
    (0, 1) where there is no such strategy.
    """
    addresses, rank = _workers()
    return rank, max(1, len(addresses))


def _workers() -> tuple[list[str], int]:
    """(the workers' addresses, the number of this one)."""
    server = context.context()._collective_ops_server_def
    if server is None:
        return [], 0
    jobs = {job.name: job.tasks for job in server.cluster.job}
    tasks = [(name, task) for name in _JOBS if name in jobs for task in sorted(jobs[name])]
    return [jobs[name][task] for name, task in tasks], tasks.index((server.job_name, server.task_index))


class CollectiveEngine:
    """The workers of a MultiWorkerMirroredStrategy. Everything travels through host memory.

    All ranks make it together. Raises RuntimeError where TensorFlow orders the workers otherwise than their numbers.
    """

    def __init__(self) -> None:
        addresses, self.rank = _workers()
        self.size = len(addresses)
        hosts = [address.rpartition(":")[0] for address in addresses]
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self._groups: dict[int, str] = {}
        self._orders: dict[str, Any] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            order = _Call(self, "sok_ranks").gather(tf.constant([self.rank]), 1).numpy().tolist()
        if order != list(range(self.size)):
            raise RuntimeError(f"TensorFlow's collectives order the workers as {order}, not by their numbers")
        multiprocessing.util.Finalize(None, self._leave, exitpriority=0)  # when this process ends, a forked one too

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, *, alike: bool = False
    ) -> tf.Tensor:
        tensor, name = tf.convert_to_tensor(tensor), name or "sok_all_to_all"
        if alike:
            return self._call(self._swap, name, tensor)
        with tf.device("CPU:0"):
            if splits is None:
                splits = tf.fill([self.size], tf.shape(tensor)[0] // self.size)
            splits = tf.cast(splits, tf.int64)
        return self._call(self._all_to_all, name, tensor, splits)

    def all_gather(self, tensor: tf.Tensor, name: str | None) -> tf.Tensor:
        return self._call(self._all_gather, name or "sok_all_gather", tf.convert_to_tensor(tensor))

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str | None) -> list[tf.Tensor]:
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        results: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in given):
            places = [i for i, tensor in enumerate(given) if tensor.dtype == dtype]
            named = f"{name or 'sok_all_reduce'}_{op}_{dtype.name}"
            reduced = self._call(functools.partial(self._all_reduce, op), named, *(given[i] for i in places))
            results.update(zip(places, reduced, strict=True))
        return [results[i] for i in range(len(given))]

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str | None) -> tf.Tensor:
        named = f"{name or 'sok_broadcast'}_{root_rank}"
        return self._call(functools.partial(self._broadcast, root_rank), named, tf.convert_to_tensor(tensor))

    def _call(self, body: Callable[..., Any], name: str, *tensors: tf.Tensor) -> Any:
        """body(call, *tensors) on the CPU. Eagerly as a function: an exchange is dozens of operations, each of which
        would take as long as calling it.
        """
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise NotImplementedError(
                "the workers of a strategy do not meet in tf.compat.v1 graphs: start them by Horovod"
            )
        with tf.device("CPU:0"):
            if not tf.executing_eagerly():
                return self._run(body, _unique(name), *tensors)
            specs = tuple(tf.TensorSpec([None] * len(tensor.shape), tensor.dtype) for tensor in tensors)
            function = self._functions.get((name, specs))
            if function is None:
                # A partial, so that TensorFlow does not take those of all names for one that it traces again and again.
                run = functools.partial(self._run, body, name)
                function = self._functions[name, specs] = tf.function(run, input_signature=specs, autograph=False)
            return function(*tensors)

    def _run(self, body: Callable[..., Any], name: str, *tensors: tf.Tensor) -> Any:
        return body(_Call(self, name), *tensors)

    def _leave(self) -> None:
        """Waits until all ranks are here, but not for long, unless an exception ends this one.

        An operation of TensorFlow's is done where all has come. Others may still fetch what this process has sent them.
        """
        if sys.exc_info()[0] is None and not hasattr(sys, "last_type"):
            with contextlib.suppress(tf.errors.OpError), tf.init_scope(), tf.device("CPU:0"):
                _Call(self, "sok_leave").gather(tf.zeros([1]), 1, timeout=_LEAVING_SECONDS)

    # --- each with its gradient ---------------------------------------------------------------------------------------

    def _swap(self, call: _Call, tensor: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def swap(values: tf.Tensor) -> Any:
            shape = tf.shape(values, tf.int64)
            words = tf.reshape(_carried(values), [self.size, -1])
            size = tf.shape(words)[1]
            moved = call.exchange(tf.pad(words, [[0, 0], [0, 1]]), size + 1)[:, :-1]  # is not empty so
            result = tf.reshape(_restored(moved, values.dtype), shape)
            return tf.ensure_shape(result, values.shape), lambda gradient: self._swap(call.backward(), gradient)

        return swap(tensor)

    def _all_to_all(self, call: _Call, tensor: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def exchange(values: tf.Tensor) -> Any:
            shape = tf.shape(values, tf.int64)
            told = call.gather(tf.concat([splits, shape[:1]], 0), self.size + 1, "splits")
            told = tf.reshape(told, [self.size, self.size + 1])
            matrix, entries = told[:, :-1], told[:, -1]
            fits = tf.reduce_all(tf.reduce_sum(matrix, 1) == entries) & tf.reduce_all(matrix >= 0)
            message = tf.strings.format(
                "all-to-all: the splits of each rank, and how many entries it has: {} {}", (matrix, entries)
            )
            matrix = ops.sok_require(value=matrix, holds=fits, message=message)
            words = _carried(values)
            width = tf.reduce_prod(shape[1:])
            size = _rounded(tf.reduce_max(matrix) * width)
            received = matrix[:, self.rank]
            came = _cut(call.exchange(_laid(words, splits * width, size), size), received * width, self.size)
            result = tf.reshape(
                _restored(came, values.dtype), tf.concat([tf.reduce_sum(received, keepdims=True), shape[1:]], 0)
            )
            result = tf.ensure_shape(result, tf.TensorShape([None]).concatenate(values.shape[1:]))
            return result, lambda gradient: self._all_to_all(call.backward(), gradient, received)

        return exchange(tensor)

    def _all_gather(self, call: _Call, tensor: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def gather(values: tf.Tensor) -> Any:
            shape = tf.shape(values, tf.int64)
            counts = call.gather(shape[:1], 1, "counts")
            words, width = _carried(values), tf.reduce_prod(shape[1:])
            size = _rounded(tf.reduce_max(counts) * width)
            words = tf.pad(words, [[0, size - tf.size(words, tf.int64)]])
            came = _cut(call.gather(words, size), counts * width, self.size)
            result = tf.reshape(
                _restored(came, values.dtype), tf.concat([tf.reduce_sum(counts, keepdims=True), shape[1:]], 0)
            )
            result = tf.ensure_shape(result, tf.TensorShape([None]).concatenate(values.shape[1:]))

            def own_part(gradient: tf.Tensor) -> tf.Tensor:
                (mean,) = self._all_reduce("average", call.backward(), gradient)
                first = tf.reduce_sum(counts[: self.rank])
                return mean[first : first + counts[self.rank]]

            return result, own_part

        return gather(tensor)

    def _all_reduce(self, op: str, call: _Call, *tensors: tf.Tensor) -> list[tf.Tensor]:
        dtype = tensors[0].dtype
        if not (dtype.is_floating or dtype.is_integer):
            raise TypeError(f"numbers can be reduced over the ranks, not {dtype.name}")
        carrier = dtype if dtype.is_floating or dtype.size >= 4 else tf.int32

        @tf.custom_gradient
        def reduce(*values: tf.Tensor) -> Any:
            flat = [tf.cast(tf.reshape(value, [-1]), carrier) for value in values]
            joined = tf.concat(flat, 0)
            count = tf.size(joined, tf.int64)
            size = _rounded(count)  # is not 0; sums of slices have another number of rows at each step
            joined = tf.pad(joined, [[0, size - count]])
            merge = {"min": "Min", "max": "Max"}.get(op, "Add")
            reduced = collective_ops.all_reduce_v2(joined, merge_op=merge, **call.meet(f"{merge} {carrier.name}", size))
            if op == "average":
                reduced = tf.cast(reduced / self.size, carrier)
            parts = tf.split(reduced[:count], [tf.size(part) for part in flat])
            results = [
                tf.cast(tf.reshape(part, tf.shape(value)), dtype) for part, value in zip(parts, values, strict=True)
            ]

            def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
                if op not in ("sum", "average"):
                    raise LookupError(f'"{op}" over the ranks has no gradient')
                return self._all_reduce(op, call.backward(), *gradients)

            return results, backward

        reduced: list[tf.Tensor] = reduce(*tensors)
        return reduced

    def _broadcast(self, root_rank: int, call: _Call, tensor: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def broadcast(values: tf.Tensor) -> Any:
            words = tf.pad(_carried(values), [[0, 1]])  # is not empty so
            size = tf.size(words)
            meeting = call.meet(f"broadcast {words.dtype.name}", size)
            del meeting["ordering_token"]
            if self.rank == root_rank:
                came = collective_ops.broadcast_send_v2(words, **meeting)
            else:
                came = collective_ops.broadcast_recv_v2(tf.reshape(size, [1]), words.dtype, **meeting)
            result = tf.reshape(_restored(came[:-1], values.dtype), tf.shape(values))

            def to_root(gradient: tf.Tensor) -> tf.Tensor:
                (mean,) = self._all_reduce("average", call.backward(), gradient)
                with tf.control_dependencies([mean]):  # a function of gradients would leave it out
                    return mean if self.rank == root_rank else tf.zeros_like(gradient)

            return result, to_root

        return broadcast(tensor)

    def group(self, what: str) -> int:
        """The number of the group that meets for `what`."""
        number = _FIRST_GROUP + zlib.crc32(what.encode()) % (2**31 - _FIRST_GROUP)
        if self._groups.setdefault(number, what) != what:
            raise RuntimeError(
                f"the exchanges {what!r} and {self._groups[number]!r} have one checksum; give a table another name"
            )
        return number

    def order(self, name: str) -> Any:
        """What orders the calls of one name: those of a function that is called twice, or of two branches."""
        if name not in self._orders:
            with tf.init_scope(), tf.device("CPU:0"):  # not tf.Variable, of which a strategy would make its own
                self._orders[name] = resource_variable_ops.ResourceVariable(0.0, trainable=False)
        order, graph = self._orders[name].handle, tf.compat.v1.get_default_graph()
        # Captured here, so that gradients of branches and loops, which may capture nothing themselves, take this one.
        return order if tf.executing_eagerly() else graph.capture(order)


class _Call:
    """A call by its name: where TensorFlow's operations of all ranks meet."""

    def __init__(self, engine: CollectiveEngine, name: str, order: Any = None) -> None:
        self._engine, self._name = engine, name
        self._order = engine.order(name) if order is None else order

    def backward(self) -> _Call:
        """Of the call's gradient."""
        name = f"{self._name}_gradient"
        name = name if tf.executing_eagerly() else _unique(name)
        return _Call(self._engine, name, self._order)

    def gather(self, flat: tf.Tensor, size: Any, what: str = "", timeout: float = 0.0) -> tf.Tensor:
        """[ranks * size] from `flat` [size] of each rank. timeout: seconds after which it fails; 0: never."""
        meeting = self.meet(f"gather{what} {flat.dtype.name}", size)
        return collective_ops.all_gather_v2(flat, timeout=timeout, **meeting)

    def exchange(self, pieces: tf.Tensor, size: Any) -> tf.Tensor:
        """[ranks, size]: row s is row r, this rank, of `pieces` [ranks, size] on rank s."""
        return collective_ops.all_to_all_v2(pieces, **self.meet(f"exchange {pieces.dtype.name}", size))

    def meet(self, what: str, size: Any) -> dict[str, Any]:
        """Arguments of an operation that is `what`, in pieces of so many elements."""
        return {
            "group_size": self._engine.size,
            "group_key": self._engine.group(f"{what} {self._name}"),
            "instance_key": tf.cast(size, tf.int32),
            "ordering_token": self._order,
        }


def _unique(name: str) -> str:
    """Without scopes, which differ between ranks whose layers run in another order."""
    return unique_name(name, tf.compat.v1.get_default_graph())


def _carried(tensor: tf.Tensor) -> tf.Tensor:
    """[n] elements of a dtype that travels, the same bits."""
    dtype = tensor.dtype
    flat = tf.reshape(tensor, [-1])
    if dtype.size == 1 and (dtype.is_bool or dtype.is_integer):
        return tf.cast(flat, tf.int32)
    if dtype.size not in _CARRIERS or not (dtype.is_floating or dtype.is_integer or dtype.is_complex):
        raise TypeError(f"tensors of {dtype.name} do not travel between ranks")
    carrier = _CARRIERS[dtype.size]
    return flat if dtype == carrier else tf.bitcast(flat, carrier)


def _restored(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.size == 1:
        return tf.cast(words, dtype)
    return words if words.dtype == dtype else tf.bitcast(words, dtype)


def _laid(words: tf.Tensor, lengths: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """[pieces, size]: the pieces that lie one after the other in `words`, each filled up."""
    splits = tf.pad(tf.cumsum(lengths), [[1, 0]])
    laid: tf.Tensor = tf.raw_ops.RaggedTensorToTensor(
        shape=tf.stack([tf.size(lengths, tf.int64), size]),
        values=words,
        default_value=tf.zeros([], words.dtype),
        row_partition_tensors=[splits],
        row_partition_types=["ROW_SPLITS"],
    )
    return laid


def _cut(words: tf.Tensor, lengths: tf.Tensor, count: int) -> tf.Tensor:
    """The beginnings, of these lengths, of `count` equal pieces, one after the other."""
    flat = tf.reshape(words, [-1])
    rest = tf.size(flat, tf.int64) // count - lengths
    parts = tf.split(flat, tf.reshape(tf.stack([lengths, rest], 1), [-1]), num=2 * count)
    return tf.concat(parts[::2], 0)


_STEPS = np.array([1 << bits for bits in range(4, 62)], np.int64)


def _rounded(count: tf.Tensor) -> tf.Tensor:
    """The count or the next larger one of few, by an eighth at most; at least 1."""
    step = tf.bitwise.left_shift(tf.constant(1, tf.int64), tf.reduce_sum(tf.cast(count >= _STEPS, tf.int64)))
    return tf.maximum((count + step - 1) // step * step, 1)
