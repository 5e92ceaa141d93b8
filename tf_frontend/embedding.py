# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBagCollection: tables and the features that look into them, as a Keras layer of either Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.arguments import check_features, dtype_of_table
from sparse_operation_kit.tensorflow import keras_compat, layer_tables
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.lookup import lookup_sparse
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table
from sparse_operation_kit.tensorflow.variable import Variable

_DOC = """Sharded tables and the features that are looked up in them, all with one lookup_sparse.

    Args:
      tables: table name -> a `sok.Variable` or `sok.DynamicVariable`, (rows, dimension) for a new `sok.Variable`, or
        a mapping of the keywords of a new `sok.DynamicVariable`.
      features: feature name -> table name; several features may share a table. None: every table is a feature of its
        name.
      combiners: "sum", "mean" or "sqrtn" for all features, or feature name -> one of them. None: "mean".
      initializer, mode: of the new tables; see `sok.Variable`.
      table_dtype: of the new tables: one for all, or table name -> dtype; None: float32.
      concat: whether the vectors of all features come as one tensor; see `sok.lookup_sparse`.
      **options: as of a Keras layer (name, trainable).

    Call it with a mapping from every feature's name to its ids: what lookup_sparse takes, or a dense integer tensor
    [batch] or [batch, k] whose rows are bags of k keys; and, as `weights`, a mapping from some or all features to
    weights of the same kind. It returns a dict, in the order of `features`, from feature to [batch, dimension] float32;
    with `concat` one tensor [batch, sum of dimensions], the features side by side in that order.

    The tables are weights of the layer, `layer.tables[name]`. Saving the layer's weights saves this rank's rows: see
    `sparse_operation_kit.tensorflow.saving`.

    Raises:
      ValueError: a feature of a table that is not there, a feature without combiner, an unknown combiner.
      KeyError: a call without the ids of a feature.
      Otherwise as `sok.Variable` and `sok.lookup_sparse`.
    """


_classes: dict[Any, Any] = {}


def layer_class(keras: Any) -> Any:
    """EmbeddingBagCollection as a layer of the given Keras: the module `keras`, `tf_keras` or `tf.keras`."""
    base = keras.layers.Layer
    if base not in _classes:
        _classes[base] = _make_class(keras)
    return _classes[base]


def _make_class(keras: Any) -> Any:

    @keras.utils.register_keras_serializable(package="sparse_operation_kit")
    class EmbeddingBagCollection(keras.layers.Layer):  # type: ignore[misc]
        __doc__ = _DOC

        def __init__(
            self,
            tables: Mapping[str, TableVariable | Sequence[int] | Mapping[str, Any]],
            features: Mapping[str, str] | None = None,
            combiners: str | Mapping[str, str] | None = None,
            *,
            initializer: Any = None,
            mode: str | None = None,
            table_dtype: Any = None,
            concat: bool = False,
            **options: Any,
        ) -> None:
            options.setdefault("dtype", "float32")
            super().__init__(**options)
            layer_tables.prepare(self)
            made: dict[str, TableVariable] = {}
            for name, table in tables.items():
                if isinstance(table, Mapping):
                    table = DynamicVariable(**{"name": name, "trainable": options.get("trainable", True), **table})
                elif not is_table(table):
                    table = Variable(
                        shape=table,
                        initializer=initializer,
                        mode=mode,
                        dtype=dtype_of_table(table_dtype, name),
                        name=name,
                        trainable=options.get("trainable", True),
                    )
                made[name] = as_table(table)
            self.feature_tables, self.combiners = check_features(tables, features, combiners)
            self.concat = bool(concat)
            self._options = {
                "initializer": initializer if isinstance(initializer, (str, float, int)) else None,
                "mode": mode,
                "table_dtype": {name: table.dtype.name for name, table in made.items()},
            }
            self.tables = made
            for table in made.values():
                keras_compat.track(self, table)
            self.built = True

        def build(self, *args: Any, **shapes: Any) -> None:
            """The tables are there from the start."""

        @as_written
        def call(self, ids: Mapping[str, Any], weights: Mapping[str, Any] | None = None, training: Any = None) -> Any:
            """See the class."""
            outputs = lookup_sparse(
                [self.tables[table] for table in self.feature_tables.values()],
                [_as_bags(ids[feature]) for feature in self.feature_tables],
                None if weights is None else [_as_bags(weights.get(feature)) for feature in self.feature_tables],
                [self.combiners[feature] for feature in self.feature_tables],
                training=bool(training) if isinstance(training, bool) else True,
                concat=self.concat,
            )
            if self.concat:
                return outputs
            return dict(zip(self.feature_tables, outputs, strict=True))

        def compute_output_shape(self, ids: Mapping[str, Any], weights: Any = None) -> Any:
            return self._shapes({feature: ids[feature][0] for feature in self.feature_tables})

        def compute_output_spec(self, ids: Mapping[str, Any], *args: Any, **options: Any) -> Any:
            shapes = self._shapes({feature: ids[feature].shape[0] for feature in self.feature_tables})
            if self.concat:
                return keras.KerasTensor(shapes, "float32")
            return {feature: keras.KerasTensor(shape, "float32") for feature, shape in shapes.items()}

        def _shapes(self, batch: Mapping[str, Any]) -> Any:
            """The shape of what `call` gives; batch: the bags of each feature."""
            width = {feature: self.tables[table].placement.dimension for feature, table in self.feature_tables.items()}
            if self.concat:
                return next(iter(batch.values())), sum(width.values())
            return {feature: (batch[feature], width[feature]) for feature in width}

        def save_own_variables(self, store: Any) -> None:
            layer_tables.save(store, self.tables)

        def load_own_variables(self, store: Any) -> None:
            layer_tables.load(store, self.tables)

        def get_config(self) -> dict[str, Any]:
            config = dict(super().get_config())
            config.update(
                tables={name: layer_tables.config_of(table) for name, table in self.tables.items()},
                features=dict(self.feature_tables),
                combiners=dict(self.combiners),
                concat=self.concat,
                **self._options,
            )
            return config

    EmbeddingBagCollection.__module__ = __name__
    EmbeddingBagCollection.__qualname__ = "EmbeddingBagCollection"
    return EmbeddingBagCollection


def _as_bags(ids: Any) -> Any:
    """Dense ids [batch] or [batch, k] as ragged ones; anything else as it is."""
    if ids is None or isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        return ids
    dense = tf.convert_to_tensor(ids)
    if dense.shape.rank not in (1, 2):
        raise ValueError(f"dense ids must be [batch] or [batch, k], got the shape {dense.shape}")
    if dense.shape.rank == 1:
        return tf.RaggedTensor.from_uniform_row_length(dense, 1, validate=False)
    shape = tf.shape(dense, tf.int64)
    length = shape[1] if dense.shape[1] is None else dense.shape[1]
    return tf.RaggedTensor.from_uniform_row_length(tf.reshape(dense, [-1]), length, nrows=shape[0], validate=False)


def __getattr__(name: str) -> Any:
    # Keras is imported when the layer is asked for, not with the package.
    if name == "EmbeddingBagCollection":
        _ = (
            tf.keras.layers
        )  # tf.keras is a lazy stand-in until its first use; the class must be that of the real module
        return layer_class(tf.keras)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
