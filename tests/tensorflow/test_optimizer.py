# SPDX-License-Identifier: Apache-2.0
"""OptimizerWrapper against the optimizers' own steps, for 100 steps, with schedules; and those it runs on rows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok

ROWS, DIMENSION = 7, 5
K, T, L, V1 = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy, tf.compat.v1.train


def schedule(library):
    return library.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)


# Every optimizer with each option that its fused form reads.
FUSED: dict[str, Callable[[], Any]] = {
    f"{name} {title} {number}": make
    for name, library in (("keras", keras), ("tf_keras", tf_keras))
    for title, makes in {
        "SGD": [
            lambda o, s: o.SGD(0.1),
            lambda o, s: o.SGD(s, momentum=0.9),
            lambda o, s: o.SGD(0.05, momentum=0.9, nesterov=True),
            lambda o, s: o.SGD(0.1, weight_decay=0.01),
        ],
        "Adagrad": [lambda o, s: o.Adagrad(0.1), lambda o, s: o.Adagrad(s, 0.3, 1e-3)],
        "Adam": [lambda o, s: o.Adam(0.02), lambda o, s: o.Adam(s, 0.8, 0.95, 1e-4)],
        "AdamW": [lambda o, s: o.AdamW(0.02, weight_decay=0.05), lambda o, s: o.AdamW(s)],
        "Adamax": [lambda o, s: o.Adamax(0.02), lambda o, s: o.Adamax(s, 0.8, 0.9, 1e-4)],
        "Adadelta": [lambda o, s: o.Adadelta(0.5), lambda o, s: o.Adadelta(1.0, 0.9, 1e-4)],
        "RMSprop": [
            lambda o, s: o.RMSprop(0.01),
            lambda o, s: o.RMSprop(s, 0.8, 0.5, 1e-4),
            lambda o, s: o.RMSprop(0.01, centered=True, epsilon=1e-3),
            lambda o, s: o.RMSprop(0.01, momentum=0.5, centered=True, epsilon=1e-3),
        ],
        "Ftrl": [
            lambda o, s: o.Ftrl(0.1),
            lambda o, s: o.Ftrl(
                s,
                -0.4,
                0.2,
                l1_regularization_strength=0.01,
                l2_regularization_strength=0.02,
                l2_shrinkage_regularization_strength=0.03,
                beta=0.1,
            ),
        ],
    }.items()
    for number, make in enumerate([lambda m=m, lib=library: m(lib.optimizers, schedule(lib)) for m in makes])
}
FUSED |= {
    "legacy SGD": lambda: L.SGD(0.1),
    "legacy SGD nesterov": lambda: L.SGD(schedule(tf_keras), momentum=0.9, nesterov=True),
    "legacy SGD decay": lambda: L.SGD(0.1, momentum=0.5, decay=0.01),
    "legacy Adagrad": lambda: L.Adagrad(0.1),
    "legacy Adam": lambda: L.Adam(schedule(tf_keras), 0.8, 0.95, 1e-4),
    "legacy Adamax": lambda: L.Adamax(0.02),
    "legacy Adadelta": lambda: L.Adadelta(0.5),
    "legacy RMSprop": lambda: L.RMSprop(0.01, epsilon=1e-3),
    "legacy RMSprop momentum": lambda: L.RMSprop(0.01, momentum=0.5, epsilon=1e-3),
    "legacy Ftrl": lambda: L.Ftrl(0.1, l1_regularization_strength=0.01),
    "legacy Ftrl shrinkage": lambda: L.Ftrl(0.1, -0.4, 0.2, l2_shrinkage_regularization_strength=0.5, beta=0.1),
    "v1 GradientDescent": lambda: V1.GradientDescentOptimizer(0.1),
    "v1 Momentum": lambda: V1.MomentumOptimizer(0.05, 0.9),
    "v1 Momentum nesterov": lambda: V1.MomentumOptimizer(0.05, 0.9, use_nesterov=True),
    "v1 Adagrad": lambda: V1.AdagradOptimizer(0.1),
    "v1 Adam": lambda: V1.AdamOptimizer(0.02),
    "v1 Adadelta": lambda: V1.AdadeltaOptimizer(0.5),
    "v1 RMSProp": lambda: V1.RMSPropOptimizer(0.01, momentum=0.5, epsilon=1e-3),
    "v1 RMSProp centered": lambda: V1.RMSPropOptimizer(0.01, centered=True, epsilon=1e-3),
    "v1 Ftrl": lambda: V1.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}
# Other than by the core: all states and options that Keras has, on the rows of the step.
BY_ROWS = {
    "keras Nadam": lambda: K.Nadam(0.02),
    "keras Lion": lambda: K.Lion(0.01, weight_decay=0.01),
    "keras Lion function": lambda: K.Lion(functools.partial(float, 0.01)),
    "keras Nadam function": lambda: K.Nadam(functools.partial(float, 0.02)),
    "keras Adam amsgrad": lambda: K.Adam(schedule(keras), amsgrad=True),
    "keras SGD clipvalue": lambda: K.SGD(0.1, momentum=0.9, clipvalue=0.1),
    "keras SGD clipnorm": lambda: K.SGD(0.1, clipnorm=0.5),
    "tf_keras Adam amsgrad": lambda: T.Adam(schedule(tf_keras), amsgrad=True),
    "tf_keras Adam adaptive": lambda: T.Adam(0.02, adaptive_epsilon=True, epsilon=1e-3),
    "tf_keras Lion function": lambda: T.Lion(functools.partial(float, 0.01)),
    "tf_keras Nadam": lambda: T.Nadam(0.02, jit_compile=False),
    "tf_keras SGD clipvalue": lambda: T.SGD(0.1, momentum=0.9, clipvalue=0.1),
}


def lookup_of(rows):
    return tf.RaggedTensor.from_row_lengths(tf.cast(rows, tf.int64), tf.ones_like(rows))


def gradient_of(table, rows, gradients):
    """A pending gradient that adds gradients[i] to rows[i]."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, lookup_of(rows), combiners="sum") * gradients)
    return tape.gradient(loss, table)


def run_both(make, steps, compiled):
    """(table, variable, wrapper): a table by the wrapper and a variable by the optimizer itself;
    all rows at every step.
    """
    rng = np.random.default_rng(11)
    start = rng.uniform(-1, 1, (ROWS, DIMENSION)).astype(np.float32)
    table, variable = sok.Variable(start, name="table"), tf.Variable(start, name="variable")
    wrapper, plain = sok.OptimizerWrapper(make()), make()

    def train(rows, gradients, whole):
        wrapper.apply_gradients([(gradient_of(table, rows, gradients), table)])
        plain.apply_gradients([(whole, variable)])

    if compiled:
        train = tf.function(train)
    for _ in range(steps):
        # Every row at least once, some twice: then lazy and ordinary semantics are the same.
        rows = np.concatenate([rng.permutation(ROWS), rng.integers(0, ROWS, 3)])
        gradients = rng.uniform(-1, 1, (len(rows), DIMENSION)).astype(np.float32)
        whole = np.zeros((ROWS, DIMENSION))
        np.add.at(whole, rows, gradients)
        train(tf.constant(rows), tf.constant(gradients), tf.constant(whole, tf.float32))
    return table, variable, wrapper


@pytest.mark.parametrize("name", FUSED)
def test_fused_equal_their_own(name):
    compiled = not name.startswith(("legacy", "v1"))
    table, variable, wrapper = run_both(FUSED[name], 100, compiled)
    assert wrapper._tables.rows is None, "not fused"
    # TensorFlow's older Adam multiplies its powers of beta up, and takes 1 - beta in float32.
    tolerance = 3e-6 if name == "v1 Adam" else 1e-6
    reference.assert_close(table, variable, tolerance, message=name)
    assert int(wrapper.iterations) == 100


@pytest.mark.parametrize("name", BY_ROWS)
def test_others_run_on_rows(name):
    # tf_keras's Nadam divides by zero in a tf.function, without this package.
    table, variable, wrapper = run_both(BY_ROWS[name], 30, compiled=name != "tf_keras Nadam")
    assert wrapper._tables.rows is not None, "fused"
    reference.assert_close(table, variable, 2e-6, message=name)


@pytest.mark.parametrize("compiled", ["function", "fit", "XLA"])
def test_nadam_of_tf_keras_is_refused_in_what_is_compiled(compiled):
    """It would give NaN, or step too far: it counts in Python."""
    optimizer = T.Nadam(0.02, jit_compile=False)
    wrapper = sok.OptimizerWrapper(optimizer)
    table = sok.Variable(np.ones((ROWS, DIMENSION), np.float32), name="nadam")

    def train():
        wrapper.apply_gradients([(gradient_of(table, tf.constant([0, 1]), tf.ones([2, DIMENSION])), table)])

    if compiled == "XLA":
        optimizer.jit_compile = True  # as it is where there is a GPU
    elif compiled == "function":
        train = tf.function(train)
    else:

        class Model(tf_keras.Model):
            def __init__(self):
                super().__init__()
                self.table = table

            def call(self, ids):
                return sok.lookup_sparse(self.table, lookup_of(ids[:, 0]), combiners="sum")

        model = Model()
        model.compile(wrapper, "mse")
        train = lambda: model.fit(np.array([[0], [1]]), np.zeros((2, DIMENSION)), verbose=0)  # noqa: E731
    with pytest.raises(NotImplementedError, match="Nadam of tf_keras"):
        train()
    assert (table.numpy() == 1).all()


LAZY = {
    "SGD": (
        lambda: K.SGD(0.1, momentum=0.9),
        reference.Optimizer("momentum", 0.1, momentum=0.9, learning_rate_in_momentum=True),
    ),
    "Adagrad": (lambda: K.Adagrad(0.1), reference.Optimizer("adagrad", 0.1, epsilon_inside=True)),
    "Adam": (lambda: K.Adam(0.1), reference.Optimizer("adam", 0.1)),
    "AdamW": (
        lambda: K.AdamW(0.1, weight_decay=0.1),
        reference.Optimizer("adam", 0.1, weight_decay=0.1, learning_rate_of_decay=0.1, decoupled_weight_decay=True),
    ),
    "RowWiseAdagrad": (lambda: sok.RowWiseAdagrad(0.1, 0.1, 1e-7), reference.Optimizer("rowwise_adagrad", 0.1)),
    "Ftrl": (lambda: sok.Ftrl(0.1), reference.Optimizer("ftrl", 0.1)),
    "RMSprop": (lambda: K.RMSprop(0.1), reference.Optimizer("rmsprop", 0.1, epsilon_inside=True)),
    "Nadam": (lambda: K.Nadam(0.1), None),
}


@pytest.mark.parametrize("name", LAZY)
def test_only_rows_of_the_step_change(name):
    make, plain = LAZY[name]
    rng = np.random.default_rng(5)
    start = rng.uniform(-1, 1, (ROWS, DIMENSION)).astype(np.float32)
    table = sok.Variable(start, name="lazy")
    wrapper = sok.OptimizerWrapper(make())
    weight = start.astype(np.float64)
    states = plain.initial_states(ROWS, DIMENSION) if plain else []
    for step in range(1, 8):
        rows = np.unique(rng.integers(0, ROWS - 1, 3))
        gradients = rng.uniform(-1, 1, (len(rows), DIMENSION)).astype(np.float32)
        before = table.numpy()
        wrapper.apply_gradients([(gradient_of(table, rows, gradients), table)])
        untouched = np.setdiff1d(np.arange(ROWS), rows)
        np.testing.assert_array_equal(table.numpy()[untouched], before[untouched])
        assert (table.numpy()[rows] != before[rows]).all()
        if plain is None:
            continue
        rate = plain.learning_rate
        if plain.kind == "adam":
            rate *= np.sqrt(1 - plain.beta2**step) / (1 - plain.beta1**step)
        reference.step(dataclasses.replace(plain, learning_rate=rate), weight, states, rows, gradients)
    if plain is None:
        return
    reference.assert_close(table, weight, 2e-6)
    slots = wrapper.slots(table)
    assert tuple(slots) == plain.state_names()
    for slot, state in zip(slots.values(), states, strict=True):
        assert slot.shape == state.shape
        reference.assert_close(slot, state, 3e-5)


@pytest.mark.parametrize("name", ["keras Nadam", "keras Lion"])
def test_eager_steps_without_rows_count(name):
    """Keras 3 fails on arrays without rows that it steps eagerly; in a tf.function it does not."""
    found = []
    for wrap in (lambda step: step, tf.function(reduce_retracing=True)):
        tables = [sok.Variable(np.ones((ROWS, DIMENSION), np.float32), name=f"few{i}") for i in range(2)]
        wrapper = sok.OptimizerWrapper(BY_ROWS[name]())

        def step(*rows, tables=tables, wrapper=wrapper):
            pairs = [(gradient_of(t, r, 1.0), t) for t, r in zip(tables, rows, strict=True)]
            wrapper.apply_gradients(pairs)

        step = wrap(step)
        for rows in (([1], [2]), ([], [2]), ([], []), ([1, 3], [4])):
            step(*(tf.constant(each, tf.int64) for each in rows))
        found.append(np.stack(tables))
    reference.assert_close(found[0], found[1], 1e-6)


def test_tables_and_dense_variables_in_one_step():
    for make in (
        lambda: K.Adam(0.1),
        lambda: T.Adam(0.1),
        lambda: L.Adam(0.1),
        lambda: V1.AdamOptimizer(0.1),
        lambda: sok.SGD(0.1),
    ):
        tables = [sok.Variable(np.zeros((4, 2), np.float32), name=f"t{i}") for i in range(2)]
        dense, plain = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
        wrapper, own = sok.OptimizerWrapper(make()), make()
        for step in range(3):
            gradients = [gradient_of(table, [1], tf.ones([1, 2])) for table in tables]
            pairs = [
                (gradients[0], tables[0]),
                (tf.constant([0.5, -1.0]), dense),
                (None, plain),
                (gradients[1], tables[1]),
            ]
            wrapper.apply_gradients(pairs)
            own.apply_gradients([(tf.constant([0.5, -1.0]), plain)])
            assert int(wrapper.iterations) == step + 1
        np.testing.assert_allclose(dense, plain, rtol=1e-6)
        for table in tables:
            np.testing.assert_allclose(table[1], [-0.3, -0.3], rtol=1e-5)
            np.testing.assert_array_equal(table[0], [0, 0])


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_dense_variables_that_come_later(library):
    wrapper, plain = sok.OptimizerWrapper(library.optimizers.Adam(0.1)), library.optimizers.Adam(0.1)
    first, second = [[tf.Variable([1.0]) for _ in range(2)], [tf.Variable([[2.0, 3.0]]) for _ in range(2)]]
    plain.build([first[1], second[1]])
    for pairs in ((0,), (0, 1), (1,), (0, 1)):
        for optimizer, position in ((wrapper, 0), (plain, 1)):
            variables = [(first, second)[i][position] for i in pairs]
            optimizer.apply_gradients([(tf.ones_like(v) * 0.5, v) for v in variables])
    np.testing.assert_allclose(first[0], first[1], rtol=1e-6)
    np.testing.assert_allclose(second[0], second[1], rtol=1e-6)


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_hyperparameters_are_read_at_each_step(library):
    table = sok.Variable(np.zeros((4, 2), np.float32))
    optimizer = library.optimizers.SGD(1.0)
    wrapper = sok.OptimizerWrapper(optimizer)
    train = tf.function(lambda: wrapper.apply_gradients([(gradient_of(table, [1], tf.ones([1, 2])), table)]))
    train()
    optimizer.learning_rate = 0.5
    train()
    np.testing.assert_allclose(table[1], [-1.5, -1.5])
    wrapper.learning_rate = 0.25
    train()
    np.testing.assert_allclose(table[1], [-1.75, -1.75])
    assert float(wrapper.lr) == 0.25


def test_loss_scale_and_exclusion_from_weight_decay():
    table, spared = (sok.Variable(np.ones((4, 2), np.float32), name=name) for name in ("table", "spared"))
    optimizer = K.SGD(0.1, weight_decay=0.5, loss_scale_factor=4.0)
    optimizer.exclude_from_weight_decay(var_names=["spared"])
    pairs = [(gradient_of(t, [1], tf.ones([1, 2])), t) for t in (table, spared)]
    sok.OptimizerWrapper(optimizer).apply_gradients(pairs)
    np.testing.assert_allclose(table[1], [0.95 - 0.025] * 2, rtol=1e-6)
    np.testing.assert_allclose(spared[1], [1 - 0.025] * 2, rtol=1e-6)
    np.testing.assert_array_equal(table[0], [1, 1])


def test_what_cannot_be_done_is_said():
    def attempt(optimizer):
        table = sok.Variable(np.ones((4, 2), np.float32))
        sok.OptimizerWrapper(optimizer).apply_gradients([(gradient_of(table, [1], tf.ones([1, 2])), table)])

    for optimizer, message in (
        (K.Adafactor(0.1), "Adafactor: its step of a row depends on all rows"),
        (K.Lamb(0.1), "Lamb"),
        (K.LossScaleOptimizer(K.SGD(0.1)), "give the wrapped optimizer itself"),
        (K.SGD(0.1, use_ema=True), "use_ema"),
        (K.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps"),
        (V1.ProximalAdagradOptimizer(0.1), "ProximalAdagradOptimizer"),
        (L.Nadam(0.1), "Nadam"),
        (L.SGD(0.1, gradient_transformers=[list]), "SGD with gradient_transformers: .* before apply_gradients"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            attempt(optimizer)


class MyLamb(K.Lamb):
    pass


class LARS(K.SGD):
    """A user's own, as Keras has none."""


class Lars(tf_keras.optimizers.SGD):
    pass


class BasedOnMuon(K.Muon):
    pass


class OfAnotherName(MyLamb):
    pass


@pytest.mark.parametrize("wrap", [sok.OptimizerWrapper, sok.DistributedOptimizer])
@pytest.mark.parametrize("make", [MyLamb, LARS, Lars, BasedOnMuon, OfAnotherName])
def test_optimizers_of_whole_variables_are_refused_by_the_names_of_their_classes(make, wrap):
    table = sok.Variable(np.ones((4, 2), np.float32))
    optimizer = wrap(make(0.1))
    name = {MyLamb: "Lamb", BasedOnMuon: "Muon", OfAnotherName: "Lamb"}.get(make, make.__name__)
    with pytest.raises(NotImplementedError, match=f"by {name}: its step of a row depends on all rows"):
        optimizer.apply_gradients([(gradient_of(table, [1], tf.ones([1, 2])), table)])
    np.testing.assert_array_equal(table, np.ones((4, 2)))


@pytest.mark.parametrize("make", [lambda: K.SGD(1.0), lambda: K.Nadam(0.1)], ids=["fused", "on rows"])
def test_a_dense_gradient_of_another_shape(make):
    table = sok.Variable(np.ones((4, 2), np.float32), name="items")
    wrapper = sok.OptimizerWrapper(make())
    for shape in ((3, 2), (5, 2), (4, 1), (4,)):
        with pytest.raises(ValueError, match=r"table 'items' has shape .*, must have \[4, 2\]"):
            wrapper.apply_gradients([(tf.ones(shape), table)])

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(gradient):
        wrapper.apply_gradients([(gradient, table)])

    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones([3, 2]))
    np.testing.assert_array_equal(table, np.ones((4, 2)))
    step(tf.ones([4, 2]))
    assert (table.numpy() < 1).all()


def test_a_users_subclass_is_not_taken_for_its_base():
    class Half(K.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient * 0.5, variable, learning_rate)

    table = sok.Variable(np.zeros((4, 2), np.float32))
    wrapper = sok.OptimizerWrapper(Half(1.0))
    wrapper.apply_gradients([(gradient_of(table, [1], tf.ones([1, 2])), table)])
    np.testing.assert_allclose(table[1], [-0.5, -0.5])


@pytest.mark.parametrize(
    "make",
    [
        lambda: K.Adam(0.1),
        lambda: K.SGD(0.1, momentum=0.9),
        lambda: T.Adagrad(0.1),
        lambda: L.Adam(0.1),
        lambda: V1.AdagradOptimizer(0.1),
    ],
)
def test_plain_optimizers_take_tables(make):
    """Without any wrapper a table is a variable like others, with the optimizer's own semantics."""
    rng = np.random.default_rng(3)
    start = rng.random((ROWS, DIMENSION)).astype(np.float32)
    table, variable = sok.Variable(start, name="plain"), tf.Variable(start)
    first, second = make(), make()
    for _ in range(5):
        rows = rng.permutation(ROWS)[:4]
        gradients = rng.random((4, DIMENSION)).astype(np.float32)
        first.apply_gradients([(gradient_of(table, rows, gradients), table)])
        order = np.argsort(rows)
        slices = tf.IndexedSlices(
            tf.constant(gradients[order]), tf.constant(rows[order]), tf.constant([ROWS, DIMENSION])
        )
        second.apply_gradients([(slices, variable)])
    np.testing.assert_allclose(table.numpy(), variable.numpy(), rtol=1e-5)


def test_own_optimizers_update_dense_variables():
    dense = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    gradient = tf.constant([[1.0, -1.0], [2.0, 0.0]])
    sok.SGD(0.5).apply_gradients([(gradient, dense)])
    np.testing.assert_allclose(dense, [[0.5, 2.5], [2.0, 4.0]])
    table = sok.Variable(np.ones((2, 2), np.float32))
    for make in (lambda: sok.RowWiseAdagrad(0.1), lambda: sok.Ftrl(0.1, beta=0.2, l2_regularization_strength=0.1)):
        dense.assign(np.ones((2, 2)))
        table.assign(np.ones((2, 2)))
        optimizer = make()
        for _ in range(3):
            optimizer.apply_gradients([(gradient, dense), (gradient_of(table, [0, 1], gradient), table)])
        np.testing.assert_allclose(dense, table, rtol=1e-5)
        assert int(optimizer.iterations) == 3


def test_an_error_within_a_schedule_of_an_own_optimizer_is_shown():
    class Broken(K.schedules.LearningRateSchedule):
        def __call__(self, step):
            raise TypeError("unsupported operand")

    dense = tf.Variable([[1.0, 2.0]])
    with pytest.raises(TypeError, match="unsupported operand"):
        sok.SGD(Broken()).apply_gradients([(tf.ones([1, 2]), dense)])
    sok.SGD(lambda: 0.5).apply_gradients([(tf.ones([1, 2]), dense)])
    sok.SGD(K.schedules.PiecewiseConstantDecay([0], [0.25, 1.0])).apply_gradients([(tf.ones([1, 2]), dense)])
    np.testing.assert_allclose(dense, [[0.25, 1.25]])


@pytest.mark.parametrize("make", [sok.OptimizerWrapper, sok.DistributedOptimizer])
def test_one_norm_of_tables_and_dense_variables_is_refused(make):
    table, dense = sok.Variable(np.ones((2, 2), np.float32)), tf.Variable([1.0])
    optimizer = make(tf.keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    gradient = tf.IndexedSlices(tf.constant([[3.0, 0.0]]), tf.constant([0], tf.int64), tf.constant([2, 2], tf.int64))
    with pytest.raises(NotImplementedError, match="clip_by_global_norm"):
        optimizer.apply_gradients([(gradient, table), (tf.constant([4.0]), dense)])
    np.testing.assert_array_equal(table, np.ones((2, 2)))
    np.testing.assert_array_equal(dense, [1.0])
    optimizer.apply_gradients([(gradient, table)])
    np.testing.assert_allclose(table, [[0, 1], [1, 1]], atol=1e-6)
