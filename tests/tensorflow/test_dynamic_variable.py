# SPDX-License-Identifier: Apache-2.0
"""DynamicVariable beside a static table of the same name, whose rows of the same keys it must have, bit for bit."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import embedding

ROWS, DIMENSION = 200, 6
INT32_MIN, INT64_MIN, INT64_MAX = -(2**31), -(2**63), 2**63 - 1


def pair(name="items", trainable=True, **options):
    """A dynamic table and the static one whose rows it is to have."""
    dynamic = sok.DynamicVariable(DIMENSION, "normal", name=name, trainable=trainable, **options)
    static = sok.Variable(shape=(ROWS, DIMENSION), initializer="normal", name=name, dtype=options.get("dtype"))
    return dynamic, static


def ragged(rows, dtype=tf.int64):
    return tf.ragged.constant(rows, dtype=dtype, ragged_rank=1)


def batches(n, seed=0):
    """Ragged ids and weights, with empty bags and repeated keys."""
    generator = np.random.default_rng(seed)
    for _ in range(n):
        splits = np.concatenate([[0], np.cumsum(generator.integers(0, 5, 7))])
        keys = generator.integers(0, ROWS, splits[-1])
        weights = generator.random(splits[-1], np.float32)
        yield (
            tf.RaggedTensor.from_row_splits(tf.constant(keys), splits),
            tf.RaggedTensor.from_row_splits(tf.constant(weights), splits),
        )


def held(table):
    """{key: row} of a table."""
    keys, rows = sok.export(table)
    assert keys.shape[0] == rows.shape[0] == table.size
    return dict(zip(keys.numpy().tolist(), rows.numpy(), strict=True))


def check_same(dynamic, static):
    """Every key that the dynamic table holds has the static one's row."""
    keys, rows = sok.export(dynamic)
    np.testing.assert_array_equal(rows, tf.gather(static, keys))


def train(table, optimizer, batch, combiner="mean", trained=True):
    ids, weights = batch
    with tf.GradientTape() as tape:
        tape.watch(weights.values)
        output = sok.lookup_sparse(table, ids, weights, combiner)
        loss = tf.reduce_sum(tf.square(output - 1))
    gradient, of_weights = tape.gradient(loss, [table, weights.values])
    if trained:
        optimizer.apply_gradients([(gradient, table)])
    return loss, of_weights


def test_is_a_variable():
    table = sok.DynamicVariable(dimension=DIMENSION, initializer="random", var_type="hbm", name="users")
    assert isinstance(table, tf.Variable) and table.trainable and table.dtype == tf.float32
    assert table.shape.as_list() == [None, DIMENSION] and table.table_name == "users"
    assert (table.size, table.dimension, table.key_type, table.backend_type) == (0, DIMENSION, tf.int64, "hbm")
    assert (table.mode, table.target_gpu, table.num_gpus) == ("distributed", -1, 1) and table.capacity > 2**20
    assert sok.filter_variables([table, keras.Variable(1.0)])[0] == [table]
    assert table.numpy().shape == (0, DIMENSION)
    sok.all2all_dense_embedding(table, tf.constant([3, -4]))
    assert table.size == 2 and table.indices.numpy().tolist() == [3, -4]
    assert table.numpy().shape == (2, DIMENSION)
    other = sok.DynamicVariable(2, mode="localized:0", trainable=False, key_type="int32", max_capacity=9)
    assert other.mode == "localized:0" and other.target_gpu == 0 and not other.trainable
    assert other.key_type == tf.int32 and other.capacity == 9 and other.backend_type == "hybrid"
    assert other.table_name.startswith("sok_dynamic_Variable_")


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
@pytest.mark.parametrize(
    "initializer", [None, "random", "normal", 0.25, "ones", keras.initializers.RandomNormal(seed=3)]
)
def test_initial_rows_are_the_static_ones(dtype, initializer):
    dynamic = sok.DynamicVariable(DIMENSION, initializer, name="same", dtype=dtype)
    static = sok.Variable(shape=(ROWS, DIMENSION), initializer=initializer, name="same", dtype=dtype)
    keys = tf.constant([3, 199, 3, 0])
    np.testing.assert_array_equal(sok.all2all_dense_embedding(dynamic, keys), sok.all2all_dense_embedding(static, keys))
    check_same(dynamic, static)


def test_seed():
    rows = [
        sok.all2all_dense_embedding(sok.DynamicVariable(3, name=name, seed=seed), tf.constant([5])).numpy()
        for name, seed in (("a", None), ("a", 0), ("a", 1), ("b", None))
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).any() and (rows[0] != rows[3]).any()
    own = keras.initializers.RandomUniform(-0.05, 0.05, seed=1)
    for seed, expected in (
        (None, rows[2]),
        (0, rows[0]),
    ):  # the object's own seed, and the one that was given beside it
        table = sok.DynamicVariable(3, own, name="a", seed=seed)
        np.testing.assert_array_equal(sok.all2all_dense_embedding(table, tf.constant([5])), expected)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_any_integer_is_a_key(dtype):
    table = sok.DynamicVariable(2, "uniform", key_type=dtype)
    keys = [INT32_MIN, -1, 0, 2**31 - 1] + ([INT64_MIN, INT64_MAX, 2**32 - 1] if dtype == tf.int64 else [])
    rows = sok.lookup_sparse(table, ragged([[key] for key in keys], dtype))
    assert table.size == len(keys)
    exported, values = sok.export(table)
    assert exported.dtype == dtype and exported.numpy().tolist() == keys
    np.testing.assert_array_equal(values, rows)
    assert len(np.unique(values.numpy(), axis=0)) == len(keys)


def test_keys_of_64_bits_are_refused_where_the_type_is_int32():
    table = sok.DynamicVariable(2, key_type=tf.int32, name="narrow")
    ids = ragged([[1]])
    for call in (
        lambda: sok.lookup_sparse(table, ids),
        lambda: sok.lookup_sparse(table, ids.to_sparse()),
        lambda: sok.all2all_dense_embedding(table, ids.values),
        lambda: sok.assign(table, ids.values, tf.ones([1, 2])),
    ):
        with pytest.raises(TypeError, match="must be int32, the key_type of table 'narrow', got int64"):
            call()
    wide = sok.DynamicVariable(2)
    sok.lookup_sparse(wide, ragged([[1]], tf.int32))
    assert wide.size == 1


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "rowwise": lambda: sok.RowWiseAdagrad(0.1, initial_accumulator_value=0.5),
    "adagrad, tf_keras": lambda: tf_keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: sok.Ftrl(0.1),
    "by rows": lambda: keras.optimizers.Nadam(0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_like_a_static_table(optimizer, compiled):
    tables = pair()
    wrappers = [sok.OptimizerWrapper(OPTIMIZERS[optimizer]()) for _ in tables]
    steps: list[Any] = []
    for table, wrapper in zip(tables, wrappers, strict=True):
        step = lambda ids, weights, table=table, wrapper=wrapper: train(table, wrapper, (ids, weights))  # noqa: E731
        signature = [
            tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64),
            tf.RaggedTensorSpec([None, None], tf.float32, 1, tf.int64),
        ]
        steps.append(tf.function(step, input_signature=signature) if compiled else step)
    traced = []
    for batch in batches(12):
        (loss, of_weights), (expected_loss, expected) = (step(*batch) for step in steps)
        np.testing.assert_array_equal(loss, expected_loss)
        np.testing.assert_array_equal(of_weights, expected)
        traced.append(steps[0].experimental_get_tracing_count() if compiled else 0)
    assert traced[1] == traced[-1], "growth traces again"
    check_same(*tables)
    keys, _ = sok.export(tables[0])
    states = [wrapper.slots(table) for wrapper, table in zip(wrappers, tables, strict=True)]
    assert states[0].keys() == states[1].keys() and (states[0] or "sgd" not in optimizer)
    for name, state in states[0].items():  # on a GPU there are more slots than keys: the host has not heard of all
        np.testing.assert_array_equal(state[: len(keys)], tf.gather(states[1][name], keys))


def test_many_steps_with_adam():
    """Growth from nothing, in place, far beyond the first memory; the gradient is sparse all the time."""
    table = sok.DynamicVariable(4, "zeros", var_type="hbm")
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.5))
    step = tf.function(lambda keys: train(table, optimizer, (keys, tf.ones_like(keys, tf.float32)), "sum"))
    for number in range(60):
        keys = tf.RaggedTensor.from_uniform_row_length(tf.range(500, dtype=tf.int64) * 7919 + number * 10**9, 1)
        step(keys)
        assert table.size == 500 * (number + 1)
    rows = held(table)
    assert len(rows) == 30_000
    first, last = rows[0], rows[499 * 7919 + 59 * 10**9]
    # One step each, the first and the sixtieth of the optimizer.
    np.testing.assert_allclose(first, 0.5, rtol=1e-4)
    np.testing.assert_allclose(last, 0.5 * (1 - 0.999**60) ** 0.5 / (1 - 0.9**60) * 0.1 / 0.001**0.5, rtol=1e-4)


def test_gradient_is_of_rows(device):
    table, static = pair()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, ragged([[40, 2], [40]]), combiners="sum"))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices) and gradient.shape.as_list() == [None, DIMENSION]
    slots = 3 if device == "gpu" else 2  # where the host counts keys as new until it hears of them
    assert gradient.indices.numpy().tolist() == [0, 1] and gradient.dense_shape.numpy().tolist() == [slots, DIMENSION]
    np.testing.assert_array_equal(gradient.values[:, 0], [2, 1])
    sok.OptimizerWrapper(keras.optimizers.SGD(1.0)).apply_gradients(
        [(tf.IndexedSlices(tf.ones([1, DIMENSION]), tf.constant([1])), table)]
    )
    static = static.numpy()
    np.testing.assert_array_equal(held(table)[2], static[2] - 1)
    np.testing.assert_array_equal(held(table)[40], static[40])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("concat", [False, True])
def test_static_and_dynamic_tables_in_one_call(compiled, concat):
    mixed, static = pair("a"), pair("b")
    other = sok.Variable(shape=(ROWS, 3), initializer="uniform", name="c")
    wrappers = [sok.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2)]
    sets = [[mixed[0], other, static[0], mixed[0]], [mixed[1], sok.Variable(other.numpy()), static[1], mixed[1]]]

    def step(tables, wrapper, ids, weights):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(
                tables, [ids] * 4, [None, weights, weights, weights], ["sum", "mean", "sqrtn", "mean"], concat=concat
            )
            joined = outputs if concat else tf.concat(outputs, axis=1)
            loss = tf.reduce_sum(tf.square(joined - 1))
        unique = tables[:3]
        wrapper.apply_gradients(zip(tape.gradient(loss, unique), unique, strict=True))
        return joined

    steps = [functools.partial(step, tables, wrapper) for tables, wrapper in zip(sets, wrappers, strict=True)]
    if compiled:
        steps = list(map(tf.function, steps))
    for batch in batches(4):
        np.testing.assert_array_equal(*(step(*batch) for step in steps))
    check_same(*mixed)
    check_same(*static)
    np.testing.assert_array_equal(other, sets[1][1])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_evaluation_changes_nothing(compiled):
    dynamic, static = pair()
    sok.assign(dynamic, [7, 150], tf.ones([2, DIMENSION]))
    sok.assign(static, [7, 150], tf.ones([2, DIMENSION]))
    before = [value.numpy() for value in sok.export(dynamic)]

    def evaluate(table, ids, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights.values)
            pooled, other = sok.lookup_sparse(
                [table, static], [ids, ids], [weights, None], ["mean", "sum"], training=False
            )
            loss = tf.reduce_sum(pooled * other)
        return pooled, *tape.gradient(loss, [dynamic, weights.values])

    calls = [functools.partial(evaluate, table) for table in (dynamic, static)]
    if compiled:
        calls = list(map(tf.function, calls))
    for batch in batches(3):
        (pooled, of_table, of_weights), (expected, _, of_expected) = (call(*batch) for call in calls)
        assert of_table is None
        np.testing.assert_array_equal(pooled, expected)
        np.testing.assert_array_equal(of_weights, of_expected)
    sparse = next(batches(1))[0].to_sparse()
    np.testing.assert_array_equal(
        sok.lookup_sparse(dynamic, sparse, training=False), sok.lookup_sparse(static, sparse, training=False)
    )
    for value, kept in zip(sok.export(dynamic), before, strict=True):
        np.testing.assert_array_equal(value, kept)
    assert sok.lookup_sparse(dynamic, ragged([[], []]), training=False).shape == (2, DIMENSION)


def test_lookups_in_a_branch():
    table, static = pair()
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))

    @tf.function
    def step(ids, taken):
        with tf.GradientTape() as tape:
            loss = tf.cond(
                taken, lambda: tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum")), lambda: tf.constant(0.0)
            )
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step(ragged([[1, 2], [2]]), tf.constant(False))
    assert table.size == 0
    step(ragged([[1, 2], [2]]), tf.constant(True))
    assert table.indices.numpy().tolist() == [1, 2]
    np.testing.assert_allclose(table[:2], tf.gather(static, [1, 2]) - [[1.0], [2.0]], rtol=1e-6)


def test_tf1_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tables = pair()
        placeholder = tf.compat.v1.placeholder(tf.int64, [None])
        ids = tf.RaggedTensor.from_row_splits(placeholder, [0, 2, 3])
        weights = tf.ones_like(ids, tf.float32)
        steps = []
        for table in tables:
            optimizer = sok.OptimizerWrapper(tf.compat.v1.train.AdamOptimizer(0.1))
            loss = tf.reduce_sum(tf.square(sok.lookup_sparse(table, ids, weights, "sum")))
            (gradient,) = tf.gradients(loss, [table])
            steps.append((loss, optimizer.apply_gradients([(gradient, table)])))
        evaluation = [sok.lookup_sparse(table, ids, training=False) for table in tables]
        size, assigned = tables[0].size, sok.assign(tables[0], [9], tf.ones([1, DIMENSION]))
        exported = sok.export(tables[0])
        session.run(tf.compat.v1.global_variables_initializer())
        for keys in ([5, 3, 5], [100, 3, 9], [0, 1, 2]):
            np.testing.assert_array_equal(*session.run(evaluation, {placeholder: keys}))
            (loss, _), (expected, _) = session.run(steps, {placeholder: keys})
            np.testing.assert_array_equal(loss, expected)
        assert session.run(size).tolist() == [7, DIMENSION]
        keys, rows = session.run(exported)
        np.testing.assert_array_equal(rows, session.run(tf.gather(tables[1], keys)))
        session.run(assigned)
        keys, rows = session.run(exported)
        np.testing.assert_array_equal(rows[keys.tolist().index(9)], np.ones(DIMENSION))
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(size).tolist() == [0, DIMENSION]
        session.run(steps, {placeholder: [5, 3, 5]})
        assert session.run(size).tolist() == [2, DIMENSION]


def test_assign_and_export():
    table, _ = pair(dtype=tf.bfloat16)
    rows = np.arange(18, dtype=np.float32).reshape(3, DIMENSION)
    assert sok.assign(table, tf.constant([-5, 2**40, -5]), rows) is table
    found = held(table)
    assert list(found) == [-5, 2**40]
    np.testing.assert_array_equal(found[-5].astype(np.float32), rows[2])
    np.testing.assert_array_equal(found[2**40].astype(np.float32), rows[1])
    sok.assign(table, np.array([2**40, 8]), rows[:2].astype(np.float64))
    assert list(held(table)) == [-5, 2**40, 8]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        sok.assign(table, [11, 12], rows)
    assert 11 not in held(table)


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.assign(tf.ones([1, 2])),
        lambda table: table.assign_add(tf.ones([1, 2])),
        lambda table: table.scatter_update(tf.IndexedSlices(tf.ones([1, 2]), [0])),
        lambda table: table[0].assign(tf.ones([2])),
        lambda table: table.scatter_nd_add([[0]], tf.ones([1, 2])),
    ],
)
def test_raw_writes_are_refused(write):
    table = sok.DynamicVariable(2, "zeros", name="mine")
    sok.all2all_dense_embedding(table, tf.constant([1]))
    with pytest.raises(TypeError, match=r"table 'mine' is dynamic.*sok\.assign"):
        write(table)
    np.testing.assert_array_equal(table, [[0, 0]])


def test_reads_are_copies():
    table = sok.DynamicVariable(2, "zeros")
    sok.all2all_dense_embedding(table, tf.constant([1]))
    kept = [table.read_value(), table.value(), tf.convert_to_tensor(table), table.read_value_no_copy()]
    sok.assign(table, [1, 2], tf.ones([2, 2]))
    for value in kept:
        np.testing.assert_array_equal(value, [[0, 0]])
    np.testing.assert_array_equal(table[:2], [[1, 1], [1, 1]])
    del table
    np.testing.assert_array_equal(kept[0], [[0, 0]])


def test_what_is_written_over_is_an_error():
    table = sok.DynamicVariable(2, "zeros", name="lost")
    tf.raw_ops.AssignVariableOp(resource=table.handle, value=tf.ones([1, 2]))
    for call in (lambda: sok.lookup_sparse(table, ragged([[1]])), lambda: table.size):
        with pytest.raises(tf.errors.FailedPreconditionError, match="'lost'"):
            call()


def test_a_state_keeps_the_memory():
    table, _ = pair()
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    train(table, optimizer, next(batches(1)))
    state = optimizer.slots(table)["m"]
    expected = state.numpy()
    del table, optimizer
    np.testing.assert_array_equal(state.read_value(), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dimension": 0}, ValueError, "dimension"),
        ({"dimension": 2.5}, TypeError, "dimension"),
        ({"capacity_of": 3}, TypeError, "no option 'capacity_of'; its options are init_capacity"),
        ({"var_type": "cpu"}, ValueError, "var_type"),
        ({"key_type": tf.float32}, TypeError, "key_type"),
        ({"dtype": tf.float64}, TypeError, "float64"),
        ({"mode": "localized:3"}, ValueError, "rank 3"),
        ({"constraint": abs}, TypeError, "constraint must be None"),
        ({"initializer": "glorot_uniform"}, ValueError, "number of rows"),
        ({"initializer": keras.initializers.GlorotUniform()}, TypeError, "initializer"),
        ({"initializer": keras.initializers.Orthogonal()}, TypeError, "initializer"),
        ({"initializer": "wrong"}, ValueError, "initializer"),
        ({"half_life": 5}, ValueError, "half_life is for"),
        ({"filter_ratio": 2.0}, ValueError, "filter_ratio"),
        ({"max_capacity": 0}, ValueError, "max_capacity"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        sok.DynamicVariable(**{"dimension": 2, **arguments})


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_layers(library):
    """`fit` inserts, `predict` does not."""
    table = sok.DynamicVariable(4, "uniform", name="items")
    layer = embedding.layer_class(library)({"items": table}, {"clicked": "items"}, "sum")
    clicked = library.Input((2,), dtype="int64")
    model = library.Model({"clicked": clicked}, library.layers.Dense(1)(layer({"clicked": clicked})["clicked"]))
    model.compile(sok.DistributedOptimizer(library.optimizers.Adam(0.1)), "mse", jit_compile=False)
    ids = np.arange(20).reshape(10, 2) - 5
    before = model.predict({"clicked": ids}, verbose=0)
    assert table.size == 0
    model.fit({"clicked": ids}, np.ones(10), epochs=3, verbose=0)
    assert sorted(table.indices.numpy().tolist()) == list(range(-5, 15))
    after = model.predict({"clicked": ids}, verbose=0)
    assert np.square(after - 1).mean() < np.square(before - 1).mean()
    model.predict({"clicked": ids + 1000}, verbose=0)
    assert table.size == 20
    assert len(layer.trainable_variables) == 1
