# SPDX-License-Identifier: Apache-2.0
"""A tf.compat.v1 graph with a Session."""

import keras  # noqa: F401 - Keras must not disturb graph mode when it is there
import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

V1 = tf.compat.v1
START = np.random.default_rng(4).random((10, 4)).astype(np.float32)


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def sparse_value(rows):
    return V1.SparseTensorValue([[i, 0] for i in range(len(rows))], rows, [len(rows), 1])


OPTIMIZERS = {
    "GradientDescent": lambda: V1.train.GradientDescentOptimizer(0.1),
    "Adam": lambda: V1.train.AdamOptimizer(0.1),
    "Adagrad": lambda: V1.train.AdagradOptimizer(V1.placeholder_with_default(0.1, [])),
    "Momentum": lambda: V1.train.MomentumOptimizer(0.1, 0.9),
}


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "plain"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train(graph, name, wrapped):
    """The same losses as for an ordinary variable, whose rows are all in the batch."""
    table = sok.Variable(START, name="table")
    variable = V1.get_variable("variable", initializer=START, use_resource=True)
    dense = [V1.get_variable(n, [4], initializer=V1.ones_initializer(), use_resource=True) for n in ("a", "b")]
    ids = V1.sparse_placeholder(tf.int64, [None, None])
    losses = [
        tf.reduce_sum(tf.square(sok.lookup_sparse(table, ids, combiners="sum") * dense[0] - 1.0)),
        tf.reduce_sum(tf.square(tf.gather(variable, ids.values) * dense[1] - 1.0)),
    ]
    step = V1.train.get_or_create_global_step()
    gradients = tf.gradients(losses[0], [table, dense[0]])
    assert isinstance(gradients[0], tf.IndexedSlices)
    optimizer = OPTIMIZERS[name]()
    if wrapped:
        optimizer = sok.OptimizerWrapper(optimizer)
    trains = [
        optimizer.apply_gradients(zip(gradients, [table, dense[0]], strict=True), global_step=step),
        OPTIMIZERS[name]().minimize(losses[1], var_list=[variable, dense[1]]),
    ]
    assert bool([op for op in graph.get_operations() if op.type == "SokReduce"]) != wrapped
    assert table in V1.global_variables() and table in V1.trainable_variables()
    with V1.Session() as session:
        session.run(V1.global_variables_initializer())
        for i in range(5):
            rows = np.random.default_rng(i).permutation(10)
            first, second = session.run(losses, {ids: sparse_value(rows)})
            np.testing.assert_allclose(first, second, rtol=1e-5)
            for train in trains:
                session.run(train, {ids: sparse_value(rows)})
        assert session.run(step) == 5
        results = session.run([table, variable, *dense])
        np.testing.assert_allclose(results[0], results[1], rtol=1e-4)
        np.testing.assert_allclose(results[2], results[3], rtol=1e-4)


def test_only_tables(graph):
    table = sok.Variable(START, name="table")
    loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1, 1]))
    step = V1.train.get_or_create_global_step()
    optimizer = sok.OptimizerWrapper(V1.train.AdamOptimizer(0.5))
    train = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)], global_step=step)
    with V1.Session() as session:
        session.run(V1.global_variables_initializer())
        session.run(train)
        session.run(train)
        np.testing.assert_allclose(session.run(table)[1], START[1] - 1.0, rtol=1e-4)
        assert session.run([step, optimizer.iterations]) == [2, 2]


def test_minimize(graph):
    table = sok.Variable(START, name="table")
    dense = V1.get_variable("dense", [4], initializer=V1.ones_initializer(), use_resource=True)
    loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1]) + dense)
    step = V1.train.get_or_create_global_step()
    train = sok.OptimizerWrapper(V1.train.GradientDescentOptimizer(0.5)).minimize(loss, global_step=step)
    assert not [op for op in graph.get_operations() if op.type == "SokReduce"]
    with V1.Session() as session:
        session.run(V1.global_variables_initializer())
        session.run(train)
        np.testing.assert_allclose(session.run(table)[1], START[1] - 0.5)
        np.testing.assert_allclose(session.run(dense), [0.5] * 4)
        assert session.run(step) == 1


def test_a_list_as_initial_value():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.Variable([[3, 4, 5]])
        session.run(tf.compat.v1.global_variables_initializer())
        assert table.dtype == tf.float32 and session.run(table.read_value()).tolist() == [[3, 4, 5]]


def test_initial_rows_and_slots():
    eager = sok.Variable(shape=(10, 4), initializer="normal", name="drawn").numpy()
    with tf.Graph().as_default():
        check_initial_rows_and_slots(eager)


def check_initial_rows_and_slots(eager):
    table = sok.Variable(shape=(10, 4), initializer="normal", name="drawn")
    optimizer = sok.OptimizerWrapper(V1.train.AdagradOptimizer(0.5, initial_accumulator_value=0.25))
    loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1]))
    train = optimizer.apply_gradients([(tf.gradients(loss, table)[0], table)])
    with V1.Session() as session:
        session.run(V1.global_variables_initializer())
        first = session.run(table)
        session.run(train)
        np.testing.assert_array_equal(session.run(optimizer.slots(table)["accumulator"])[:2, 0], [0.25, 1.25])
        session.run(table.initializer)
        np.testing.assert_array_equal(session.run(table), first)
    np.testing.assert_array_equal(first, eager)


def test_uninitialised_and_bad_keys(graph):
    table = sok.Variable(START, name="table")
    key = V1.placeholder(tf.int64, [1])
    output = sok.all2all_dense_embedding(table, key)
    check = sok.check_errors()
    with V1.Session() as session:
        with pytest.raises(tf.errors.FailedPreconditionError, match="table"):
            session.run(output, {key: [1]})
        session.run(table.initializer)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"key 11 is outside \[0, 10\)"):
            _ = [session.run(fetch, {key: [11]}) for fetch in (output, check)]


def test_assign_and_export(graph):
    table = sok.Variable(START, name="table")
    write = sok.assign(table, [3], np.full((1, 4), 5, np.float32))
    with tf.control_dependencies([write]):
        keys, values = sok.export(table)
    with V1.Session() as session:
        session.run(V1.global_variables_initializer())
        keys, values = session.run([keys, values])
        np.testing.assert_array_equal(keys, np.arange(10))
        np.testing.assert_array_equal(values[3], [5] * 4)
        np.testing.assert_array_equal(values[2], START[2])


def test_distributed_optimizer(graph):
    table = sok.Variable(START, name="table")
    dense = V1.get_variable("dense", [4], initializer=V1.ones_initializer(), use_resource=True)
    loss = tf.reduce_sum(sok.all2all_dense_embedding(table, [1]) + dense)
    train = sok.DistributedOptimizer(V1.train.GradientDescentOptimizer(0.5)).minimize(loss)
    sync = sok.broadcast_variables([table, dense])
    with V1.Session() as session:
        session.run(V1.global_variables_initializer())
        session.run(sync)
        session.run(train)
        np.testing.assert_allclose(session.run(table)[1], START[1] - 0.5)
        np.testing.assert_allclose(session.run(dense), [0.5] * 4)
