# SPDX-License-Identifier: Apache-2.0
"""The tables of SparseOperationKit 1.x's layers: those of this version, under the names that its scripts ask for."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit import placement
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.initializers import as_spec
from sparse_operation_kit.tensorflow.table_variable import TableVariable
from sparse_operation_kit.tensorflow.variable import Variable

KEY_DTYPES = (tf.int64, tf.uint32, tf.int32)

_given: set[str] = set()
_names = {base: placement.name_counter() for base in ("EmbeddingVariable", "EmbeddingWeights")}


def new_name(base: str) -> str:
    """The name of a table that was made without one: a base of 1.x's, numbered from the second on. Names that tables
    were given before, as those of a model that was loaded, are left out.
    """
    while True:
        number = next(_names[base])
        name = f"{base}_{number}" if number else base
        if name not in _given:
            return name


class EmbeddingVariable:
    """What both kinds of tables have besides.

    Attributes:
      m_var_name: the table's name, after which `Saver` names files.
      key_dtype: of the keys that go in and that files hold: tf.int64, tf.uint32 or tf.int32.
      rows_per_rank: the most rows that a rank holds, `max_vocabulary_size_per_gpu`.
      values: the table itself: scripts for a strategy look for the variables of all replicas here.
    """

    table_name: str
    key_dtype: tf.DType = tf.int64
    rows_per_rank: int = 0

    @property
    def m_var_name(self) -> str:
        return self.table_name

    @property
    def values(self) -> tuple[Any]:
        return (self,)


class StaticEmbeddingVariable(EmbeddingVariable, Variable):
    """A table of use_hashtable=False: keys in [0, N max_vocabulary_size_per_gpu), key k on rank k mod N."""


class HashEmbeddingVariable(EmbeddingVariable, DynamicVariable):
    """A table of use_hashtable=True: any key, key k on rank k mod N, which refuses more than it has rows for."""


def make(
    rows_per_rank: int,
    dimension: int,
    use_hashtable: bool,
    key_dtype: Any,
    initializer: Any,
    dtype: Any,
    name: str | None,
    trainable: bool,
    evict_strategy: str | None = None,
) -> TableVariable:
    """The table of a layer, as that says.

    Raises ValueError for no rows; TypeError for another key_dtype, or an initializer of a hash table that does not draw
    each element by itself.
    """
    if rows_per_rank < 1:
        raise ValueError(f"max_vocabulary_size_per_gpu must be 1 at least, got {rows_per_rank}")
    keys = as_key_dtype(key_dtype)
    if name is None:
        name = new_name("EmbeddingVariable")
    else:
        _given.add(name)
    rows = rows_per_rank * runtime.num_ranks()
    if isinstance(initializer, (str, dict)):
        initializer = tf.keras.initializers.get(initializer)
    table: Any
    if use_hashtable:
        place = placement.Placement(rows, dimension, -1, runtime.num_ranks(), runtime.rank())
        spec = None if initializer is None else as_spec(initializer, place)
        if initializer is not None and spec is None:
            raise TypeError(
                f"table '{name}': the rows of a hash table are drawn when keys come, which {initializer!r} cannot; "
                "use_hashtable=False takes any initializer, Saver().load_embedding_values any rows"
            )
        table = HashEmbeddingVariable(
            dimension,
            spec,
            var_type="hbm",
            name=name,
            trainable=trainable,
            key_type=tf.int32 if keys == tf.int32 else tf.int64,
            dtype=dtype,
            init_capacity=rows_per_rank,
            max_capacity=rows_per_rank,
            evict_strategy=evict_strategy,
        )
    else:
        table = StaticEmbeddingVariable(
            shape=(rows, dimension), initializer=initializer, dtype=dtype, name=name, trainable=trainable
        )
    table.key_dtype, table.rows_per_rank = keys, rows_per_rank
    return table


def as_key_dtype(value: Any) -> tf.DType:
    """One of KEY_DTYPES; None is tf.int64. TypeError for another."""
    dtype = tf.int64 if value is None else tf.as_dtype(value)
    if dtype not in KEY_DTYPES:
        raise TypeError(f"key_dtype must be {', '.join(known.name for known in KEY_DTYPES)} or None, got {value!r}")
    return dtype
