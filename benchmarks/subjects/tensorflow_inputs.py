# SPDX-License-Identifier: Apache-2.0
"""What the TensorFlow subjects share: threads, optimizers by the benchmarks' names, dynamic tables that hold all keys,
the batches as tensors, and functions that hold them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case, raw_ids

_AT_ONCE = 1 << 18

MakeIds = Callable[[], list[Any]]
"""Makes the ids of a batch, one tensor a table, within a tf.function."""


def use_threads(threads: int) -> None:
    """Before TensorFlow runs its first op."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def make_optimizer(name: str) -> Any:
    """The optimizer of a benchmark's name, for tables."""
    if name == "sgd":
        return sok.OptimizerWrapper(keras.optimizers.SGD(0.01))
    if name == "adagrad":
        return sok.OptimizerWrapper(
            keras.optimizers.Adagrad(0.01, initial_accumulator_value=0.0, epsilon=1e-8)  # as torch.optim's
        )
    if name == "adam":
        return sok.OptimizerWrapper(keras.optimizers.Adam(0.01, epsilon=1e-8))
    return sok.RowWiseAdagrad(0.01, epsilon=1e-8)


def scatter_sub(tables: Sequence[tf.Variable], slices: Sequence[tf.IndexedSlices], learning_rate: float) -> None:
    """SGD of TensorFlow's own variables, on the rows that have gradients."""
    for table, each in zip(tables, slices, strict=True):
        table.scatter_sub(tf.IndexedSlices(learning_rate * each.values, each.indices))


def make_dynamic(case: Case, table: int, dtype: str, evicts: bool) -> Any:
    """A dynamic table that holds the raw ids of all rows of a case. evicts: by time of use."""
    made = sok.DynamicVariable(
        case.dimension,
        "uniform",
        name=f"table{table}",
        dtype=dtype,
        init_capacity=case.rows,
        max_capacity=2 * case.rows,  # on a GPU the keys of queued calls have room, whether they are new or not
        evict_strategy="lru" if evicts else None,
    )
    for first in range(0, case.rows, _AT_ONCE):
        ids = raw_ids(np.arange(first, min(first + _AT_ONCE, case.rows)))
        ragged = tf.RaggedTensor.from_row_splits(tf.constant(ids), np.arange(len(ids) + 1), validate=False)
        sok.lookup_sparse(made, ragged, combiners="sum")  # in training, so it inserts
    return made


def sparse_inputs(batches: list[Batch]) -> list[MakeIds]:
    """For each batch, one SparseTensor [batch, keys of the longest bag] a table."""
    result: list[MakeIds] = []
    for batch in batches:
        lengths = np.diff(batch.row_splits)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.arange(len(rows)) - np.repeat(batch.row_splits[:-1], lengths)
        indices = tf.constant(np.stack([rows, columns], axis=1))
        shape = tf.constant([len(lengths), int(lengths.max(initial=0))], tf.int64)
        ids = [tf.SparseTensor(indices, tf.constant(keys), shape) for keys in batch.keys]
        result.append(functools.partial(list, ids))
    return result


def ragged_inputs(batches: list[Batch]) -> list[MakeIds]:
    """For each batch, one RaggedTensor a table, all with the same row splits.

    A batch is two tensors, whatever the number of tables, since a call of a function costs some microseconds for each
    tensor that the function holds. The keys of a table are a slice, which TensorFlow does not copy.
    """

    def make_ids(keys: tf.Tensor, row_splits: tf.Tensor) -> list[tf.RaggedTensor]:
        return [
            tf.RaggedTensor.from_row_splits(keys[table], row_splits, validate=False) for table in range(keys.shape[0])
        ]

    return [
        functools.partial(make_ids, tf.constant(np.stack(batch.keys)), tf.constant(batch.row_splits))
        for batch in batches
    ]


def functions(call: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """call(what makes the ids) as a tf.function for each batch, with the batch inside.

    As arguments of a function ids cost Python about 60 us for each sparse or ragged tensor, whatever the function does;
    training loops whose functions take batches from an iterator (Keras's fit does) do not pay that.
    """
    return [tf.function(functools.partial(call, make_ids)) for make_ids in inputs]
