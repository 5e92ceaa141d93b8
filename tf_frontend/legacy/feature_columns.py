# SPDX-License-Identifier: Apache-2.0
"""DeepRec's group_embedding_column_scope over TensorFlow's feature columns: embedding columns whose tables are sharded
over the ranks, and which are looked up together.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as v1_columns
from tensorflow.python.feature_column import feature_column_v2 as columns

from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.legacy import embedding_variables
from sparse_operation_kit.tensorflow.legacy.initialize import ready
from sparse_operation_kit.tensorflow.legacy.keys import graph_of_variables
from sparse_operation_kit.tensorflow.lookup import lookup_sparse, together
from sparse_operation_kit.tensorflow.variable import Variable

_columns_of_tensorflow = columns.EmbeddingColumn
_lock = threading.RLock()
_groups: list[Group] = []


class Group:
    """Embedding columns that are looked up together."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.columns: list[EmbeddingColumn] = []

    @as_written
    def tensors(
        self, cache: Any, sparse: Callable[[Any], Any], trainable: bool, asked: Iterable[Any]
    ) -> Mapping[int, tf.Tensor]:
        """id of a column -> [batch, dimension], of the columns whose features are there; once for what holds features.

        Args:
          cache: TensorFlow's holder of the features of a call.
          sparse: (ids, weights or None) of a categorical column.
          asked: columns whose features have to be there.
        """
        kept = vars(cache).setdefault("_sok_groups", {})
        if id(self) not in kept:
            there = set(cache._features)
            asked = set(asked)
            mine = [c for c in self.columns if c in asked or set(c.categorical_column.parse_example_spec) <= there]
            tables = [column.table(trainable) for column in mine]
            with together(tables):
                given = [column.pruned(sparse(column.categorical_column)) for column in mine]
            outputs = lookup_sparse(
                tables,
                [ids for ids, _ in given],
                [weights for _, weights in given],
                [column.combiner for column in mine],
            )
            kept[id(self)] = {id(column): output for column, output in zip(mine, outputs, strict=True)}
        found: Mapping[int, tf.Tensor] = kept[id(self)]
        return found


class EmbeddingColumn(columns.EmbeddingColumn):  # type: ignore[misc]
    """TensorFlow's embedding column, whose table is a `sok.Variable`, one a graph, or a dynamic table over
    `sok.categorical_column_with_embedding`.
    """

    group: Group
    _table_name: str
    _tables: weakref.WeakKeyDictionary[Any, Any]

    def __new__(cls, use_safe_embedding_lookup: bool = True, **fields: Any) -> Any:
        # TensorFlow's own __new__ looks for its class by the name that this one has meanwhile.
        make = super(_columns_of_tensorflow, cls).__new__
        column = make(cls, use_safe_embedding_lookup=use_safe_embedding_lookup, **fields)
        for option in ("max_norm", "ckpt_to_load_from", "tensor_name_in_ckpt"):
            if getattr(column, option) is not None:
                raise NotImplementedError(f"{option} of a column in group_embedding_column_scope")
        column.group = _groups[-1]
        alike = sum(other.name == column.name for other in column.group.columns)
        column._table_name = f"{column.name}_{alike}" if alike else column.name
        column.group.columns.append(column)
        column._tables = weakref.WeakKeyDictionary()
        return column

    __eq__ = object.__eq__  # columns that look alike have tables of their own
    __hash__ = object.__hash__

    def table(self, trainable: bool = True) -> Any:
        """The column's table in the current graph."""
        graph = graph_of_variables()
        if graph not in self._tables:
            ready()
            with tf.init_scope():
                self._tables[graph] = self._make(bool(trainable and self.trainable))
        return self._tables[graph]

    def _make(self, trainable: bool) -> Any:
        name = self._table_name if self.group.name is None else f"{self.group.name}/{self._table_name}"
        if isinstance(self.categorical_column, CategoricalColumnWithEmbedding):
            return embedding_variables.get_embedding_variable(
                name,
                self.dimension,
                initializer=self.initializer,
                trainable=trainable,
                ev_option=self.categorical_column.ev_option or embedding_variables.EmbeddingVariableOption(),
            )
        shape = (self.categorical_column.num_buckets, self.dimension)
        return Variable(shape=shape, initializer=self.initializer, name=name, trainable=trainable)

    def pruned(self, pair: Any) -> tuple[tf.SparseTensor, tf.SparseTensor | None]:
        """Ids and weights in two dimensions, without those that TensorFlow's columns leave out: ids below 0, and unless
        they are summed those with weights that are not above 0.
        """
        ids, weights = _flat(pair[0]), None if pair[1] is None else _flat(pair[1])
        if self.use_safe_embedding_lookup and not isinstance(self.categorical_column, CategoricalColumnWithEmbedding):
            ids, weights = _retain(ids, weights, ids.values >= 0)
        if self.use_safe_embedding_lookup and weights is not None and self.combiner != "sum":
            ids, weights = _retain(ids, weights, weights.values > 0)
        return ids, weights

    # What TensorFlow asks: input_layer of tf.compat.v1, and DenseFeatures.

    def _get_dense_tensor(self, inputs: Any, weight_collections: Any = None, trainable: Any = None) -> tf.Tensor:
        del weight_collections
        found = self.group.tensors(inputs, lambda c: c._get_sparse_tensors(inputs), trainable is not False, [self])
        return found[id(self)]

    def create_state(self, state_manager: Any) -> None:
        layer = state_manager._layer
        setattr(layer, f"table_of_{self.name}", self.table(layer.trainable))  # which tracks it

    def get_dense_tensor(self, transformation_cache: Any, state_manager: Any) -> tf.Tensor:
        sparse = lambda c: c.get_sparse_tensors(transformation_cache, state_manager)  # noqa: E731
        layer = getattr(state_manager, "_layer", None)  # of Keras's
        asked = getattr(transformation_cache, "_sok_asked", [self]) if layer is None else layer._feature_columns
        return self.group.tensors(transformation_cache, sparse, True, asked)[id(self)]

    def get_sequence_dense_tensor(self, transformation_cache: Any, state_manager: Any) -> Any:
        raise NotImplementedError(f"sequence columns in group_embedding_column_scope: {self.name}")

    def _get_sequence_dense_tensor(self, *args: Any, **options: Any) -> Any:
        self.get_sequence_dense_tensor(None, None)


def _flat(tensor: tf.SparseTensor) -> tf.SparseTensor:
    return tensor if tensor.shape.rank == 2 else tf.sparse.reshape(tensor, [tensor.dense_shape[0], -1])


def _retain(ids: Any, weights: Any, keep: tf.Tensor) -> tuple[Any, Any]:
    return tf.sparse.retain(ids, keep), None if weights is None else tf.sparse.retain(weights, keep)


@contextlib.contextmanager
def group_embedding_column_scope(name: str | None = None) -> Iterator[None]:
    """Embedding columns that are made within, by tf.feature_column.embedding_column or `sok.embedding_column`, have
    tables that are sharded over the ranks, and are looked up in one call.

    A column's numbers, and their order in an input layer, are those of TensorFlow's own columns. Use them in
    tf.compat.v1.feature_column.input_layer, DenseFeatures of tf_keras, or `sok.input_layer`; a group is looked up for
    all of its columns whose features are given. Other columns, and those made outside, stay TensorFlow's.

    Args:
      name: goes before the names of tables, which are those of their columns.

    Raises (the columns): NotImplementedError: max_norm, ckpt_to_load_from, sequence columns. ValueError: of
    `sok.get_embedding_variable`, for columns of any ids with one name that differ. Others of one name share a table.
    """
    with _lock:  # of other threads none makes columns meanwhile
        _groups.append(Group(name))
        before, columns.EmbeddingColumn = columns.EmbeddingColumn, EmbeddingColumn
        try:
            yield
        finally:
            columns.EmbeddingColumn = before
            _groups.pop()


def embedding_column(categorical_column: Any, dimension: int, combiner: str = "mean", **options: Any) -> Any:
    """tf.feature_column.embedding_column, with a table that is sharded over the ranks; outside of
    group_embedding_column_scope it is looked up by itself.

    Args: as of tf.feature_column.embedding_column.
    """
    with contextlib.nullcontext() if _groups else group_embedding_column_scope():
        return columns.embedding_column(categorical_column, dimension, combiner, **options)


@as_written
def input_layer(features: Mapping[str, Any], feature_columns: Iterable[Any]) -> tf.Tensor:
    """[batch, n]: what tf.compat.v1.feature_column.input_layer gives, also eagerly, in a tf.function and with Keras 3.

    Args:
      features: name -> tensor, as there.
      feature_columns: columns of group_embedding_column_scope, and dense ones without variables (numeric, indicator).

    Raises:
      TypeError: a column that is not dense, or an embedding column of TensorFlow itself, which keeps its variables in a
        graph or a layer.
    """
    listed = [feature_columns] if isinstance(feature_columns, columns.DenseColumn) else list(feature_columns)
    for column in listed:
        of_tensorflow = isinstance(column, (_columns_of_tensorflow, columns.SharedEmbeddingColumn))
        if not isinstance(column, columns.DenseColumn) or (of_tensorflow and not isinstance(column, EmbeddingColumn)):
            raise TypeError(
                f"feature_columns must be dense, and embedding columns those of sok.embedding_column, got {column}"
            )
    cache = columns.FeatureTransformationCache(dict(features))
    cache._sok_asked = listed
    parts = []
    for column in sorted(listed, key=lambda column: str(column.name)):
        tensor = column.get_dense_tensor(cache, None)
        parts.append(tf.reshape(tensor, [tf.shape(tensor)[0], column.variable_shape.num_elements()]))
    return tf.concat(parts, 1)


class CategoricalColumnWithEmbedding(
    columns.CategoricalColumn,  # type: ignore[misc]
    v1_columns._CategoricalColumn,  # type: ignore[misc]
    collections.namedtuple("CategoricalColumnWithEmbedding", ("key", "dtype", "ev_option")),
):
    """What `categorical_column_with_embedding` gives."""

    _is_v2_column = True

    @property
    def name(self) -> str:
        return str(self.key)

    @property
    def parse_example_spec(self) -> dict[str, Any]:
        return {self.key: tf.io.VarLenFeature(self.dtype)}

    _parse_example_spec = parse_example_spec

    @property
    def num_buckets(self) -> int:
        raise NotImplementedError(
            f"column {self.key!r} has any ids: make its embedding column by sok.embedding_column, or within "
            "group_embedding_column_scope"
        )

    _num_buckets = num_buckets

    def transform_feature(self, transformation_cache: Any, state_manager: Any) -> tf.SparseTensor:
        return self._ids(transformation_cache.get(self.key, state_manager))

    def _transform_feature(self, inputs: Any) -> tf.SparseTensor:
        return self._ids(inputs.get(self.key))

    def _ids(self, feature: Any) -> tf.SparseTensor:
        ids = columns._to_sparse_input_and_drop_ignore_values(feature)
        if ids.dtype == tf.string:
            return ids.with_values(tf.strings.to_hash_bucket_fast(ids.values, 2**63 - 1))
        return ids.with_values(tf.cast(ids.values, tf.int64))

    def get_sparse_tensors(self, transformation_cache: Any, state_manager: Any) -> Any:
        return columns.CategoricalColumn.IdWeightPair(transformation_cache.get(self, state_manager), None)

    def _get_sparse_tensors(self, inputs: Any, weight_collections: Any = None, trainable: Any = None) -> Any:
        return columns.CategoricalColumn.IdWeightPair(inputs.get(self), None)


def categorical_column_with_embedding(
    key: str, dtype: Any = tf.string, partition_num: int | None = None, ev_option: Any = None
) -> CategoricalColumnWithEmbedding:
    """A categorical column of any ids, for an embedding column over a dynamic table; strings are hashed to int64.

    Args:
      key: the feature's name.
      dtype: of the feature: tf.string, or integers.
      partition_num: accepted; without effect.
      ev_option: as of `sok.get_embedding_variable`.
    """
    del partition_num
    return CategoricalColumnWithEmbedding(key, tf.as_dtype(dtype), ev_option)
