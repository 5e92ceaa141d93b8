# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: errors that come later, tables and ids on different devices, the same rows as on the CPU.

Everything else runs on both by the fixture `device`.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_harness import finished

import sparse_operation_kit.tensorflow as sok

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["gpu"], indirect=True)]

INVALID = tf.errors.InvalidArgumentError
START = np.arange(40, dtype=np.float32).reshape(10, 4)
BAD = "table 'items': key 10 is outside \\[0, 10\\)"


def ids(*rows):
    return tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)


def make_table(name="items"):
    return sok.Variable(START, name=name)


def step_of(tables, optimizer, compiled):
    """A training step over one ragged tensor of ids, for each table its own lookup."""

    def step(keys):
        with tf.GradientTape() as tape:
            outputs = [sok.lookup_sparse(table, keys, combiners="sum") for table in tables]
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    return tf.function(step, reduce_retracing=True) if compiled else step


def is_on_gpu(tensor):
    return "GPU" in tensor.device


def test_tables_states_and_outputs_are_on_the_gpu():
    table = make_table()
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    with tf.GradientTape() as tape:
        output = sok.lookup_sparse(table, ids([1], [2]))
        loss = tf.reduce_sum(output)
    wrapper.apply_gradients([(tape.gradient(loss, table), table)])
    assert is_on_gpu(table.handle) and is_on_gpu(output)
    assert all(is_on_gpu(state.handle) for state in wrapper.table_variables)
    for tensor in sok.export(table):
        assert not is_on_gpu(tensor)


@pytest.mark.parametrize("initializer", ["uniform", "normal", "glorot_uniform", "ones", 0.25])
def test_initial_rows_are_those_of_the_cpu(initializer):
    rows = []
    for place in ("cpu:0", "gpu:0"):
        with tf.device(place):
            rows.append(sok.Variable(shape=(1000, 33), initializer=initializer, name="same").numpy())
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("places", [("gpu:0", "cpu:0"), ("cpu:0", "gpu:0"), ("cpu:0", "cpu:0")], ids="-".join)
@pytest.mark.parametrize("kind", ["ragged", "sparse", "int32"])
def test_tables_and_ids_on_different_devices(places, kind, compiled):
    with tf.device(places[0]):
        table = sok.Variable(np.zeros((10, 4), np.float32), name="items")
    with tf.device(places[1]):
        keys = tf.ragged.constant([[1, 2], [], [2]], dtype=tf.int32 if kind == "int32" else tf.int64)
        weights = tf.ragged.constant([[1.0, 2.0], [], [3.0]])
        if kind == "sparse":
            keys, weights = keys.to_sparse(), weights.to_sparse()
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))

    def step(keys, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights.values)
            output = sok.lookup_sparse(table, keys, weights, "sum")
            loss = tf.reduce_sum(output)
        slices, weight_gradient = tape.gradient(loss, [table, weights.values])
        optimizer.apply_gradients([(slices, table)])
        return output, weight_gradient

    run = tf.function(step) if compiled else step
    for before in (0.0, 1.0):
        output, weight_gradient = run(keys, weights)
        np.testing.assert_array_equal(output[:, 0], [-11.0 * before, 0.0, -15.0 * before])
        np.testing.assert_array_equal(weight_gradient, np.array([-4.0, -20.0, -20.0]) * before)
    np.testing.assert_array_equal(table.numpy()[:3, 0], [0, -2, -10])


@pytest.mark.parametrize("place", ["cpu:0", "gpu:0"])
def test_graph_with_a_table_on_one_device(place):
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        with tf.device(place):
            table = sok.Variable(START, name="table")
        keys = v1.sparse_placeholder(tf.int64, [None, None])
        loss = tf.reduce_sum(sok.lookup_sparse(table, keys, combiners="sum"))
        step = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(1.0)).minimize(loss, var_list=[table])
        check = sok.check_errors()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(step, {keys: v1.SparseTensorValue([[0, 0]], [3], [1, 1])})
            session.run(check)
            np.testing.assert_allclose(session.run(table)[[2, 3]], [START[2], START[3] - 1])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_wrong_key_is_raised_by_check_errors(compiled):
    table = make_table()
    lookup = lambda: sok.lookup_sparse(table, ids([1, 10]))  # noqa: E731
    with pytest.raises(INVALID, match=BAD):
        finished(tf.function(lookup) if compiled else lookup)
    sok.check_errors()  # once


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_wrong_key_is_raised_before_tables_are_used_again(compiled):
    """Nothing changes, neither its table nor another one of the step; and a right batch goes on."""
    tables = [make_table(), make_table("others")]
    step = step_of(tables, sok.OptimizerWrapper(sok.SGD(1.0)), compiled)

    def steps():
        step(ids([1, 10]))
        tables[0].numpy()  # waits
        step(ids([1, 2]))

    with pytest.raises(INVALID, match=r"table '(items|others)': key 10 is outside \[0, 10\)"):
        steps()
    for table in tables:
        np.testing.assert_array_equal(table.numpy(), START)
    step(ids([1, 2]))
    sok.check_errors()
    for table in tables:
        np.testing.assert_array_equal(table.numpy()[:4], START[:4] - [[0], [1], [1], [0]])


def test_a_wrong_key_of_one_lookup_stops_the_update_of_the_other():
    """The record is the device's, not the call's."""
    good, bad = make_table("good"), make_table()
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            wrong = tf.reduce_sum(sok.lookup_sparse(bad, ids([10])))
            with tf.control_dependencies([wrong]):
                loss = tf.reduce_sum(sok.lookup_sparse(good, ids([1])))
        with tf.control_dependencies([wrong]):
            optimizer.apply_gradients([(tape.gradient(loss, good), good)])

    with pytest.raises(INVALID, match=BAD):
        finished(step)
    np.testing.assert_array_equal(good.numpy(), START)


@pytest.mark.parametrize("wrong", ["splits", "weights"])
def test_row_splits_that_do_not_fit(wrong):
    table = make_table()
    splits = tf.constant([0, 3, 2, 3], tf.int64)
    keys = tf.RaggedTensor.from_row_splits(tf.constant([1, 2, 3], tf.int64), splits, validate=False)
    weights = None
    if wrong == "weights":
        weights = keys.with_values(tf.ones(3))
    with pytest.raises(INVALID, match=r"'items'.*row_splits"):
        finished(sok.lookup_sparse, table, keys, weights)


def test_materialised_gradients_raise_at_once():
    table = make_table()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids([1, 10])))
    gradient = tape.gradient(loss, table)
    with pytest.raises(INVALID, match=BAD):
        _ = gradient.values


def test_assign_raises_at_once():
    table = make_table()
    with pytest.raises(INVALID, match=BAD):
        sok.assign(table, tf.constant([1, 10]), tf.ones([2, 4]))
    np.testing.assert_array_equal(table.numpy(), START)
    sok.check_errors()


def test_export_raises_what_was_found_before():
    table = make_table()
    sok.lookup_sparse(table, ids([10]))
    with pytest.raises(INVALID, match=BAD):
        sok.export(table)
    np.testing.assert_array_equal(sok.export(table)[1], START)


def test_a_dense_read_keeps_its_rows():
    """The first update copies the table where a read of it is alive."""
    table = make_table()
    read = table.read_value()
    step = step_of([table], sok.OptimizerWrapper(sok.SGD(1.0)), False)
    step(ids([1]))
    np.testing.assert_array_equal(read, START)
    np.testing.assert_array_equal(table.numpy()[1], START[1] - 1)


def test_many_steps_leave_no_memory_behind():
    """With another batch size at each step."""
    table = sok.Variable(shape=(1000, 16), initializer="uniform")
    step = step_of([table], sok.OptimizerWrapper(sok.SGD(0.1)), True)
    generator = np.random.default_rng(0)
    used = []
    for i in range(300):
        step(tf.RaggedTensor.from_row_lengths(generator.integers(0, 1000, 2 * (size := 50 + i % 37)), [2] * size))
        if i in (99, 299):
            table.numpy()
            used.append(tf.config.experimental.get_memory_info("GPU:0")["current"])
    assert used[1] <= used[0] + 4096


def test_a_table_and_its_states_are_in_memory_once():
    """Made on the GPU, and updated in place."""
    shape, batch = (2**20, 64), 512
    size = 4 * shape[0] * shape[1]
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    table = sok.Variable(shape=shape, initializer="uniform")
    step = step_of([table], sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1)), True)
    for i in range(3):
        step(tf.RaggedTensor.from_row_lengths(tf.range(i, i + batch, dtype=tf.int64), tf.ones([batch], tf.int64)))
    sok.check_errors()
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] - before
    assert peak <= 2 * size + 2**24, f"{peak / size} times the table"


def test_no_op_of_a_step_reads_back():
    """Numbers of the optimizer are made on the host, and what the step makes on the GPU stays there."""
    table = make_table()
    step = step_of([table], sok.OptimizerWrapper(sok.SGD(1.0)), True)
    batch = ids([1, 2], [3])
    step(batch)
    operations = step.get_concrete_function(batch).graph.get_operations()
    apply = next(op for op in operations if op.type == "SokApply")
    for tensor in apply.inputs:
        if tensor.dtype == tf.float64:
            assert "CPU" in tensor.op.device, tensor
    assert not [op for op in operations if op.type == "SokReduce"]
