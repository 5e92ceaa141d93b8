# SPDX-License-Identifier: Apache-2.0
"""Collective operations on dense tensors; with one process they change nothing.

`allgather` and `broadcast` are the engine's that init() found. `alltoall` and `allreduce` of tensors on a GPU go over
the core's NCCL communicator where there is one. In a `tf.function` a floating or int64 tensor that no `tf.device` has
placed counts as one on the GPU, where the rank has one: the communicator's, or the only one that TensorFlow sees. It
may lie on the host when the function runs: TensorFlow copies it. Other tensors go by the engine. Calls that go over
NCCL run in the same order on all ranks, as lookups, also in branches and loops; functions of tf.data, which run beside
the steps, say `tf.device("CPU:0")`.
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

    splits: [num_ranks] integers that add up to n; None: n / num_ranks each. The module says what it goes over.
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

    A `tf.IndexedSlices` stays one ("sum" and "average" only), with each row that some rank has, once. All ranks get the
    same bits. The module says what it goes over. Raises ValueError for an unknown `op`.
    """
    if op not in OPERATIONS:
        raise ValueError(f"unknown op {op!r}: it must be one of {', '.join(OPERATIONS)}")
    state = runtime.get()
    if isinstance(tensor, tf.IndexedSlices):
        if op not in ("sum", "average"):
            raise ValueError(f'tf.IndexedSlices can be reduced with "sum" and "average", not {op!r}')
        tensor = _with_rows_of_all(tensor, name)
        values = tensor.values if state.exchange is None else state.exchange.all_reduce([tensor.values], op, name)[0]
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    tensor = tf.convert_to_tensor(tensor)
    if state.exchange is None:
        return tf.identity(tensor)
    return state.exchange.all_reduce([tensor], op, name)[0]


def _with_rows_of_all(slices: tf.IndexedSlices, name: str | None) -> tf.IndexedSlices:
    """This rank's sums for the rows that some rank has: each row once, in the same order on all ranks, zeros where it
    has none of its own.

    So ranks add them as dense tensors and get the same bits. Gathered slices would not give these: a GPU adds those of
    a row in whatever order they come. And Keras 3's optimizers take the square of each slice, not of a row's sum.
    """
    rows, places = tf.unique(slices.indices, tf.int64)
    if runtime.get().exchange is not None:
        gathered = allgather(rows, None if name is None else f"{name}_indices")
        every, of_every = tf.unique(tf.concat([gathered, rows], 0), tf.int64)  # what is gathered has the own ones too
        rows, places = every, tf.gather(of_every[tf.size(gathered) :], places)
    summed = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
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
    """The averages over the ranks of several gradients at once; `tf.IndexedSlices` stay such, as `allreduce` has them.

    device: where they are; None: where they say.
    """
    exchange = runtime.get().exchange
    slices = {
        i: _with_rows_of_all(tensor, f"{name}_{i}")
        for i, tensor in enumerate(tensors)
        if isinstance(tensor, tf.IndexedSlices)
    }
    values = [slices[i].values if i in slices else tf.convert_to_tensor(each) for i, each in enumerate(tensors)]
    results = list(values if exchange is None else exchange.all_reduce(values, "average", name, device))
    for i, of_rank in slices.items():
        results[i] = tf.IndexedSlices(results[i], of_rank.indices, of_rank.dense_shape)
    return results


def check_root(root_rank: int) -> None:
    """Raises ValueError unless `root_rank` is a rank."""
    ranks = runtime.get().num_ranks
    if not 0 <= root_rank < ranks:
        raise ValueError(f"root_rank {root_rank} is not in [0, {ranks})")
