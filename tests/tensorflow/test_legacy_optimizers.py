# SPDX-License-Identifier: Apache-2.0
"""OptimizerScope and the optimizers of SparseOperationKit 1.x: what they do to tables is what optimizers of both
Kerases and of tf.compat.v1 do to ordinary variables.
"""

import functools
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.legacy import layers, optimizers

KERASES = pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
v1 = tf.compat.v1.train


def dense(library=keras, rows=8, dimension=4, **options):
    return layers.classes(library).All2AllDenseEmbedding(rows, dimension, 2, 2, **options)


def keys_of(*values):
    return tf.constant(np.reshape(values, (-1, 2, 2)), tf.int64)


def optimizers_of_frameworks():
    for family, module in (
        ("keras", keras.optimizers),
        ("tf_keras", tf_keras.optimizers),
        ("legacy", tf_keras.optimizers.legacy),
    ):
        for name in ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adadelta", "Adagrad"):
            cls = getattr(module, name, None)
            if cls is None or (family, name) == ("legacy", "Nadam"):
                continue
            # Where there is a GPU tf_keras compiles steps, for which Nadam keeps its count of products in Python.
            options: dict[str, Any] = {"jit_compile": False} if family == "tf_keras" else {}
            options["learning_rate"] = 0.1
            yield pytest.param(functools.partial(cls, **options), id=f"{family}-{name}")
            if name in ("SGD", "RMSprop"):
                yield pytest.param(functools.partial(cls, momentum=0.9, **options), id=f"{family}-{name}-momentum")
    for name in ("GradientDescent", "Adam", "RMSProp", "Adadelta", "Adagrad", "Ftrl"):
        cls = getattr(v1, f"{name}Optimizer")
        yield pytest.param(lambda cls=cls: cls(0.1), id=f"v1-{name}")
    yield pytest.param(lambda: v1.MomentumOptimizer(0.1, 0.9), id="v1-Momentum")


def gradient_of(keys, values):
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(keys, tf.int64), tf.constant([6, 2], tf.int64))


STEPS = ([0, 1, 2], [3], [2, 1], [0])


@pytest.mark.parametrize("make", list(optimizers_of_frameworks()))
def test_scope_steps_a_table_as_an_ordinary_variable(make):
    """Rows that a step does not name included, and a dense variable of the same call."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(6, 2)).astype(np.float32)
    one, other = make(), make()
    in_keras = type(one).__module__.startswith("keras.")
    variable = keras.Variable if in_keras else tf.Variable
    table, again, weight = sok.Variable(rows), sok.Variable(rows), variable([1.0, 2.0])
    with tf.device("cpu"):  # TensorFlow has not all of these steps for GPUs
        plain, plain_weight = variable(rows), variable([1.0, 2.0])
    options = {} if isinstance(one, v1.Optimizer) else {"experimental_aggregate_gradients": False}
    third = make()

    @tf.function(reduce_retracing=True)
    def step(keys, values):
        with sok.OptimizerScope([again]):
            third.apply_gradients([(tf.IndexedSlices(values, keys, tf.constant([6, 2], tf.int64)), again)], **options)

    for keys in STEPS:
        values = rng.normal(size=(len(keys), 2)).astype(np.float32)
        slope = tf.constant(values.sum(0))
        # The row of a key that comes twice is summed first.
        twice = gradient_of([*keys, keys[0]], [*values[:1] / 2, *values[1:], values[0] / 2])
        with sok.OptimizerScope([table]):
            one.apply_gradients([(twice, table), (slope, weight)], **options)
        with tf.device("cpu"):
            other.apply_gradients([(gradient_of(keys, values), plain), (slope, plain_weight)])
        expected = tf.convert_to_tensor(plain)
        np.testing.assert_allclose(table, expected, rtol=1e-5, atol=3e-6)
        # A few stand for all. tf_keras's Nadam does not step tables as Keras has it there, by OptimizerWrapper neither.
        if type(third).__name__ not in ("Adam", "SGD", "MomentumOptimizer"):
            continue
        step(tf.constant(keys, tf.int64), tf.constant(values))
        np.testing.assert_allclose(again, expected, rtol=1e-5, atol=3e-6)
        np.testing.assert_allclose(tf.convert_to_tensor(weight), tf.convert_to_tensor(plain_weight), rtol=1e-6)


def test_touched_rows_alone_where_asked_for():
    rows = np.ones((6, 2), np.float32)
    for make in (
        lambda: (keras.optimizers.Adam(0.1), lambda t: sok.OptimizerScope([t], update="touched")),
        lambda: (optimizers.PluginAdam(0.1, update="touched"), None),
        lambda: (optimizers.LazyAdamOptimizer(0.1), None),
    ):
        table = sok.Variable(rows)
        optimizer, scope = make()
        for keys in ([0], [1]):
            before = table.numpy()
            if scope is None:
                optimizer.apply_gradients([(gradient_of(keys, [[1.0, 1.0]]), table)])
            else:
                with scope(table):
                    optimizer.apply_gradients([(gradient_of(keys, [[1.0, 1.0]]), table)])
            assert np.flatnonzero((table.numpy() != before).any(1)).tolist() == keys
    with pytest.raises(ValueError, match="update must be"):
        sok.OptimizerScope([], update="some")


def test_scopes_within_each_other_end_in_their_order():
    table = sok.Variable(np.ones((2, 2), np.float32))
    with sok.OptimizerScope([table]), sok.OptimizerScope([table], update="touched"):
        with sok.OptimizerScope([table]):
            assert table.scopes == ["all", "touched", "all"]
        assert table.scopes == ["all", "touched"]
    assert table.scopes == []


def test_lazy_adam_of_an_ordinary_variable():
    variable, table = tf.Variable(np.ones((6, 2), np.float32)), sok.Variable(np.ones((6, 2), np.float32))
    one, other = optimizers.LazyAdamOptimizer(0.1), optimizers.LazyAdamOptimizer(0.1)
    for keys in STEPS:
        gradient = gradient_of(keys, np.full((len(keys), 2), 0.5))
        one.apply_gradients([(gradient, variable)])
        other.apply_gradients([(gradient, table)])
        np.testing.assert_allclose(variable, table, rtol=1e-5)


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("name", ["Adam", "PluginAdam"])
def test_adam_moves_every_row(name, use_hashtable, tmp_path):
    layer = dense(rows=8, dimension=2, use_hashtable=use_hashtable)
    rows = np.random.default_rng(2).normal(size=(8, 2)).astype(np.float32)
    sok.assign(layer.var, np.arange(8), rows)
    plain, weight, plain_weight = keras.Variable(rows), keras.Variable([1.0]), keras.Variable([1.0])
    one, other = getattr(optimizers, name)(learning_rate=0.1), keras.optimizers.Adam(0.1)
    for keys in ([0, 1, 2, 3], [0, 0, 1, 1], [4, 5, 6, 7]):
        ids = keys_of(*keys)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        gradient = tape.gradient(loss, layer.var)
        one.apply_gradients(
            [(gradient, layer.trainable_variables[0]), (tf.constant([1.0]), weight)],
            experimental_aggregate_gradients=False,
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(plain.value, ids) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, plain.value))
        other.apply_gradients([(gradient, plain), (tf.constant([1.0]), plain_weight)])
    keys, moved = sok.export(layer.var)
    np.testing.assert_allclose(moved, plain.numpy()[keys.numpy()], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight.numpy(), plain_weight.numpy(), rtol=1e-6)
    sok.dump(tmp_path / "dump", layer.var, one)
    moments = one.sok_slots(layer.var)["m"].numpy()
    again = getattr(optimizers, name)(learning_rate=0.1)
    sok.load(tmp_path / "dump", layer.var, again)
    np.testing.assert_array_equal(again.sok_slots(layer.var)["m"], moments)
    assert int(again.iterations) == 3 and isinstance(again, keras.optimizers.Adam)


def test_arguments_of_adam():
    assert float(optimizers.PluginAdam(0.1, 0.8, 0.9, 1e-3, "mine").beta_1) == pytest.approx(0.8)
    assert float(optimizers.PluginAdam(lr=0.25).learning_rate) == 0.25
    assert optimizers.PluginAdam().name == "Plugin_Adam"
    copy = optimizers.Adam.from_config(optimizers.Adam(0.5, update="touched").get_config())
    assert copy.get_config()["update"] == "touched"


@KERASES
def test_loss_scaling(library, monkeypatch):
    """Steps with a gradient that is not finite are skipped, by tables too."""
    monkeypatch.setattr(tf, "keras", library)
    for inner in (optimizers.PluginAdam, library.optimizers.Adam):
        table, weight = (
            sok.Variable(np.ones((6, 2), np.float32)),
            library.Variable([1.0]) if library is keras else tf.Variable([1.0]),
        )
        plain = sok.Variable(np.ones((6, 2), np.float32))
        scaled, unscaled = optimizers.LossScaleOptimizer(inner(0.1)), optimizers.PluginAdam(0.1)
        factor = 2.0**15 if library is keras else 1.0  # Keras 3 divides by its scale itself
        for value in (0.5, float("inf"), 2.0):
            pairs = [
                (gradient_of([0, 2], np.full((2, 2), value * factor)), table),
                (tf.constant([value * factor]), weight),
            ]
            with sok.OptimizerScope([table] if inner is library.optimizers.Adam else []):
                scaled.apply_gradients(pairs, experimental_aggregate_gradients=False)
            if np.isfinite(value):
                unscaled.apply_gradients([(gradient_of([0, 2], np.full((2, 2), value)), plain)])
            elif library is keras:
                factor /= 2
            else:
                unscaled.iterations.assign_add(1)
        np.testing.assert_allclose(table, plain, rtol=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_rate_of_a_schedule_after_steps_of_tables_alone(late):
    """What tf_keras's optimizers say their rate is, as after steps of other variables; 1.x's DLRM sets it late."""
    schedule = tf_keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)
    one, other = (tf_keras.optimizers.SGD(0.5 if late else schedule) for _ in range(2))
    if late:
        one.learning_rate = other.learning_rate = schedule
    table, weight = sok.Variable(np.ones((6, 2), np.float32)), tf.Variable([1.0])

    @tf.function
    def step():
        with sok.OptimizerScope([table]):
            one.apply_gradients([(gradient_of([1], [[1.0, 1.0]]), table)])
        other.apply_gradients([(tf.ones([1]), weight)])

    for _ in range(3):
        step()
        assert float(one.learning_rate) == float(other.learning_rate)
    np.testing.assert_allclose(table.numpy()[1, 0], weight.numpy()[0], rtol=1e-6)


@pytest.mark.parametrize("adam", [tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.Adam], ids=["new", "legacy"])
def test_loss_scaling_of_tables_and_then_of_other_variables(adam):
    """In two calls of one optimizer, as 1.x's mixed precision demo has it."""
    table, weight = sok.Variable(np.ones((6, 2), np.float32)), tf.Variable([1.0])
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(adam(0.1))

    @tf.function
    def step(value):
        with sok.OptimizerScope([table]):
            gradient = tf.IndexedSlices(
                tf.fill([1, 2], value), tf.constant([1], tf.int64), tf.constant([6, 2], tf.int64)
            )
            optimizer.apply_gradients([(gradient, table)], experimental_aggregate_gradients=False)
        optimizer.apply_gradients([(value[None], weight)])

    for value, moved in ((float("inf"), False), (1.0, True)):
        step(tf.constant(value))
        assert (table.numpy()[1] < 1).all() == moved == (weight.numpy() < 1).all()
        assert (table.numpy()[0] == 1).all()


def test_loss_scaling_in_two_calls_is_refused_by_keras_3():
    """There each call divides by the scale that the call before left, which may have halved it."""
    table, weight = sok.Variable(np.ones((6, 2), np.float32)), keras.Variable([1.0])
    optimizer: Any = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
    with sok.OptimizerScope([table]):
        optimizer.apply_gradients([(gradient_of([1], [[1.0, 1.0]]), table)])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply_gradients([(tf.constant([1.0]), weight)])


def test_loss_scaling_in_a_graph(monkeypatch):
    """Scripts for TensorFlow 1.15 run `initializer`, which 1.x's LossScaleOptimizer took from the Adam in it."""
    monkeypatch.setattr(tf, "keras", tf_keras)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.Variable(np.ones((6, 2), np.float32))
        optimizer = optimizers.LossScaleOptimizer(optimizers.PluginAdam(0.1), 1024)
        gradients = optimizer.get_unscaled_gradients([gradient_of([0, 2], np.full((2, 2), 512.0))])
        train = optimizer.apply_gradients(zip(gradients, [table], strict=True))
        session.run([tf.compat.v1.global_variables_initializer(), optimizer.initializer])
        session.run(train)
        np.testing.assert_allclose(session.run(table)[:, 0], [0.9, 1, 0.9, 1, 1, 1], rtol=1e-5)
        assert not hasattr(optimizers.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.1)), "initializer")


def test_scope_leaves_nothing_behind():
    table, other = sok.Variable(np.ones((6, 2), np.float32)), sok.Variable(np.ones((6, 2), np.float32))
    optimizer: Any = keras.optimizers.SGD(1.0)
    with pytest.raises(ZeroDivisionError), sok.OptimizerScope([table]):
        divmod(1, 0)
    assert table.scopes == []
    with pytest.raises(TypeError):
        optimizer.apply_gradients([(tf.ones([2]), keras.Variable([1.0, 1.0]))], experimental_aggregate_gradients=False)
    with sok.OptimizerScope([table]):
        with sok.OptimizerScope((table, other)):
            pass
        with pytest.raises(ValueError, match="shape"):
            optimizer.apply_gradients([(tf.ones([2, 2]), table)])
        optimizer.apply_gradients([(gradient_of([1, 1], np.ones((2, 2))), table)])
    assert table.scopes == other.scopes == [] and table.numpy()[:3].tolist() == [[1, 1], [-1, -1], [1, 1]]
    with pytest.raises(RuntimeError, match="list or tuple"):
        sok.OptimizerScope(iter([table]))
    with pytest.raises(ValueError, match="list or tuple"):
        sok.split_embedding_variable_from_others({1})


@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.Adam,
        keras.optimizers.Nadam,
        tf_keras.optimizers.Adam,
        tf_keras.optimizers.legacy.Adam,
        v1.AdamOptimizer,
    ],
    ids=lambda make: f"{make.__module__}.{make.__name__}",
)
def test_states_of_a_scope_are_dumped_and_loaded(make, tmp_path, device):
    """Into an optimizer that has made no step, too; training goes on as if it had not stopped."""

    def step(optimizer, table, keys):
        with sok.OptimizerScope([table]):
            optimizer.apply_gradients([(gradient_of(keys, np.ones((len(keys), 2))), table)])

    def tables():
        return sok.Variable(np.ones((6, 2), np.float32), name="t")

    (table, optimizer), (again, other) = ((tables(), make(0.1)) for _ in range(2))
    for keys in ([0, 1], [1, 2]):
        step(optimizer, table, keys)
    sok.dump(tmp_path / "d", table, optimizer)
    with sok.OptimizerScope([again]):
        sok.load(tmp_path / "d", again, other)
    for one, pair in ((optimizer, table), (other, again)):
        step(one, pair, [2, 3])
    np.testing.assert_array_equal(again, table)
    if make is tf_keras.optimizers.legacy.Adam:  # which also steps tables, and loads, as ordinary variables
        mixed, third = make(0.1), tables()
        sok.load(tmp_path / "d", third, mixed)
        with pytest.raises(ValueError, match=r"table 't' from a step or sok\.load outside of OptimizerScope"):
            step(mixed, third, [1])


def test_scopes_of_threads():
    tables = [sok.Variable(np.zeros((6, 2), np.float32)) for _ in range(4)]
    optimizers_ = [keras.optimizers.SGD(1.0) for _ in tables]

    def run(table, optimizer):
        for _ in range(20):
            with sok.OptimizerScope([table]):
                optimizer.apply_gradients([(gradient_of([1], [[1.0, 1.0]]), table)])

    threads = [threading.Thread(target=run, args=pair) for pair in zip(tables, optimizers_, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for table in tables:
        assert table.numpy()[1].tolist() == [-20, -20]


@pytest.mark.parametrize("scaling", [False, True])
def test_mirrored_strategy_of_one_replica(scaling, monkeypatch):
    monkeypatch.setattr(tf, "keras", tf_keras)
    runtime.shutdown()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope(), tf.device("CPU:0"):
        sok.Init(global_batch_size=1)
        layer = dense(tf_keras, dimension=2, use_hashtable=False)
        optimizer = tf_keras.optimizers.Adam(0.1)
        if scaling:
            optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
    rows = np.ones((8, 2), np.float32)
    sok.assign(layer.var, np.arange(8), rows)
    plain, other = tf.Variable(rows), tf_keras.optimizers.Adam(0.1)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        (gradient,) = tape.gradient(loss, [layer.var])
        with sok.OptimizerScope([layer.var]):
            optimizer.apply_gradients([(gradient, layer.var)], experimental_aggregate_gradients=False)

    for keys in ([0, 1, 2, 3], [0, 0, 1, 1]):
        strategy.run(step, args=(keys_of(*keys),))
        gradient = np.bincount(keys, minlength=8)[:, None].repeat(2, 1).astype(np.float32)
        other.apply_gradients([(tf.constant(gradient), plain)])
    np.testing.assert_allclose(layer.var, plain, rtol=1e-5)
