# SPDX-License-Identifier: Apache-2.0
"""EmbeddingBagCollection, compile and fit, DistributedOptimizer and DistributedGradientTape in one process."""

import os
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow.embedding import layer_class
from sparse_operation_kit.tensorflow.gradient import PendingGradient

RNG = np.random.default_rng(8)
IDS = RNG.integers(0, 50, (64, 3))
LABELS = RNG.random((64, 1)).astype(np.float32)


def keras_model(embedding):
    inputs = {name: keras.Input((3,), dtype="int64", name=name) for name in ("a", "b")}
    vectors = embedding(inputs)
    output = keras.layers.Dense(1)(keras.layers.Concatenate()([vectors["a"], vectors["b"]]))
    return keras.Model(inputs, output)


class TfKerasModel(tf_keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.dense = tf_keras.layers.Dense(1)

    def call(self, inputs):
        vectors = self.embedding(inputs)
        return self.dense(tf.concat([vectors["a"], vectors["b"]], 1))


def fit(model, optimizer):
    model.compile(optimizer, "mse")
    history = model.fit({"a": IDS, "b": IDS}, LABELS, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert history[-1] < 0.5 * history[0]
    return history


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: sok.DistributedOptimizer(o)], ids=["plain", "distributed"])
def test_fit_of_keras(wrap, tmp_path):
    embedding = sok.EmbeddingBagCollection({"a": (50, 8), "b": (50, 4)}, combiners={"a": "sum", "b": "mean"})
    model = keras_model(embedding)
    assert [v.path for v in model.trainable_variables][:2] == ["a", "b"]
    optimizer = wrap(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.9)))
    assert isinstance(optimizer, keras.optimizers.Adam)
    before = [table.numpy() for table in embedding.tables.values()]
    fit(model, optimizer)
    assert optimizer.iterations == 32
    for table, old in zip(embedding.tables.values(), before, strict=True):
        assert (table.numpy() != old).any(axis=1).sum() > 40
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict({"a": IDS, "b": IDS}, verbose=0), model.predict({"a": IDS, "b": IDS}, verbose=0)
    )
    assert loaded.optimizer.get_config() == optimizer.get_config()


@pytest.mark.parametrize("how", ["tape", "optimizer", "function", "xla"])
@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_row_of_a_dense_embedding_has_one_gradient(kit, how):
    """On one rank as on several: Keras 3 by itself squares each of a row's summands."""
    layer = kit.layers.Embedding(4, 2, embeddings_initializer="ones")
    layer(np.zeros((1, 1)))
    optimizer = kit.optimizers.Adagrad(0.5, initial_accumulator_value=0.0, epsilon=1e-9)
    if how != "tape":
        optimizer = sok.DistributedOptimizer(optimizer)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([[1, 3, 1, 1]])))
        if how == "tape":
            tape = sok.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, layer.trainable_weights)
        optimizer.apply_gradients(zip(gradients, layer.trainable_weights, strict=True))

    (tf.function(step, jit_compile=how == "xla") if how in ("function", "xla") else step)()
    np.testing.assert_allclose(np.asarray(layer.weights[0])[:, 0], [1, 0.5, 1, 0.5], rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: sok.DistributedOptimizer(o)], ids=["plain", "distributed"])
def test_steps_per_execution(wrap):
    """Several steps in one call of Keras's function, the last of them with a smaller batch, are those steps."""
    results = []
    for steps in (1, 3):
        keras.utils.set_random_seed(4)
        embedding = sok.EmbeddingBagCollection({"a": (50, 8), "b": (50, 4)}, combiners="sum")
        model = keras_model(embedding)
        model.compile(wrap(keras.optimizers.Adam(0.01)), "mse", steps_per_execution=steps)
        model.fit({"a": IDS, "b": IDS}, LABELS, epochs=2, batch_size=15, shuffle=False, verbose=0)
        assert model.optimizer.iterations == 10
        results.append([weight.numpy() for weight in model.weights])
    for one, several in zip(*results, strict=True):
        np.testing.assert_array_equal(one, several)


def test_distributed_optimizer_has_no_states_of_tables_in_keras():
    embedding = sok.EmbeddingBagCollection({"a": (50, 8), "b": (50, 4)})
    model = keras_model(embedding)
    optimizer = sok.DistributedOptimizer(keras.optimizers.Adam(0.01))
    fit(model, optimizer)
    assert all(tuple(v.shape) not in ((50, 8), (50, 4)) for v in optimizer.variables)
    assert set(optimizer.sok_slots(embedding.tables["a"])) == {"m", "v"}
    assert sok.DistributedOptimizer(optimizer) is optimizer
    copy = type(optimizer).from_config(optimizer.get_config())
    fit(keras_model(sok.EmbeddingBagCollection({"a": (50, 8), "b": (50, 4)})), copy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_keras.optimizers.Adam(0.01),
        lambda: sok.DistributedOptimizer(tf_keras.optimizers.Adam(0.01)),
        lambda: tf_keras.optimizers.legacy.Adam(0.01),
        lambda: sok.DistributedOptimizer(tf_keras.optimizers.legacy.Adam(0.01)),
    ],
    ids=["plain", "distributed", "legacy", "legacy distributed"],
)
def test_fit_of_tf_keras(make):
    model = TfKerasModel(layer_class(tf_keras)({"a": (50, 8), "b": (50, 4)}))
    fit(model, make())
    assert len(model.trainable_variables) == 4


def test_distributed_optimizer_equals_the_plain_one():
    """With every row in every batch the fused Adam is Keras's, dense weights included."""
    ids = np.tile(np.arange(6), (4, 2)).reshape(-1, 1)
    labels = RNG.random((len(ids), 1)).astype(np.float32)
    start, kernel = RNG.random((6, 4)).astype(np.float32), RNG.random((4, 1)).astype(np.float32)
    weights = []
    for wrap in (lambda o: o, sok.DistributedOptimizer):
        table = sok.Variable(start, name="same")
        inputs = keras.Input((1,), dtype="int32", name="same")
        dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(kernel))
        model = keras.Model(
            {"same": inputs}, dense(sok.EmbeddingBagCollection({"same": table})({"same": inputs})["same"])
        )
        model.compile(wrap(keras.optimizers.Adam(0.05)), "mse")
        model.fit({"same": ids}, labels, batch_size=12, epochs=2, shuffle=False, verbose=0)
        weights.append([table.numpy(), *dense.get_weights()])
    for plain, distributed in zip(*weights, strict=True):
        np.testing.assert_allclose(distributed, plain, rtol=1e-4, atol=1e-5)


def test_ragged_and_sparse_data_set():
    ragged = tf.RaggedTensor.from_row_lengths(RNG.integers(0, 50, 96), RNG.permutation([1, 2] * 32))
    data = tf.data.Dataset.from_tensor_slices((ragged, LABELS)).batch(16)
    data = data.map(lambda ids, y: ({"a": ids, "b": ids.to_sparse()}, y))
    for library in (keras, tf_keras):
        embedding = layer_class(library)({"a": (50, 8), "b": (50, 4)})

        base: Any = library.Model

        class Model(base):
            def __init__(self, embedding, dense):
                super().__init__()
                self.embedding, self.dense = embedding, dense

            def call(self, inputs):
                vectors = self.embedding(inputs)
                return self.dense(tf.concat([vectors["a"], vectors["b"]], 1))

        model = Model(embedding, library.layers.Dense(1))
        model.compile(library.optimizers.SGD(0.1), "mse")
        history = model.fit(data, epochs=2, verbose=0).history["loss"]
        assert history[1] < history[0]


LEGACY = """
import sys
import numpy as np, tensorflow as tf
import sparse_operation_kit as sok
sok.init()
loaded = tf.keras.models.load_model(sys.argv[1])
assert type(loaded.optimizer).__name__ == "DistributedAdam" and int(loaded.optimizer.iterations) == 4
(layer,) = (layer for layer in loaded.layers if isinstance(layer, sok.EmbeddingBagCollection))
assert set(loaded.optimizer.sok_slots(layer.tables["a"])) == {"m", "v"}
loaded.fit({"a": np.arange(20).reshape(-1, 2)}, np.ones((10, 1)), verbose=0)
layer = sok.EmbeddingBagCollection({"a": (20, 4)})
assert isinstance(layer, tf.keras.layers.Layer) and "tf_keras" in type(layer).__mro__[1].__module__
class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.layer, self.dense = layer, tf.keras.layers.Dense(1)
    def call(self, inputs):
        return self.dense(self.layer(inputs)["a"])
model = Model()
model.compile(sok.DistributedOptimizer(tf.keras.optimizers.Adam(0.05)), "mse")
ids = np.arange(40).reshape(-1, 2) % 20
history = model.fit({"a": ids}, np.ones((20, 1)), epochs=20, verbose=0).history["loss"]
assert history[-1] < 0.5 * history[0], history
wrapper = sok.OptimizerWrapper(tf.optimizers.SGD(0.1))
table = layer.tables["a"]
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1, 2]])))
wrapper.apply_gradients(zip(tape.gradient(loss, [table]), [table]))
assert "keras" not in sys.modules, "Keras 3 was imported"
"""


def test_legacy_keras_of_tensorflow(tmp_path):
    """TF_USE_LEGACY_KERAS=1, in a process of its own, through the root package as older scripts import it, which also
    loads what another process saved.
    """
    inputs = {"a": tf_keras.Input((2,), dtype="int64", name="a")}
    vectors = layer_class(tf_keras)({"a": (20, 4)})(inputs)
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(vectors["a"]))
    model.compile(sok.DistributedOptimizer(tf_keras.optimizers.Adam(0.05)), "mse")
    model.fit({"a": IDS[:, :2] % 20}, LABELS, batch_size=16, verbose=0)
    model.save(tmp_path / "model.keras")
    command = [sys.executable, "-c", LEGACY, str(tmp_path / "model.keras")]
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_layer_arguments():
    shared = sok.EmbeddingBagCollection(
        {"t": (10, 4)}, {"x": "t", "y": "t"}, {"x": "sum", "y": "SQRTN"}, initializer="ones"
    )
    outputs = shared({"x": tf.ragged.constant([[1, 2, 3, 4]]), "y": tf.constant([[1, 2, 3, 4]])})
    assert list(outputs) == ["x", "y"]
    np.testing.assert_allclose([float(outputs[name][0, 0]) for name in outputs], [4, 2])
    ids = tf.ragged.constant([[1, 2]])
    weighted = shared({"x": ids, "y": ids}, {"x": ids.with_values(tf.constant([0.5, 0.25]))})
    np.testing.assert_allclose(weighted["x"][0, 0], 0.75)
    assert len(shared.trainable_variables) == 1
    clone = type(shared).from_config(shared.get_config())
    assert clone.combiners == {"x": "sum", "y": "sqrtn"} and clone.tables["t"].global_shape == (10, 4)
    for arguments, message in (
        (({"t": (10, 4)}, {"x": "u"}), "feature 'x' names table 'u'"),
        (({"t": (10, 4)}, None, {"x": "sum"}), r"no entry for the features \['t'\]"),
        (({"t": (10, 4)}, None, "max"), "unknown combiner"),
    ):
        with pytest.raises(ValueError, match=message):
            sok.EmbeddingBagCollection(*arguments)
    with pytest.raises(KeyError, match=r"EmbeddingBagCollection: the ids have no feature 'y', only \['x'\]"):
        shared({"x": ids})
    frozen = sok.EmbeddingBagCollection({"t": (10, 4)}, trainable=False)
    assert not frozen.trainable_variables and len(frozen.non_trainable_variables) == 1


def test_distributed_gradient_tape():
    table, dense = sok.Variable(np.ones((4, 2), np.float32)), tf.Variable([2.0])
    for make in (
        lambda: sok.DistributedGradientTape(tf.GradientTape(persistent=True)),
        lambda: sok.DistributedGradientTape(persistent=True),
    ):
        with make() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1]]))) * dense
        assert isinstance(tape, tf.GradientTape)
        pending, gradient = tape.gradient(loss, [table, dense])
        assert isinstance(pending, PendingGradient)
        np.testing.assert_array_equal(gradient, [2])
        named = tape.gradient(loss, {"dense": dense, "table": table})
        assert isinstance(named["table"], PendingGradient)
        np.testing.assert_array_equal(tape.gradient(loss, dense), [2])
        assert isinstance(tape.gradient(loss, table), PendingGradient)
    wrapped = tf.GradientTape()
    with wrapped:
        loss = dense * 3.0
    np.testing.assert_array_equal(sok.DistributedGradientTape(wrapped).gradient(loss, dense), [3])


@pytest.mark.parametrize("make", [lambda: sok.SGD(0.5), lambda: sok.OptimizerWrapper(keras.optimizers.SGD(0.5))])
def test_distributed_optimizer_of_own_ones(make):
    table, dense = sok.Variable(np.ones((4, 2), np.float32)), tf.Variable([2.0])
    optimizer = sok.DistributedOptimizer(make())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, tf.ragged.constant([[1]]))) + dense
    optimizer.apply_gradients(zip(tape.gradient(loss, [table, dense]), [table, dense], strict=True))
    np.testing.assert_allclose(table[1], [0.5, 0.5])
    np.testing.assert_allclose(dense, [1.5])
    assert int(optimizer.iterations) == 1


def test_loss_scaling_looks_at_the_rows_of_a_step():
    """Keras would make of a table's gradient a tensor of the table's size, to see whether it is finite."""
    table = sok.Variable(shape=(1000, 4), initializer="ones", name="scaled")
    optimizer = keras.optimizers.LossScaleOptimizer(sok.DistributedOptimizer(keras.optimizers.SGD(1.0)))

    @tf.function
    def finite(ids, factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(sok.lookup_sparse(table, ids))
        return optimizer.check_finite([tape.gradient(loss, table), None])

    ids = tf.ragged.constant([[1, 2], [2]], dtype=tf.int64)
    assert bool(finite(ids, tf.constant(2.0))) and not bool(finite(ids, tf.constant(np.inf)))
    operations = finite.get_concrete_function(ids, tf.constant(2.0)).graph.get_operations()
    assert any(op.type == "SokReduce" for op in operations)
    for op in operations:
        for output in op.outputs:
            assert 1000 not in (output.shape.as_list() if output.shape.rank else []), op


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_model_that_is_to_be_compiled_by_xla(library):
    """Keras 3 asks the layers, says that this one cannot be, and goes on; tf_keras tries, and is told what to do."""
    inputs = {"a": library.Input((2,), dtype="int64", name="a")}
    vectors = layer_class(library)({"a": (10, 4)})(inputs)
    model = library.Model(inputs, library.layers.Dense(1)(vectors["a"]))
    optimizer = sok.DistributedOptimizer(library.optimizers.SGD(0.1))
    data = {"a": IDS[:8, :2] % 10}, LABELS[:8]
    if library is keras:
        with pytest.warns(UserWarning, match="Proceeding with `jit_compile=False`"):
            model.compile(optimizer, "mse", jit_compile=True)
        history = model.fit(*data, epochs=2, verbose=0).history["loss"]
        assert history[1] < history[0]
    else:
        model.compile(optimizer, "mse", jit_compile=True)
        with pytest.raises(NotImplementedError, match="jit_compile=False"):
            model.fit(*data, verbose=0)


def fit_once(optimizer, ids=IDS):
    inputs = {"a": keras.Input((3,), dtype="int64", name="a")}
    vectors = sok.EmbeddingBagCollection({"a": (50, 4)}, combiners="sum")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(vectors["a"]))
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit({"a": ids}, LABELS, batch_size=32, verbose=0)
    return model


@pytest.mark.parametrize("wrap", [sok.DistributedOptimizer, sok.OptimizerWrapper])
def test_what_an_optimizer_cannot_do_with_tables_is_said_before_a_step(wrap):
    for options, message in (
        ({"gradient_accumulation_steps": 2}, "by Adam with gradient_accumulation_steps: it keeps gradients"),
        ({"use_ema": True}, "by Adam with use_ema: it needs every row"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            fit_once(wrap(keras.optimizers.Adam(0.1, **options)))
    with pytest.raises(NotImplementedError, match="give the wrapped optimizer itself"):
        fit_once(wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))))


@pytest.mark.parametrize(
    "make", [lambda: sok.DistributedOptimizer(keras.optimizers.Adam(0.1)), lambda: sok.RowWiseAdagrad(0.1)]
)
def test_loss_scaling_around_them(make, tmp_path):
    """The scale changes nothing but the losses, and comes back with the model."""
    keras.utils.set_random_seed(1)
    plain = fit_once(make())
    keras.utils.set_random_seed(1)
    scaled = fit_once(keras.optimizers.LossScaleOptimizer(make(), initial_scale=2.0**10))
    scaled.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer.inner_optimizer) is type(plain.optimizer)
    assert int(loaded.optimizer.iterations) == int(plain.optimizer.iterations) == 2
    assert float(loaded.optimizer.dynamic_scale) == 2.0**10 and int(loaded.optimizer.step_counter) == 2
    for ours, theirs, once in zip(scaled.weights, loaded.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [tf_keras.optimizers.Adagrad, tf_keras.optimizers.legacy.Adagrad])
def test_loss_scaling_of_tf_keras_around_a_wrapper(make, dynamic):
    """As SOK 2.x's DLRM benchmark has it: an own loop, a rate that is assigned, a scale that may stay."""
    results = []
    for scaled in (False, True):
        table, dense = sok.Variable(np.ones((8, 4), np.float32)), tf.Variable([1.0, 2.0])
        optimizer = sok.OptimizerWrapper(make(0.1))
        if scaled:
            optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1024, dynamic=dynamic)
        optimizer.lr.assign(0.5)

        @tf.function
        def step(factor, table=table, dense=dense, optimizer=optimizer, scaled=scaled):
            with tf.GradientTape() as tape:
                vectors = sok.lookup_sparse(table, tf.ragged.constant([[1, 2], [2]], dtype=tf.int64))
                loss = factor * (tf.reduce_sum(vectors**2) + tf.reduce_sum(dense**2))
                loss = optimizer.get_scaled_loss(loss) if scaled else loss
            gradients = tape.gradient(loss, [table, dense])
            gradients = optimizer.get_unscaled_gradients(gradients) if scaled else gradients
            optimizer.apply_gradients(zip(gradients, [table, dense], strict=True))

        for _ in range(2):
            step(tf.constant(0.1))
        if dynamic and scaled:
            step(tf.constant(np.inf))
            assert float(optimizer.loss_scale) == 512
        results.append([table.numpy(), dense.numpy()])
    for plain, same in zip(*results, strict=True):
        np.testing.assert_allclose(same, plain, rtol=1e-6)
        assert (plain.min() < 0.95) and np.isfinite(plain).all()


def test_padding_and_ids_of_float64():
    """-1 is a key like any other, outside the table: what pads a batch is left out before. Ids are integers; an Input
    of Keras makes them of what `fit` is given. Weights may be float64.
    """
    layer = sok.EmbeddingBagCollection({"a": (50, 4)}, combiners="sum", initializer="ones")
    padded = np.array([[1, -1, -1], [2, 3, -1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"table 'a': key -1 is outside \[0, 50\)"):
        layer({"a": padded})
        sok.check_errors()  # where a GPU finds it
    bags = tf.RaggedTensor.from_tensor(padded, padding=-1)
    np.testing.assert_array_equal(layer({"a": bags})["a"][:, 0], [1, 2])
    with pytest.raises(TypeError, match="must be int32 or int64, got float64"):
        layer({"a": padded.astype(np.float64)})
    weights = bags.with_values(tf.constant([0.5, 0.25, 0.125], tf.float64))
    np.testing.assert_array_equal(layer({"a": bags}, {"a": weights})["a"][:, 0], [0.5, 0.375])
    assert int(fit_once(sok.SGD(0.1), IDS.astype(np.float64)).optimizer.iterations) == 2
