# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow side of test_hybrid_checkpoint.py; see hybrid_matrix.py."""

import hybrid_matrix as matrix
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp

MAKE = {
    "Adagrad": lambda: tf.keras.optimizers.Adagrad(matrix.RATE, 0.125, epsilon=1e-12),
    "Adam": lambda: tf.keras.optimizers.Adam(matrix.RATE, 0.5, 0.75, epsilon=1e-12),
    "RowWiseAdagrad": lambda: sok.RowWiseAdagrad(matrix.RATE, 0.125),
}


class Frontend:
    sok = sok

    def __init__(self):
        self.rank, self.num_ranks = sok.rank(), sok.num_ranks()

    def layer(self, placement):
        tables = [dmp.Embedding(*shape, combiner="sum") for shape in matrix.TABLES]
        options = matrix.options_of(placement, lambda constraints: dmp.plan(tables, constraints=constraints))
        layer = dmp.DistributedEmbedding(tables, name="layer", **options)
        layer.build()
        return layer

    def optimizer(self, name, layer):
        return sok.OptimizerWrapper(MAKE[name]())

    def listed(self, layer):
        """Any of its tables stands for all, where this rank has some."""
        return sok.filter_variables(layer.trainable_variables)[0] or layer

    def step(self, layer, optimizer, ids, upstream):
        variables = layer.trainable_variables
        with tf.GradientTape() as tape:
            outputs = layer([tf.constant(each) for each in ids])
            loss = tf.add_n([tf.reduce_sum(o * u) for o, u in zip(outputs, upstream, strict=True)])
        gradients = dmp.DistributedGradientTape(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))


if __name__ == "__main__":
    dmp.DistributedEmbedding([dmp.Embedding(8, 8)])  # initialises Horovod too
    matrix.main(Frontend())
