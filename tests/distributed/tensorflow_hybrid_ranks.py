# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_hybrid.py: ranks that have no table of their own to train, and regularizers of tables."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from sparse_operation_kit.tensorflow import dist_model_parallel as dmp


def ranks_without_tables_to_train():
    """In a tf.function a rank whose tables are frozen, or have no input, takes part in the exchange of gradients."""
    shapes = [(6, 4), *[(5, 4)] * (hvd.size() - 1)]
    for trainable, inputs in ((False, list(range(hvd.size()))), (True, list(range(1, hvd.size())))):
        embeddings = [dmp.Embedding(*s, combiner="sum", trainable=trainable or t > 0) for t, s in enumerate(shapes)]
        layer = dmp.DistributedEmbedding(embeddings, input_table_map=inputs, name=f"without_{trainable}")
        if not inputs:
            continue
        dense, optimizer = tf.Variable(2.0), dmp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))

        @tf.function
        def step(ids, layer=layer, dense=dense, optimizer=optimizer, inputs=inputs):
            with tf.GradientTape() as tape:
                loss = dense * tf.add_n([tf.reduce_sum(o) for o in layer([ids] * len(inputs))])
            variables = [*layer.trainable_variables, dense]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        before = layer.get_weights(True)
        step(tf.constant([[1]]))
        step(tf.constant([[2]]))
        for t, (old, new) in enumerate(zip(before, layer.get_weights(True), strict=True)):
            changed = (np.asarray(old) != np.asarray(new)).any(1)
            assert changed.tolist() == [r in (1, 2) and t > 0 for r in range(len(old))], (t, changed)


def regularized():
    """A penalty of the tables' elements trains them as in one process, however they lie. A loss is of a rank's rows."""
    shapes = [(6, 2), (20, 4), (16, 4), (40, 8)]  # replicated, whole, cut by columns, by rows
    options = {"data_parallel_threshold": 12, "row_slice_threshold": 300, "column_slice_threshold": 70}
    for wrap_optimizer in (False, True):
        embeddings = [dmp.Embedding(*shape, combiner="sum", embeddings_regularizer="l2") for shape in shapes]
        layer = dmp.DistributedEmbedding(embeddings, strategy="memory_balanced", name="regularized", **options)
        layer.build()
        optimizer = tf.keras.optimizers.SGD(0.5)
        if wrap_optimizer:
            optimizer = dmp.DistributedOptimizer(optimizer)
        before = layer.get_weights(True)
        assert layer.strategy.table_groups[0] == [0] and layer.strategy.table_groups[2] == [3]
        with tf.GradientTape() as tape:
            outputs = layer([tf.constant([[1]])] * len(shapes))
            penalty = tf.add_n(layer.losses)
            loss = tf.add_n([*map(tf.reduce_sum, outputs), penalty])
        if not wrap_optimizer:
            tape = dmp.DistributedGradientTape(tape)
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for old, new in zip(before, layer.get_weights(True), strict=True):
            wanted = old - 0.5 * (2 * 0.01 * old + (np.arange(len(old)) == 1)[:, None])
            np.testing.assert_allclose(new, wanted, rtol=1e-6, atol=1e-6)
        penalties = [0.01 * np.square(old).sum() for old in before]
        of_parts = float(hvd.allreduce(penalty - penalties[0], op=hvd.Sum))  # the first is replicated
        np.testing.assert_allclose(of_parts, sum(penalties[1:]), rtol=1e-5)
