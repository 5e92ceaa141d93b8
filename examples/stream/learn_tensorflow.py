# SPDX-License-Identifier: Apache-2.0
"""The stream's model in TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from examples.stream.stream import Array, Batch, Stream


class Learner:
    """Sums the rows of a sample's ids, and a linear layer makes log odds of them."""

    def __init__(self, stream: Stream, dimension: int, learning_rate: float, options: dict[str, Any]) -> None:
        sok.init()
        tf.keras.utils.set_random_seed(0)
        self._table = sok.DynamicVariable(dimension, "normal", name="ids", **options)
        self._dense = tf.keras.layers.Dense(1)
        self._dense.build((None, dimension))
        self._optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(learning_rate))
        self._ids_per_sample = stream.ids_per_sample

    @tf.function
    def _step(self, ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            bags = tf.RaggedTensor.from_uniform_row_length(ids, self._ids_per_sample)
            odds = self._dense(sok.lookup_sparse(self._table, bags, combiners="sum"))[:, 0]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, odds))
        variables = [self._table, *self._dense.trainable_variables]
        self._optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def train(self, batch: Batch) -> float:
        """One step; the mean loss before it."""
        return float(self._step(tf.constant(batch.ids), tf.constant(batch.labels)))

    def keys(self) -> Array:
        """Those that the table holds."""
        return self._table.indices.numpy()
