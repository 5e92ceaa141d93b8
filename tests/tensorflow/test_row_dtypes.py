# SPDX-License-Identifier: Apache-2.0
"""Tables of float16 and bfloat16: each step is that of a float32 table with the same rows, rounded."""

import pickle

import cases
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
import tensorflow_harness as harness
import tf_keras
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow.embedding import layer_class

HALVES = (tf.float16, tf.bfloat16)
ROWS, DIMENSION = 7, 5

each_half = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.name)

# Fused, and on the rows of the step through Keras.
OPTIMIZERS = {
    "keras SGD": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01),
    "keras momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "keras Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "keras Adam": lambda: keras.optimizers.Adam(0.02),
    "keras AdamW": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.05),
    "keras Adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "keras RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, epsilon=1e-3),
    "keras Ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "keras Nadam": lambda: keras.optimizers.Nadam(0.02),
    "keras amsgrad": lambda: keras.optimizers.Adam(0.02, amsgrad=True),
    "tf_keras Adamax": lambda: tf_keras.optimizers.Adamax(0.02),
    "tf_keras clipvalue": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.1),
    "legacy Adam": lambda: tf_keras.optimizers.legacy.Adam(0.02),
    "v1 Adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(0.1),
    "row-wise Adagrad": lambda: sok.RowWiseAdagrad(0.1),
}


def bits(value):
    """The bits of a tensor, variable or array of 16 bits a number."""
    return np.asarray(value).view(np.uint16)


def widened(table, **options):
    """A float32 table with the same rows."""
    return sok.Variable(tf.cast(table.read_value(), tf.float32), **options)


def rounded(values, dtype):
    """As `reference` rounds, independently of TensorFlow: bits."""
    return bits(
        reference.rounded(np.asarray(values), np.dtype(np.float16) if dtype == tf.float16 else reference.BFLOAT16)
    )


def make_table(dtype, seed=1, **options):
    initial = np.random.default_rng(seed).standard_normal((ROWS, DIMENSION)).astype(np.float32)
    return sok.Variable(initial, dtype=dtype, **options)


def step_of(table, optimizer, compiled):
    def step(rows, gradients):
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse(table, tf.RaggedTensor.from_row_lengths(rows, [2, 1, 0, 3]), combiners="mean")
            loss = tf.reduce_sum(output * gradients)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return output

    return tf.function(step) if compiled else step


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@each_half
def test_steps_are_those_of_float32_rows_rounded(dtype, name, compiled):
    rng = np.random.default_rng(3)
    table = make_table(dtype)
    wide = widened(table)
    assert table.dtype == dtype
    optimizers = [sok.OptimizerWrapper(OPTIMIZERS[name]()) for _ in range(2)]
    steps = [step_of(x, one, compiled) for x, one in zip((table, wide), optimizers, strict=True)]
    for _ in range(8):
        before = table.numpy()
        wide.assign(tf.cast(table.read_value(), tf.float32))
        rows = rng.integers(0, ROWS, 6)
        gradients = tf.constant(rng.standard_normal((4, DIMENSION)), tf.float32)
        outputs = [step(tf.constant(rows), gradients) for step in steps]
        assert outputs[0].dtype == tf.float32
        np.testing.assert_array_equal(*outputs)
        np.testing.assert_array_equal(bits(table.numpy()), rounded(wide.numpy(), dtype))
        rest = np.setdiff1d(np.arange(ROWS), rows)
        np.testing.assert_array_equal(bits(table.numpy()[rest]), bits(before[rest]))
    states, others = (one.slots(x) for one, x in zip(optimizers, (table, wide), strict=True))
    assert set(states) == set(others)
    for key, state in states.items():
        assert state.dtype == tf.float32
        np.testing.assert_array_equal(state.numpy(), others[key].numpy())


@given(cases.calls(max_tables=6, max_dimension=100), st.integers(0, 2), st.sampled_from(harness.KINDS))
def test_outputs_and_gradients_of_any_call(call, first, kind):
    """Tables of several dtypes in one call."""
    dtypes = (tf.float32, *HALVES)
    tables = [
        sok.Variable(call.rows(t), dtype=dtypes[(first + t) % 3], name=f"table{t}") for t in range(len(call.tables))
    ]
    wide = [widened(table) for table in tables]
    results = []
    for group in (tables, wide):
        with tf.GradientTape() as tape:
            outputs = harness.lookup(call, group, kind)
            loss = harness.weighted_sum(call, outputs)
        results.append((outputs, tape.gradient(loss, group)))
    for output, wanted in zip(results[0][0], results[1][0], strict=True):
        assert output.dtype == tf.float32
        np.testing.assert_array_equal(output, wanted)
    for gradient, wanted in zip(results[0][1], results[1][1], strict=True):
        assert (gradient is None) == (wanted is None)
        if gradient is not None:
            assert gradient.dtype == gradient.values.dtype == tf.float32
            np.testing.assert_array_equal(gradient.indices, wanted.indices)
            np.testing.assert_array_equal(gradient.values, wanted.values)


@each_half
def test_gradients_that_others_made(dtype):
    """Dense and sparse ones, of the table's dtype or float32, clipped or not."""
    for make in (
        lambda: tf.ones([ROWS, DIMENSION], dtype),
        lambda: tf.IndexedSlices(tf.ones([ROWS, DIMENSION], dtype), tf.range(ROWS)),
        lambda: tf.ones([ROWS, DIMENSION]),
    ):
        table = make_table(dtype)
        expected = rounded(tf.cast(table.read_value(), tf.float32) - 0.5, dtype)
        sok.OptimizerWrapper(keras.optimizers.SGD(0.5)).apply_gradients([(make(), table)])
        np.testing.assert_array_equal(bits(table.numpy()), expected)
    table = make_table(dtype)
    wide = widened(table)
    for x in (table, wide):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(x, tf.ragged.constant([[1, 3, 3]], dtype=tf.int64)))
        (gradient,), _ = tf.clip_by_global_norm([tape.gradient(loss, x)], 0.3)
        sok.OptimizerWrapper(keras.optimizers.SGD(0.5)).apply_gradients([(gradient, x)])
    np.testing.assert_array_equal(bits(table.numpy()), rounded(wide.numpy(), dtype))


@each_half
def test_initial_rows_are_those_of_float32_rounded(dtype):
    chosen = ["uniform", "normal", "glorot_uniform", 0.1, keras.initializers.TruncatedNormal(0.5, 2.0, seed=3)]
    for initializer in [*chosen, keras.initializers.Orthogonal(seed=4)]:
        wide = sok.Variable(shape=(50, 7), initializer=initializer, name="same")
        table = sok.Variable(shape=(50, 7), initializer=initializer, name="same", dtype=dtype)
        assert table.dtype == dtype
        if initializer in chosen:
            np.testing.assert_array_equal(bits(table.numpy()), rounded(wide.numpy(), dtype))


def test_dtype_is_that_of_the_initial_value():
    for dtype in HALVES:
        value = np.ones((3, 2), dtype.as_numpy_dtype)
        assert sok.Variable(value).dtype == dtype
        assert sok.Variable(tf.constant(value)).dtype == dtype
        assert sok.Variable(value, dtype=tf.float32).dtype == tf.float32
        assert sok.Variable([[1.0, 2.0]], dtype=dtype.name).dtype == dtype
    values = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    np.testing.assert_array_equal(bits(sok.Variable(values, dtype=tf.bfloat16).numpy()), rounded(values, tf.bfloat16))


@each_half
def test_assign_and_export(dtype):
    table = make_table(dtype)
    values = np.random.default_rng(0).standard_normal((2, DIMENSION)).astype(np.float32)
    sok.assign(table, [3, 5], values)
    np.testing.assert_array_equal(bits(table.numpy()[[3, 5]]), rounded(values, dtype))
    sok.assign(table, [4], tf.cast(values[:1], dtype))
    np.testing.assert_array_equal(bits(table.numpy()[4]), rounded(values[0], dtype))
    keys, rows = sok.export(table)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(bits(rows.numpy()), bits(table.numpy()))
    assert keys.numpy().tolist() == list(range(ROWS))
    with pytest.raises(TypeError, match="values must be floating, got int32"):
        sok.assign(table, [3], np.ones((1, DIMENSION), np.int32))


@each_half
def test_in_a_graph_of_tf1(dtype):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.Variable(shape=(10, 4), initializer="normal", name="items", dtype=dtype)
        output = sok.lookup_sparse(table, tf.SparseTensor([[0, 0], [0, 1]], tf.constant([2, 2], tf.int64), [1, 2]))
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        step = optimizer.apply_gradients([(tf.gradients(tf.reduce_sum(output), table)[0], table)])
        session.run(tf.compat.v1.global_variables_initializer())
        before = session.run(table)
        session.run(step)
        after = session.run(table)
    expected = before.astype(np.float32)
    expected[2] -= 0.5
    np.testing.assert_array_equal(bits(after), rounded(expected, dtype))


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@each_half
def test_collection(dtype, library):
    from sparse_operation_kit.tensorflow.embedding import layer_class

    layer = layer_class(library)({"a": (10, 4), "b": (5, 2)}, table_dtype={"a": dtype.name})
    assert layer.tables["a"].dtype == dtype
    assert layer.tables["b"].dtype == tf.float32
    outputs = layer({"a": tf.constant([[1, 2]]), "b": tf.constant([[1, 1]])})
    assert {output.dtype for output in outputs.values()} == {tf.float32}
    again = type(layer).from_config(layer.get_config())
    assert {name: table.dtype for name, table in again.tables.items()} == {"a": dtype, "b": tf.float32}
    inputs = {name: library.Input((2,), dtype="int64", name=name) for name in "ab"}
    pooled = library.layers.Concatenate()(list(layer(inputs).values()))
    model = library.Model(inputs, library.layers.Dense(1)(pooled))
    tables, _ = sok.filter_variables(model.trainable_variables)
    assert {table.dtype if isinstance(table.dtype, str) else table.dtype.name for table in tables} >= {dtype.name}


@each_half
def test_finite_rows_that_would_be_infinite_are_not_loaded(dtype, tmp_path):
    rows = np.ones((ROWS, DIMENSION), np.float32)
    rows[3, 2], rows[4, 2] = -3.4e38, np.inf
    sok.dump(tmp_path / "d", [sok.Variable(rows, name="t"), sok.Variable(np.ones_like(rows), name="u")])
    tables = [make_table(dtype, name="u"), make_table(dtype, name="t")]
    before = [bits(table) for table in tables]
    dynamic = sok.DynamicVariable(DIMENSION, name="t", dtype=dtype)
    for chosen in (tables, [dynamic]):
        with pytest.raises(ValueError, match=r"t_0-weight: the row of key 3 has the element -3.4e\+38"):
            sok.load(tmp_path / "d", chosen)
    for table, was in zip(tables, before, strict=True):
        np.testing.assert_array_equal(bits(table), was)
    assert int(dynamic.size) == 0
    sok.load(tmp_path / "d", tables[0])
    np.testing.assert_array_equal(np.asarray(tables[0], np.float32), np.ones_like(rows))


@pytest.mark.parametrize("dtype", [*HALVES, tf.float32], ids=lambda dtype: dtype.name)
def test_an_initial_number_that_the_dtype_does_not_hold(dtype):
    number = {tf.float16: 65520.0, tf.bfloat16: -3.3962e38, tf.float32: 3.4029e38}[dtype]
    for chosen in (number, str(number), keras.initializers.Constant(number)):
        with pytest.raises(ValueError, match=f"table 't': {dtype.name} does not hold the initial value "):
            sok.Variable(shape=(2, 2), name="t", dtype=dtype, initializer=chosen)
        with pytest.raises(ValueError, match=r"table 't': .* does not hold the initial value "):
            sok.DynamicVariable(2, name="t", dtype=dtype, initializer=chosen)
        with pytest.raises(ValueError, match=r"table 't': .* does not hold the initial value "):
            sok.TableStack({"s": (2, 2), "t": (3, 2)}, dtype=dtype, initializer={"t": chosen})
    assert np.isfinite(np.asarray(sok.Variable(shape=(2, 2), dtype=dtype, initializer=number * 0.999), float)).all()


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@each_half
def test_files_of_keras(dtype, library, tmp_path):
    """HDF5 gives bfloat16 back as two bytes without a meaning."""
    tables = {"a": (ROWS, 2), "b": {"dimension": 2, "dtype": dtype.name}}
    layer = layer_class(library)(tables, table_dtype=dtype, initializer="normal", concat=True, name="tables")
    inputs = {name: library.Input((1,), dtype="int64", name=name) for name in tables}
    model = library.Model(inputs, library.layers.Dense(1)(layer(inputs)))
    model.compile(sok.DistributedOptimizer(library.optimizers.Adam(0.1)), "mse", jit_compile=False)
    ids = np.arange(ROWS)[:, None]
    data = {"a": ids, "b": ids}, np.ones((ROWS, 1))
    model.fit(*data, verbose=0)
    wanted = [bits(sok.export(table)[1]) for table in layer.tables.values()]
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    copies = [library.models.load_model(tmp_path / "model.keras"), pickle.loads(pickle.dumps(model))]
    model.fit(*data, verbose=0)
    assert (bits(sok.export(layer.tables["a"])[1]) != wanted[0]).any()
    model.load_weights(tmp_path / "model.weights.h5")
    for each in (model, *copies):
        for table, rows in zip(each.get_layer("tables").tables.values(), wanted, strict=True):
            np.testing.assert_array_equal(bits(sok.export(table)[1]), rows)
