# SPDX-License-Identifier: Apache-2.0
"""What connects the processes of a job: everything of this package that goes from rank to rank, and not over the core's
NCCL communicator, is one of an engine's calls. Horovod is one; collectives.py has TensorFlow's own collectives.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs

OPERATIONS = ("sum", "average", "min", "max")


class Engine(Protocol):
    """The ranks of a job and what moves tensors between them. All ranks make the same calls.

    `name` of a call is that of the operation. Ranks meet by name, so it must be the same on all of them, and in a graph
    it must not depend on how often that graph was traced. Calls with different names may come in another order on
    another rank within a graph. None: the engine's own, for calls in one order.
    """

    rank: int
    size: int
    local_rank: int
    """Of the processes on this host."""

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, *, alike: bool = False
    ) -> tf.Tensor:
        """Sends the first splits[0] entries of `tensor` [n, ...] to rank 0, the next splits[1] to rank 1, ....

        splits: [size] integers in host memory; None: n / size each.
        alike: whether n is the same on all ranks, and there are no splits.
        Returns [m, ...], what came, by source rank. Differentiable.
        """
        ...

    def all_gather(self, tensor: tf.Tensor, name: str | None) -> tf.Tensor:
        """[m, ...]: the tensors [n, ...] of all ranks one after another; n may differ. Differentiable; as
        Horovod does it, the gradient is the mean of the ranks'.
        """
        ...

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str | None) -> list[tf.Tensor]:
        """Each tensor reduced over the ranks, which have it in the same shape; op: one of OPERATIONS. Differentiable
        for "sum" and "average".
        """
        ...

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str | None) -> tf.Tensor:
        """The tensor of `root_rank`, which has the same shape on all ranks. Differentiable, as all_gather."""
        ...


def horovod() -> Any:
    """The module horovod.tensorflow when it is in use, else None.

    It is not imported for this: `hvd.init()` was called through it if it was called at all.
    """
    module = sys.modules.get("horovod.tensorflow")
    return module if module is not None and module.is_initialized() else None


class HorovodEngine:
    """Horovod, after hvd.init()."""

    def __init__(self) -> None:
        self._hvd = horovod()
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self.local_rank = self._hvd.local_rank()

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, *, alike: bool = False
    ) -> tf.Tensor:
        del alike  # Horovod tells the ranks itself
        if name is None or tf.executing_eagerly():
            return self._all_to_all(tensor, splits, name)[0]

        # Horovod names the gradient's exchange after the tensor that it gets, which has the scopes of layers too.
        @tf.custom_gradient
        def exchange(values: tf.Tensor) -> Any:
            came, received = self._all_to_all(values, splits, name)
            return came, lambda gradient: self._all_to_all(gradient, received, f"{name}_gradient")[0]

        return exchange(tensor)

    def _all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None) -> Any:
        """(what came, how many entries from each rank, which is None where `splits` is)."""
        with _meeting(name) as meeting:
            tensor = _given_later(tensor)
            if splits is None:
                return self._hvd.alltoall(tensor, **meeting), None
            return self._hvd.alltoall(tensor, splits=tf.cast(splits, tf.int32), **meeting)

    def all_gather(self, tensor: tf.Tensor, name: str | None) -> tf.Tensor:
        with _meeting(name) as meeting:
            return self._hvd.allgather(_given_later(tensor), **meeting)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str | None) -> list[tf.Tensor]:
        kind = {"sum": self._hvd.Sum, "average": self._hvd.Average, "min": self._hvd.Min, "max": self._hvd.Max}[op]
        with _meeting(name) as meeting:
            given = [_given_later(tensor) for tensor in tensors]
            if len(given) == 1:
                return [self._hvd.allreduce(given[0], op=kind, **meeting)]
            reduced: list[tf.Tensor] = self._hvd.grouped_allreduce(given, op=kind, **meeting)
            return reduced

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str | None) -> tf.Tensor:
        with _meeting(name) as meeting:
            return self._hvd.broadcast(_given_later(tensor), root_rank, **meeting)


def _given_later(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor; in a graph as one that TensorFlow takes for no constant while it makes the graph.

    What follows from constants it computes then, to know shapes. Horovod's operations, which it takes for pure
    functions, would run on ranks that do not make the same graph, and hang.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


_BRANCHES = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
)


@contextlib.contextmanager
def _meeting(name: str | None) -> Iterator[dict[str, Any]]:
    """Where one of Horovod's operations is made, and its arguments by which the ranks meet.

    In a graph that is its name with all scopes. Those of layers are left: they differ between ranks whose layers run in
    another order. Branches and loops get scopes from TensorFlow when they run, which have numbers that count what else
    is in the graph, and ranks differ in that where one has tables that the other has not: there the name is one without
    scopes, told apart from others of its function here.
    """
    if tf.executing_eagerly():
        yield {"name": name}
        return
    inner = function = tf.compat.v1.get_default_graph()
    while isinstance(function, _BRANCHES):
        function = function.outer_graph
    with tf.name_scope("sok_exchange/"):
        if function is inner or name is None:
            yield {"name": name}
        else:
            named = re.sub("[^A-Za-z0-9_]", "_", f"{getattr(function, 'name', '')}_{name}")
            yield {"name": unique_name(named, function), "ignore_name_scope": True}


def unique_name(name: str, graph: Any) -> str:
    """The name, with a number where operations of the graph have asked for it already."""
    seen: dict[str, int] = getattr(graph, "_sok_calls", {})
    seen[name] = seen.get(name, -1) + 1
    graph._sok_calls = seen
    return f"{name}_{seen[name]}" if seen[name] else name
