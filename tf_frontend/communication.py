# SPDX-License-Identifier: Apache-2.0
"""Collective operations on dense tensors, through the engine that init() found;
with one process they change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.engine import OPERATIONS
from sparse_operation_kit.tensorflow.runtime import global_gpu_id, local_rank, num_gpus, num_ranks, rank

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "global_gpu_id",
    "id_in_rank",
    "local_rank",
    "num_gpu_per_rank",
    "num_gpus",
    "num_ranks",
    "rank",
]


def num_gpu_per_rank() -> int:
    """1: a process has one GPU. SOK 2.x's name."""
    return 1


def id_in_rank() -> int:
    """0: the GPU's number within its process. SOK 2.x's name."""
    return 0


@as_written
def alltoall(tensor: Any, splits: Any = None, name: str | None = None) -> tf.Tensor:
    """Sends splits[r] entries of `tensor` [n, ...] to each rank r; returns [m, ...], what came, by source rank.

    splits: [num_ranks] integers that add up to n; None: n / num_ranks each.
    Raises tf.errors.InvalidArgumentError when the splits do not fit.
    """
    tensor = tf.convert_to_tensor(tensor)
    exchange = runtime.get().exchange
    if exchange is None:
        return tf.identity(tensor)
    return exchange.all_to_all(tensor, None if splits is None else tf.cast(splits, tf.int32), name=name)


@as_written
def allreduce(tensor: Any, op: str = "sum", name: str | None = None) -> Any:
    """The sum (or "average", "min", "max") over the ranks of a tensor of the same shape and dtype on each.

    A `tf.IndexedSlices` stays one: its slices are gathered from all ranks ("sum" and "average" only).
    Raises ValueError for an unknown `op`.
    """
    if op not in OPERATIONS:
        raise ValueError(f"unknown op {op!r}: it must be one of {', '.join(OPERATIONS)}")
    state = runtime.get()
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, op, name)
    tensor = tf.convert_to_tensor(tensor)
    if state.exchange is None:
        return tf.identity(tensor)
    return state.exchange.all_reduce([tensor], op, name)[0]


def _allreduce_slices(slices: tf.IndexedSlices, op: str, name: str | None) -> tf.IndexedSlices:
    if op not in ("sum", "average"):
        raise ValueError(f'tf.IndexedSlices can be reduced with "sum" and "average", not {op!r}')
    values = allgather(slices.values, None if name is None else f"{name}_values")
    indices = allgather(slices.indices, None if name is None else f"{name}_indices")
    if op == "average":
        values = values / tf.cast(runtime.get().num_ranks, values.dtype)
    # Each row once: Keras 3's optimizers take the square of each slice, not of their sum.
    rows, places = tf.unique(indices)
    summed = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(summed, rows, slices.dense_shape)


@as_written
def allgather(tensor: Any, name: str | None = None) -> tf.Tensor:
    """[m, ...]: the tensors [n, ...] of all ranks one after another; n may differ from rank to rank."""
    tensor = tf.convert_to_tensor(tensor)
    exchange = runtime.get().exchange
    return tf.identity(tensor) if exchange is None else exchange.engine.all_gather(tensor, name)


@as_written
def broadcast(tensor: Any, root_rank: int = 0, name: str | None = None) -> tf.Tensor:
    """The tensor of `root_rank`, on all ranks. Raises ValueError when there is no such rank."""
    tensor = tf.convert_to_tensor(tensor)
    check_root(root_rank)
    exchange = runtime.get().exchange
    return tf.identity(tensor) if exchange is None else exchange.engine.broadcast(tensor, root_rank, name)


def grouped_average(tensors: Sequence[Any], name: str, device: str | None = None) -> list[Any]:
    """The averages over the ranks of several gradients at once; `tf.IndexedSlices` stay such.

    device: where the dense ones are; None: where they say.
    """
    exchange = runtime.get().exchange
    if exchange is None:
        return list(tensors)
    results = list(tensors)
    dense = [i for i, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    if dense:
        averages = exchange.all_reduce([tf.convert_to_tensor(results[i]) for i in dense], "average", name, device)
        for i, average in zip(dense, averages, strict=True):
            results[i] = average
    for i, tensor in enumerate(results):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = _allreduce_slices(tensor, "average", f"{name}_{i}")
    return results


def check_root(root_rank: int) -> None:
    """Raises ValueError unless `root_rank` is a rank."""
    ranks = runtime.get().num_ranks
    if not 0 <= root_rank < ranks:
        raise ValueError(f"root_rank {root_rank} is not in [0, {ranks})")
