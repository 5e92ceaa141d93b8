# SPDX-License-Identifier: Apache-2.0
"""Rows of keys without bags, of several tables together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow.lookup import lookup_sparse
from sparse_operation_kit.tensorflow.table_variable import as_table


def look_up(tables: Sequence[Any], ids: Sequence[tf.Tensor], *, training: bool = True) -> list[tf.Tensor]:
    """A row for each id: for each table ids.shape + [dimension] float32, by one lookup.

    Raises as `sok.lookup_sparse`.
    """
    bags = [tf.RaggedTensor.from_uniform_row_length(tf.reshape(each, [-1]), 1, validate=False) for each in ids]
    rows = lookup_sparse(list(tables), bags, None, ["sum"] * len(bags), training=training)
    dimensions = [as_table(table).placement.dimension for table in tables]
    return [_shaped(*each) for each in zip(rows, ids, dimensions, strict=True)]


def _shaped(rows: tf.Tensor, ids: tf.Tensor, dimension: int) -> tf.Tensor:
    result = tf.reshape(rows, tf.concat([tf.shape(ids), [dimension]], 0))
    result.set_shape(ids.shape.concatenate([dimension]))
    return result
