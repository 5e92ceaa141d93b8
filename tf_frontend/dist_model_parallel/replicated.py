# SPDX-License-Identifier: Apache-2.0
"""Tables that every rank holds whole: weights like any other, whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sparse_operation_kit.hybrid import DistEmbeddingStrategy
from sparse_operation_kit.hybrid.layout import table_name
from sparse_operation_kit.tensorflow import devices, keras_compat
from sparse_operation_kit.tensorflow.dist_model_parallel.config import is_custom
from sparse_operation_kit.tensorflow.dist_model_parallel.custom import make_layer
from sparse_operation_kit.tensorflow.dist_model_parallel.embedding_ops import dense_lookup, embedding_lookup
from sparse_operation_kit.tensorflow.dist_model_parallel.inputs import required, within
from sparse_operation_kit.tensorflow.dist_model_parallel.tables import LocalTable, draw


class Replicated:
    """The replicated tables, in the order of their group."""

    def __init__(
        self, owner: Any, keras: Any, plan: DistEmbeddingStrategy, initializer_of: Callable[[int], Any]
    ) -> None:
        """owner: the Keras layer that lists them."""
        self.layers: list[Any] = []
        self._names: dict[int, str] = {}  # of tables, by their places
        for table, config in zip(plan.table_groups[0], plan.dp_configs, strict=True):
            if is_custom(config):
                self.layers.append(make_layer(config))
                continue
            shape = (config["input_dim"], config["output_dim"])
            name = table_name(owner.name, table)

            def first_rows(shape: Any, dtype: Any = None, name: str = name, table: int = table) -> tf.Tensor:
                return draw(initializer_of(table), name, tuple(shape), tf.as_dtype(dtype or "float32"))

            weight = keras_compat.add_weight(
                owner,
                f"table_{table}",
                shape,
                first_rows,
                dtype=keras_compat.variable_dtype(config.get("dtype")),
                trainable=config.get("trainable", True),
                regularizer=keras.regularizers.get(config.get("embeddings_regularizer")),
                constraint=keras.constraints.get(config.get("embeddings_constraint")),
            )
            self.layers.append(LocalTable(*shape, config.get("combiner"), weight))
            self._names[len(self.layers) - 1] = name
        owner._custom_replicated = [layer for layer in self.layers if not isinstance(layer, LocalTable)]

    def checked(self, place: int, value: Any, *, alone: bool) -> tuple[Any, list[tf.Tensor]]:
        """The ids of a table, others in place of those outside it, and the message of these for the lookup of the other
        tables. alone: there is none, and the ids raise tf.errors.InvalidArgumentError on this rank. As they are where
        the lookup looks at them itself, on a GPU and of layers of unknown classes, and in XLA, which compiles neither.
        """
        if place not in self._names or devices.is_on_gpu(self.weight(place)) or devices.is_in_xla():
            return value, []
        rows, name = self.layers[place].input_dim, self._names[place]
        if alone:
            return required(value, rows, name), []
        value, message = within(value, rows, name)
        return value, [message]

    def look_up(self, place: int, value: Any) -> Any:
        """The vectors of a table by its place in the group."""
        table = self.layers[place]
        if not isinstance(table, LocalTable):
            return table(value)
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return embedding_lookup(table.embeddings, value, table.combiner)
        if value.shape.rank == 1:
            return dense_lookup(keras_compat.raw(table.embeddings), value, None)
        return dense_lookup(keras_compat.raw(table.embeddings), value, table.combiner)

    def weight(self, place: int) -> Any:
        """The tf.Variable of a table."""
        return keras_compat.raw(self.keras_weight(place))

    def keras_weight(self, place: int) -> Any:
        """What Keras lists for a table."""
        table = self.layers[place]
        return table.embeddings if isinstance(table, LocalTable) else table.weights[0]
