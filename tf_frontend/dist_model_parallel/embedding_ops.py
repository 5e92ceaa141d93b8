# SPDX-License-Identifier: Apache-2.0
"""embedding_lookup, of a variable or tensor that this process holds whole, by TensorFlow's own operations."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import devices, keras_compat
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.lookup import checked_ids

COMBINERS = (None, "sum", "mean")


def check_combiner(combiner: Any) -> None:
    """Raises ValueError unless it is None, "sum" or "mean"."""
    if combiner not in COMBINERS:
        raise ValueError(f'combiner must be None, "sum" or "mean", got {combiner!r}')


@as_written
def embedding_lookup(param: Any, ids: Any, combiner: str | None = None) -> Any:
    """Looks up rows by id and pools those of each bag.

    Args:
      param: [rows, dimension], a tensor or variable, which this process holds whole. For tables that are sharded over
        processes see `sok.lookup_sparse`.
      ids: int32 or int64, in [0, rows), of two dimensions: a tensor [n, k], a `tf.RaggedTensor` or a `tf.SparseTensor`.
        Row splits may be of either type.
      combiner: None, "sum" or "mean". An empty bag gives zeros.

    Returns:
      With a combiner [n, dimension]. Without one [n, k, dimension], of ragged ids a `tf.RaggedTensor`. The gradient of
      `param` is a `tf.IndexedSlices`; that of ragged and sparse ids with a combiner has each row once, ascending.

    Raises:
      TypeError: `param` is no tensor or variable.
      ValueError: an unknown combiner; ids that are not of two dimensions; sparse ids without a combiner.
      tf.errors.InvalidArgumentError: an id outside the table. On a GPU it is raised later, as those of `lookup_sparse`.
    """
    check_combiner(combiner)
    if not (tf.is_tensor(param) or isinstance(keras_compat.raw(param), tf.Variable)):
        raise TypeError("param must be Tensor")
    param = keras_compat.raw(param)
    if isinstance(ids, tf.RaggedTensor):
        if ids.ragged_rank != 1 or ids.values.shape.rank != 1:
            raise ValueError(f"Only support 2D input, got ragged ids of shape {ids.shape}")
        values = _checked(param, ids.values)
        if combiner is None:
            return ids.with_values(tf.nn.embedding_lookup(param, values))
        return _pooled(param, values, ids.value_rowids(), ids.nrows(), combiner)
    if isinstance(ids, tf.SparseTensor):
        if ids.shape.rank not in (None, 2):
            raise ValueError(f"Only support 2D input, got sparse ids of shape {ids.shape}")
        if combiner is None:
            raise ValueError("sparse ids take a combiner: without one a row of them has no shape")
        ids = tf.sparse.reorder(ids)
        return _pooled(param, _checked(param, ids.values), ids.indices[:, 0], ids.dense_shape[0], combiner)
    ids = tf.convert_to_tensor(ids)
    if ids.shape.rank != 2:
        raise ValueError(f"Only support 2D input, got ids of shape {ids.shape}")
    return dense_lookup(param, ids, combiner)


def dense_lookup(param: Any, ids: tf.Tensor, combiner: str | None) -> tf.Tensor:
    """ids.shape + [dimension], or with a combiner without the last dimension of the ids."""
    ids = _checked(param, ids)
    if combiner is not None and ids.shape[-1] == 1:
        return tf.nn.embedding_lookup(param, tf.squeeze(ids, -1))
    rows = tf.nn.embedding_lookup(param, ids)
    if combiner is None:
        return rows
    total = tf.reduce_sum(rows, -2) if combiner == "sum" else tf.reduce_mean(rows, -2)
    if combiner == "mean" and ids.shape[-1] in (0, None):
        return tf.math.multiply_no_nan(total, tf.cast(tf.shape(ids)[-1] > 0, total.dtype))  # no keys: 0, and not 0 / 0
    return total


def _pooled(param: Any, ids: tf.Tensor, bags: tf.Tensor, num_bags: tf.Tensor, combiner: str) -> tf.Tensor:
    """bags: the bag of each id, ascending."""
    different = tf.unique(tf.sort(ids)).y
    rows = tf.gather(param, different)
    pool = tf.sparse.segment_sum if combiner == "sum" else tf.sparse.segment_mean
    where = tf.searchsorted(different, ids)
    bags, num_bags = tf.cast(bags, tf.int64), tf.cast(num_bags, tf.int64)
    # Of no ids TensorFlow's kernels for GPUs read the last one's bag all the same. Their sum is zeros, with a gradient.
    return tf.cond(
        tf.size(ids) > 0,
        lambda: pool(rows, where, bags, num_segments=num_bags),
        lambda: tf.math.unsorted_segment_sum(rows, where, num_bags),
    )


def _checked(param: Any, ids: tf.Tensor) -> tf.Tensor:
    """The ids. Of those outside the table TensorFlow gives rows of zeros on a GPU, where the CPU raises: there the core
    looks at them, and nothing waits. XLA compiles none of its ops.
    """
    rows = param.shape[0]
    if rows is None or not tf.config.list_physical_devices("GPU") or devices.is_in_xla():
        return ids
    is_variable = isinstance(param, tf.Variable)
    with devices.beside(param) if is_variable else contextlib.nullcontext():
        return checked_ids(ids, rows, param.name if is_variable else "param")
