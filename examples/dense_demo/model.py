# SPDX-License-Identifier: Apache-2.0
"""A dense embedding before fully connected layers, and its training step, by the names of SparseOperationKit 1.x."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import sparse_operation_kit as sok

from ..dlrm import dense_file
from ..dlrm.arrays import ArrayBatch
from .engines import Engine
from .settings import Settings
from .shape import FEATURE

Prepared = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Keys, labels, rows of the global batch."""


class DenseDemo(tf.keras.Model):  # type: ignore[misc]
    """Logits [n, 1] of keys [n, slots, keys]: each key's vector, one behind the other, through dense layers."""

    def __init__(self, settings: Settings, ranks: int) -> None:
        super().__init__()
        self.embedding = sok.All2AllDenseEmbedding(
            max_vocabulary_size_per_gpu=-(-settings.vocabulary // ranks),
            embedding_vec_size=settings.embedding_dim,
            slot_num=settings.slots,
            nnz_per_slot=settings.keys,
            table_name="keys",  # initial rows and dumps go by it
        )
        self.flat = tf.keras.layers.Reshape((settings.slots * settings.keys * settings.embedding_dim,))
        units = [settings.units] * settings.layers + [1]
        self.hidden = [_dense(place, width, settings.seed, "relu") for place, width in enumerate(units[:-1])]
        self.last = _dense(len(self.hidden), units[-1], settings.seed, None)

    def call(self, keys: tf.Tensor, training: bool = True) -> tf.Tensor:
        """See the class. With training=False a key that is new inserts nothing."""
        vectors = self.flat(self.embedding(keys, training=training))
        for layer in self.hidden:
            vectors = layer(vectors)
        return self.last(vectors)


def _dense(place: int, units: int, seed: int, activation: str | None) -> Any:
    # A seed of its own for each layer: the same initial values on every rank, whatever starts it.
    initializer = tf.keras.initializers.GlorotUniform(seed=seed * 1000 + place)
    return tf.keras.layers.Dense(units, activation=activation, kernel_initializer=initializer)


class TrainedModel:
    """The model on this rank, with its optimizers. Implements training.Model."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._engine = engine
        self._plugin = settings.optimizer == "plugin_adam"
        keys = tf.TensorSpec([None, settings.slots, settings.keys], tf.int64)
        labels, global_rows = tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float32)
        self._train = tf.function(self._step, input_signature=(keys, labels, global_rows))
        self._evaluate = tf.function(self._logits, input_signature=(keys,))
        with engine.scope():
            self._model = DenseDemo(settings, sok.num_ranks())
            keras = tf.keras.optimizers.SGD if settings.optimizer == "sgd" else tf.keras.optimizers.Adam
            chosen = sok.optimizers.Adam if self._plugin else keras  # type: ignore[attr-defined]
            self._table_optimizer = chosen(learning_rate=settings.learning_rate)
            self._dense_optimizer = keras(learning_rate=settings.learning_rate)
            # Makes the dense layers' variables. Nothing is inserted into the table.
            self._model(tf.zeros([0, settings.slots, settings.keys], tf.int64), training=False)
            self._dense_optimizer.build(self._split()[1])

    def prepare(self, batch: ArrayBatch) -> Prepared:
        """See training.Model."""
        return tf.constant(batch.arrays[FEATURE]), tf.constant(batch.labels), tf.constant(float(batch.global_rows))

    def train(self, batch: Prepared) -> float:
        """See training.Model."""
        return float(self._engine.run(self._train, *batch))

    def logits(self, batch: Prepared) -> npt.NDArray[np.float32]:
        """See training.Model."""
        logits: npt.NDArray[np.float32] = self._engine.run(self._evaluate, batch[0]).numpy()
        return logits

    def dump(self, folder: Path, step: int) -> None:
        """See training.Model."""
        if sok.rank() == 0:
            dense_file.save(folder, step, {name: variable.numpy() for name, variable in self._dense().items()})
        sok.dump(dense_file.tables(folder), self._split()[0], self._table_optimizer, step=step, progress=False)

    def load(self, folder: Path) -> int:
        """See training.Model."""
        found = sok.load(dense_file.tables(folder), self._split()[0], self._table_optimizer, progress=False)
        arrays = dense_file.load(folder, found.step)
        with self._engine.scope():
            for name, variable in self._dense().items():
                variable.assign(arrays[name])
        return found.step or 0

    def _split(self) -> tuple[list[Any], list[Any]]:
        """The table, and the variables of the dense layers."""
        tables, others = sok.split_embedding_variable_from_others(self._model.trainable_variables)
        return tables, others

    def _dense(self) -> dict[str, Any]:
        """The variables of the dense layers and of their optimizer, by name."""
        variables = {"model": self._split()[1], "optimizer": _variables(self._dense_optimizer)}
        return {f"{part}.{place}": each for part, found in variables.items() for place, each in enumerate(found)}

    def _step(self, keys: tf.Tensor, labels: tf.Tensor, global_rows: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = tf.squeeze(self._model(keys, training=True), axis=1)
            total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
            # Gradients are summed over the ranks: those of this are of the mean over the global batch.
            loss = total / global_rows
        tables, others = self._split()
        table_gradients, gradients = tape.gradient(loss, [tables, others])
        if self._plugin:
            self._table_optimizer.apply_gradients(zip(table_gradients, tables, strict=True))
        else:
            with sok.OptimizerScope(tables):
                self._table_optimizer.apply_gradients(zip(table_gradients, tables, strict=True))
        self._dense_optimizer.apply_gradients(zip(self._engine.summed(gradients), others, strict=True))
        return total

    def _logits(self, keys: tf.Tensor) -> tf.Tensor:
        return tf.squeeze(self._model(keys, training=False), axis=1)


def _variables(optimizer: Any) -> list[Any]:
    """All variables of an optimizer of Keras 3, whose `variables` is a list, or of tf_keras, which has a method."""
    found = optimizer.variables
    return list(found() if callable(found) else found)
