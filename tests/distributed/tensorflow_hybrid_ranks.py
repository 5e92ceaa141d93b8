# SPDX-License-Identifier: Apache-2.0
"""The check of tensorflow_hybrid.py that is about ranks which have no table of their own to train."""

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
