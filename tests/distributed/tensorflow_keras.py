# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: fit of Keras 3 and of tf_keras on several ranks."""

import numpy as np
import reference
import tensorflow as tf
from tensorflow_support import gathered, own_rows, restart

import sparse_operation_kit.tensorflow as sok


def keras_fit():
    """A Keras 3 fit with a DistributedOptimizer: dense weights are the same everywhere, and all as in one process."""
    for steps_per_execution in (1, 3):
        _keras_fit(steps_per_execution)


def _keras_fit(steps_per_execution):
    import keras

    restart(gradient="mean")
    n, rank = sok.num_ranks(), sok.rank()
    rows, batch, steps = 6, 8, 5
    rng = np.random.default_rng(3)
    # Each joined batch names every row: then the lazy Adam of tables is that of dense variables.
    ids = np.stack([rng.permutation(np.arange(batch * n) % rows) for _ in range(steps)])
    labels = rng.random((steps, batch * n, 1)).astype(np.float32)
    start = rng.random((rows, 4)).astype(np.float32)
    kernel = rng.random((4, 1)).astype(np.float32)

    def optimizer():
        return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.8))

    def dense():
        return keras.layers.Dense(
            1, kernel_initializer=keras.initializers.Constant(kernel if rank == 0 or n == 1 else 0.0)
        )

    table = sok.Variable(start, name="fit")
    embedding = sok.EmbeddingBagCollection({"fit": table}, combiners="sum")
    inputs = keras.Input((1,), dtype="int64", name="fit")
    model = keras.Model({"fit": inputs}, dense()(embedding({"fit": inputs})["fit"]))
    model.compile(sok.DistributedOptimizer(optimizer()), "mse", steps_per_execution=steps_per_execution)
    sok.broadcast_variables(model.variables)
    mine = slice(rank * batch, (rank + 1) * batch)
    model.fit(
        {"fit": ids[:, mine].reshape(-1, 1)}, labels[:, mine].reshape(-1, 1), batch_size=batch, shuffle=False, verbose=0
    )
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert model.optimizer.iterations.numpy() == steps

    # A matrix after one-hot vectors: Keras's own Embedding gives Adam duplicate rows, whose squares it adds up.
    inputs = keras.Input((rows,))
    alone_rows = keras.layers.Dense(4, use_bias=False, kernel_initializer=keras.initializers.Constant(start))
    alone_dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(kernel))
    alone = keras.Model(inputs, alone_dense(alone_rows(inputs)))
    alone.compile(optimizer(), "mse", jit_compile=False)  # as the model with a table, which XLA cannot compile
    one_hot = np.eye(rows, dtype=np.float32)[ids.reshape(-1)]
    alone.fit(one_hot, labels.reshape(-1, 1), batch_size=batch * n, shuffle=False, verbose=0)

    for actual, expected in zip(model.layers[-1].get_weights(), alone_dense.get_weights(), strict=True):
        everywhere = gathered(actual)
        assert (everywhere == everywhere[0]).all(), "dense weights differ between ranks"
        reference.assert_close(actual, expected, 1e-5)
    reference.assert_close(table.numpy(), own_rows(table, alone_rows.get_weights()[0]), 1e-5)
    restart()


def tf_keras_fit():
    """The same with tf_keras: dense weights are the same everywhere and tables learn."""
    import tf_keras

    from sparse_operation_kit.tensorflow.embedding import layer_class

    rng = np.random.default_rng(sok.rank())
    for make in (tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.SGD):
        embedding = layer_class(tf_keras)({"a": (20, 4)}, combiners="mean")

        class Model(tf_keras.Model):
            def __init__(self, embedding):
                super().__init__()
                self.embedding = embedding
                self.dense = tf_keras.layers.Dense(1, kernel_initializer="ones")

            def call(self, inputs):
                return self.dense(self.embedding(inputs)["a"])

        model = Model(embedding)
        model.compile(sok.DistributedOptimizer(make(0.05)), "mse")
        before = embedding.tables["a"].numpy()
        features = {"a": rng.integers(0, 20, (24, 2))}
        model.fit(features, rng.random((24, 1)).astype(np.float32), batch_size=8, epochs=2, verbose=0)
        for weight in model.dense.get_weights():
            everywhere = gathered(weight)
            assert (everywhere == everywhere[0]).all(), "dense weights differ between ranks"
        assert (embedding.tables["a"].numpy() != before).any()


def keras_scaled_fit():
    """Under mixed_float16 a step that the gradients of one rank forbid is skipped on all of them."""
    import keras

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        table = sok.Variable(shape=(8, 2), initializer="zeros", name="scaled")
        inputs = keras.Input((1,), dtype="int64", name="scaled")
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        vectors = sok.EmbeddingBagCollection({"scaled": table})({"scaled": inputs})
        model = keras.Model({"scaled": inputs}, dense(vectors["scaled"]))
        model.compile(sok.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
        last = sok.num_ranks() - 1
        # The last rank names a row of its own alone: the others' rows have finite gradients.
        ids = np.full((4, 1), last)
        for label, scale, changed in ((1e30, 2.0**14, False), (0.25, 2.0**14, True)):
            labels = np.full((4, 1), label if sok.rank() == last else 0.25, np.float32)
            before = [*dense.get_weights(), table.numpy()]
            model.train_on_batch({"scaled": ids}, labels)
            assert float(model.optimizer.dynamic_scale.numpy()) == scale
            after = [*dense.get_weights(), table.numpy()]
            if not changed:
                for old, new in zip(before, after, strict=True):
                    np.testing.assert_array_equal(old, new)
            elif sok.rank() == last:
                assert (after[-1] != before[-1]).any()
            assert (after[1] != before[1]).any() == changed
            for weight in after[:-1]:
                everywhere = gathered(weight)
                assert (everywhere == everywhere[0]).all(), "dense weights differ between ranks"
    finally:
        keras.mixed_precision.set_global_policy("float32")


def tf_keras_scaled_fit():
    """The same with the loss scaling of tf_keras, which `fit` puts around both kinds of its optimizers, and that around
    an OptimizerWrapper, whose dense gradients the loop averages.
    """
    import tf_keras

    from sparse_operation_kit.tensorflow.embedding import layer_class

    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for optimizer in (tf_keras.optimizers.SGD(1.0), tf_keras.optimizers.legacy.SGD(1.0)):
            embedding, dense = layer_class(tf_keras)({"a": (8, 2)}), tf_keras.layers.Dense(1, kernel_initializer="ones")
            inputs = tf_keras.Input((1,), dtype="int64", name="a")
            model = tf_keras.Model({"a": inputs}, dense(embedding({"a": inputs})["a"]))
            model.compile(sok.DistributedOptimizer(optimizer), "mse")
            _skips_together(
                lambda ids, labels, model=model: model.train_on_batch({"a": ids}, labels),
                model.optimizer,
                dense,
                embedding.tables["a"],
            )
        for optimizer in (tf_keras.optimizers.SGD(1.0), tf_keras.optimizers.legacy.SGD(1.0)):
            table = sok.Variable(shape=(8, 2), initializer="zeros")
            dense = tf_keras.layers.Dense(1, kernel_initializer="ones")
            dense.build((None, 2))
            scaled = tf_keras.mixed_precision.LossScaleOptimizer(sok.OptimizerWrapper(optimizer))

            @tf.function
            def step(ids, labels, table=table, dense=dense, scaled=scaled):
                with sok.DistributedGradientTape() as tape:
                    outputs = dense(sok.lookup_sparse(table, tf.RaggedTensor.from_tensor(ids)))
                    loss = scaled.get_scaled_loss(tf.reduce_mean((tf.cast(outputs, tf.float32) - labels) ** 2))
                variables = [table, *dense.trainable_variables]
                gradients = scaled.get_unscaled_gradients(tape.gradient(loss, variables))
                scaled.apply_gradients(zip(gradients, variables, strict=True))

            _skips_together(
                lambda ids, labels, step=step: step(tf.constant(ids), tf.constant(labels)), scaled, dense, table
            )
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


def _skips_together(step, scaled, dense, table):
    """Two steps, of which the last rank's labels forbid the first."""
    last = sok.num_ranks() - 1
    ids = np.full((4, 1), last)
    for label, changed in ((1e30, False), (0.25, True)):
        labels = np.full((4, 1), label if sok.rank() == last else 0.25, np.float32)
        before = [*dense.get_weights(), table.numpy()]
        step(ids, labels)
        assert float(scaled.loss_scale.numpy()) == 2.0**14
        after = [*dense.get_weights(), table.numpy()]
        assert (after[1] != before[1]).any() == changed, "of the dense layer's bias"
        if sok.rank() == last or not changed:
            assert (after[-1] != before[-1]).any() == changed
        for weight in after[:-1]:
            everywhere = gathered(weight)
            assert (everywhere == everywhere[0]).all(), "dense weights differ between ranks"
