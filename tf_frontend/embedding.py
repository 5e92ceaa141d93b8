# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBagCollection: tables and the features that look into them, as a Keras layer of either Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.arguments import (
    check_features,
    check_one_batch,
    ids_of,
    of_table,
    stacked_features,
    stacks_of,
)
from sparse_operation_kit.tensorflow import keras_compat, layer_tables
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.feature_bags import FlatBags, flat_bags, keyed_bags
from sparse_operation_kit.tensorflow.lookup import pooled, together
from sparse_operation_kit.tensorflow.table_stack import Member, TableStack, table_of
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table
from sparse_operation_kit.tensorflow.variable import Variable

_DOC = """Sharded tables and the features that are looked up in them, all with one lookup_sparse.

    Args:
      tables: table name -> a `sok.Variable` or `sok.DynamicVariable`, (rows, dimension) for a new `sok.Variable`, or
        a mapping of the keywords of a new `sok.DynamicVariable`, or with `shape` of a new `sok.Variable`.
      features: feature name -> table name; several features may share a table. None: every table is a feature of its
        name.
      combiners: "sum", "mean" or "sqrtn" for all features, or feature name -> one of them. None: "mean".
      initializer, mode: of the new tables; see `sok.Variable`.
      table_dtype: of the new tables: one for all, or table name -> dtype; None: float32.
      concat: whether the vectors of all features come as one tensor; see `sok.lookup_sparse`.
      stack: whether tables of (rows, dimension) that have one dimension and dtype become a `sok.TableStack`, one
        variable: many small tables cost the host what one does then. False: every table is a variable, and has
        gradients, of its own.
      **options: as of a Keras layer (name, trainable).

    Call it with a mapping from every feature's name to its ids: what lookup_sparse takes, or a dense integer tensor
    [batch] or [batch, k] whose rows are bags of k keys; and, as `weights`, a mapping from some or all features to
    weights of the same kind. Or with all in one, as TorchRec's KeyedJaggedTensor has them: an object whose `keys()` are
    names of features, `values()` the ids of the first, then of the second, ..., and `offsets()` [features * batch + 1];
    its `weights_or_none()` are the weights. It returns a dict, in the order of `features`, from feature to [batch,
    dimension] float32; with `concat` one tensor [batch, sum of dimensions], the features side by side in that order.

    `layer.tables[name]` are the tables, or the members of stacks, which are weights of the layer. Saving the layer's
    weights saves this rank's rows of each table, stacked or not: see `sparse_operation_kit.tensorflow.saving`. Ids in
    one tensor, of the features in their order, cost a stack least; in a mapping the batches of its features are joined
    first.

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
            stack: bool = True,
            **options: Any,
        ) -> None:
            options.setdefault("dtype", "float32")
            super().__init__(**options)
            layer_tables.prepare(self)
            made: dict[str, Any] = {}
            initializer_of: dict[str, Any] = {}  # of the single tables made here
            new = {name: t for name, t in tables.items() if not isinstance(t, Mapping) and not is_table(t)}
            stacks = []
            for names in stacks_of(new, table_dtype) if stack else []:
                stacks.append(
                    TableStack(
                        {name: new[name] for name in names},
                        initializer=initializer,
                        mode=mode,
                        dtype=of_table(table_dtype, names[0]),
                        name=f"{names[0]}_to_{names[-1]}",
                    )
                )
            self._stacks = stacks  # where tf_keras finds them
            stack_of = {name: each for each in stacks for name in each.members}
            for name, table in tables.items():
                if name in stack_of:
                    made[name] = stack_of[name].member(name)
                    continue
                if name in new:
                    table = {"shape": table}
                if isinstance(table, Mapping) and "shape" in table:
                    dtype = of_table(table_dtype, name)
                    given = {"initializer": initializer, "mode": mode, "dtype": dtype, "name": name, **table}
                    initializer_of[name] = given["initializer"]
                    table = Variable(**given)
                elif isinstance(table, Mapping):
                    table = DynamicVariable(**{"name": name, **table})
                made[name] = as_table(table)
            self.feature_tables, self.combiners = check_features(tables, features, combiners)
            self.concat = bool(concat)
            self._lookups = stacked_features(self.feature_tables, self.combiners, stack_of)
            self._params = [
                stack_of[tables[0]].choose(tables) if tables[0] in stack_of else made[tables[0]]
                for tables in ([self.feature_tables[feature] for feature in features] for features in self._lookups)
            ]
            order = [feature for features in self._lookups for feature in features]
            self._in_order = order == list(self.feature_tables)
            self._options = {"mode": mode, "stack": bool(stack)}
            self._new = list(new)
            self._initializer, self._initializer_of = initializer, initializer_of
            self.tables = made
            for table in (*stacks, *made.values()):
                if not isinstance(table, Member):
                    keras_compat.track(self, table)
            self.built = True

        def build(self, *args: Any, **shapes: Any) -> None:
            """The tables are there from the start."""

        @as_written
        def call(self, ids: Any, weights: Mapping[str, Any] | None = None, training: Any = None) -> Any:
            """See the class."""
            with together(self._params):
                inputs = self._bags_of(ids, weights)
            messages = [message for flat in inputs for message in flat.messages]
            concat = self.concat and self._in_order
            outputs = pooled(
                self._params,
                [flat.ids for flat in inputs],
                None if all(flat.weights is None for flat in inputs) else [flat.weights for flat in inputs],
                [self.combiners[features[0]] for features in self._lookups],
                training=True if training is None else training,
                concat=concat,
                messages=messages,
            )
            return outputs if concat else self._by_feature(inputs, outputs)

        def _bags_of(self, ids: Any, weights: Any) -> list[FlatBags]:
            """What each lookup takes."""
            if not isinstance(ids, Mapping):
                if weights is not None:
                    raise TypeError("the weights of ids in one tensor are its own: weights_or_none()")
                return [keyed_bags(ids, features) for features in self._lookups]
            inputs = [
                flat_bags(table_of(param), ids, weights or {}, features)
                for param, features in zip(self._params, self._lookups, strict=True)
            ]
            if self.concat:
                check_one_batch(self._lookups, [flat.sizes for flat in inputs])
            return inputs

        def _by_feature(self, inputs: Sequence[FlatBags], outputs: Sequence[Any]) -> Any:
            found: dict[str, Any] = {}
            for features, flat, output in zip(self._lookups, inputs, outputs, strict=True):
                parts = tf.split(output, len(features), axis=1) if len(features) > 1 else [output]
                if flat.sizes is not None:
                    parts = [part[:size] for part, size in zip(parts, flat.sizes, strict=True)]
                found.update(zip(features, parts, strict=True))
            in_order = {feature: found[feature] for feature in self.feature_tables}
            return tf.concat(list(in_order.values()), axis=1) if self.concat else in_order

        def compute_output_shape(self, ids: Mapping[str, Any], weights: Any = None) -> Any:
            return self._shapes(self._of_features(ids, lambda shape: shape[0]))

        def compute_output_spec(self, ids: Mapping[str, Any], *args: Any, **options: Any) -> Any:
            shapes = self._shapes(self._of_features(ids, lambda each: each.shape[0]))
            if self.concat:
                return keras.KerasTensor(shapes, "float32")
            return {feature: keras.KerasTensor(shape, "float32") for feature, shape in shapes.items()}

        def _of_features(self, ids: Mapping[str, Any], get: Callable[[Any], Any]) -> dict[str, Any]:
            features = list(self.feature_tables)
            return dict(zip(features, map(get, ids_of(ids, features)), strict=True))

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
            static = [name for name, table in self.tables.items() if not isinstance(table, DynamicVariable)]
            config.update(
                tables={name: self._config_of(name) for name in self.tables},
                features=dict(self.feature_tables),
                combiners=dict(self.combiners),
                concat=self.concat,
                initializer=self._initializer_config(self._initializer, static),
                table_dtype={name: self.tables[name].dtype.name for name in self._new},
                **self._options,
            )
            return config

        def _config_of(self, name: str) -> Any:
            """Of a table, as `tables` takes it. What is one for all new tables is said once."""
            table = self.tables[name]
            if name in self._new:
                return [table.placement.num_rows, table.placement.dimension]
            config = table.config()
            if name in self._initializer_of:
                config["initializer"] = self._initializer_config(self._initializer_of[name], [name])
            return config

        def _initializer_config(self, initializer: Any, names: Sequence[str]) -> Any:
            places = [self.tables[name].placement for name in names]
            return layer_tables.initializer_config(keras, initializer, self.name, places)

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            """See Keras; also of files in which every static table is (rows, dimension)."""
            read = functools.partial(layer_tables.initializer_of, keras)
            tables = {
                name: {**table, "initializer": read(table["initializer"])}
                if isinstance(table, Mapping) and "initializer" in table
                else table
                for name, table in config["tables"].items()
            }
            return super().from_config({**config, "tables": tables, "initializer": read(config.get("initializer"))})

    EmbeddingBagCollection.__module__ = __name__
    EmbeddingBagCollection.__qualname__ = "EmbeddingBagCollection"
    return EmbeddingBagCollection


def __getattr__(name: str) -> Any:
    # Keras is imported when the layer is asked for, not with the package.
    if name == "EmbeddingBagCollection":
        _ = (
            tf.keras.layers
        )  # tf.keras is a lazy stand-in until its first use; the class must be that of the real module
        return layer_class(tf.keras)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
