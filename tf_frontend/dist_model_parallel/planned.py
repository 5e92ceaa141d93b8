# SPDX-License-Identifier: Apache-2.0
"""What a DistributedEmbedding knows of its plan and holds of its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from sparse_operation_kit.hybrid import DistEmbeddingStrategy, Plan
from sparse_operation_kit.hybrid.dumping import LayerTables
from sparse_operation_kit.hybrid.layout import layout_of
from sparse_operation_kit.hybrid.request import Request
from sparse_operation_kit.placement import DISTRIBUTED
from sparse_operation_kit.tensorflow import devices, keras_compat
from sparse_operation_kit.tensorflow.dist_model_parallel.config import is_custom
from sparse_operation_kit.tensorflow.dist_model_parallel.custom import CustomLayers
from sparse_operation_kit.tensorflow.dist_model_parallel.replicated import Replicated
from sparse_operation_kit.tensorflow.dist_model_parallel.tables import LocalTable, Tables


class Planned:
    """A plain object: tf_keras does not look for weights in it."""

    replicated: Replicated
    tables: Tables
    custom: CustomLayers

    def __init__(self, plan: DistEmbeddingStrategy, request: Request | None, given: Any) -> None:
        """request: what it was planned for, where it was. given: the layer's argument `strategy`."""
        self.strategy, self.request = plan, request
        self.given_strategy = given if request is None else Plan(plan, request).to_config()
        self.layout = layout_of(plan)
        self.tables_of = self.layout.tables_of
        self.rank_widths = self.layout.rank_widths
        self._embeddings: list[Any] = []

    def together(self, numbers: Sequence[int] | None) -> AbstractContextManager[None]:
        """For what is made of inputs before they are looked up: what it refuses eagerly is an error of all ranks, but
        not where all tables are replicated. numbers: of the inputs; None: those of `look_up_own`.
        """
        parts = self.tables.asked(numbers)
        return self.tables.together(parts) if parts else self.custom.together()

    def dense_tables(self) -> list[Any]:
        """Variables that are no tables of this package: replicated ones, and those of layers of unknown classes."""
        return [*self._replicated().values(), *(layer.weights[0] for layer in self.custom.layers.values())]

    def _replicated(self) -> dict[int, Any]:
        tables = self.strategy.table_groups[0]
        return {table: self.replicated.keras_weight(place) for place, table in enumerate(tables)}

    def layer_tables(self, layer: str, rank: int) -> LayerTables:
        """For dump and load; layer: its name."""
        configs = self.strategy.global_configs
        own: dict[int, Any] = {}
        for number in self.layout.of_rank(rank):
            custom = self.custom.layers.get(number)
            own[number] = self.tables.variables[number] if custom is None else custom.weights[0]
        dtypes = [keras_compat.variable_dtype(config.get("dtype")) for config in configs]
        return LayerTables(layer, self.layout, configs, dtypes, own, self._replicated())

    def held_bytes(self, rank: int) -> dict[str, Any]:
        """Bytes of what this rank holds of tables, where tables are: on a GPU if there is one, and in host memory."""
        own = [self.variable(number) for number in self.layout.of_rank(rank)]
        replicated = [self.replicated.weight(place) for place in range(len(self.strategy.table_groups[0]))]
        held = {"device_bytes": 0, "host_bytes": 0}
        has_gpu = devices.gpu_of() is not None
        for variable in (*own, *replicated):
            on_host = has_gpu and not devices.is_on_gpu(variable)
            held["host_bytes" if on_host else "device_bytes"] += int(tf.size(variable)) * variable.dtype.size
        return held

    def initializers(self, keras: Any) -> Callable[[int], Any]:
        """The initializer of each table."""
        configs = self.strategy.global_configs
        return lambda table: keras.initializers.get(configs[table].get("embeddings_initializer", "uniform"))

    def local_tables(self, rank: int, *, row_sliced: bool) -> list[Any]:
        """What this rank has rows of: layers of unknown classes, or `LocalTable`s."""
        result = []
        for number in self.layout.of_rank(rank):
            planned = self.layout.variables[number]
            if (planned.owner == DISTRIBUTED) != row_sliced:
                continue
            if number in self.custom.layers:
                result.append(self.custom.layers[number])
                continue
            variable = self.tables.variables[number]
            rows = variable.placement.local_rows
            result.append(LocalTable(rows, planned.columns, planned.config.get("combiner"), variable))
        return result

    def variable(self, number: int) -> Any:
        """The tf.Variable of this rank's rows of a planned variable."""
        if number in self.custom.layers:
            return keras_compat.raw(self.custom.layers[number].weights[0])
        return self.tables.variables[number]

    def add_losses(self, layer: Any, keras: Any, results: Sequence[Any], rank: int, num_ranks: int) -> None:
        """What regularizers of the tables, and of what is looked up, add to the loss."""
        for number in self.layout.of_rank(rank):
            config = self.layout.variables[number].config
            regularizer = None if is_custom(config) else keras.regularizers.get(config.get("embeddings_regularizer"))
            if regularizer is not None:
                loss = regularizer(self.tables.variables[number])
                # The gradient is divided by the number of ranks later, as that of what all ranks look up.
                layer.add_loss(loss + (num_ranks - 1) * (loss - tf.stop_gradient(loss)))
        for table, result in zip(self.tables_of, results, strict=True):
            config = self.strategy.global_configs[table]
            regularizer = None if is_custom(config) else keras.regularizers.get(config.get("activity_regularizer"))
            if regularizer is not None:
                values = result.flat_values if isinstance(result, tf.RaggedTensor) else result
                batch = tf.cast(tf.maximum(tf.shape(values)[0], 1), values.dtype)
                layer.add_loss(regularizer(values) / batch)

    def serialized(self, keras: Any) -> list[Any]:
        """The embeddings in plain data."""
        if not self._embeddings:  # and kept: Keras's files tell objects apart by id(), and a freed one's comes again
            for config in self.strategy.global_configs:
                options = {name: value for name, value in config.items() if name != "layer_type"}
                self._embeddings.append(config["layer_type"].from_config(options))
        return [keras.layers.serialize(each) for each in self._embeddings]
