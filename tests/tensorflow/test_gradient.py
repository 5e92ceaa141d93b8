# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables are tf.IndexedSlices for everybody and are made only when somebody looks."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_harness as harness

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow.agreement import Agreement
from sparse_operation_kit.tensorflow.gradient import PendingGradient, scaled

IDS = tf.ragged.constant([[1, 2], [], [2, 2, 5]], dtype=tf.int64)
EXPECTED = np.zeros((6, 4))
EXPECTED[[1, 2, 5]] = np.array([1, 3, 1])[:, None]


def make_table():
    return sok.Variable(np.random.default_rng(0).random((6, 4)).astype(np.float32), name="g")


def loss_of(table, ids=IDS):
    return tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))


def reduce_ops(graph):
    return [op.name for op in graph.get_operations() if op.type == "SokReduce"]


def test_tape_gives_pending_gradients():
    table, other = make_table(), make_table()
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(o) for o in sok.lookup_sparse([table, other], [IDS, IDS], combiners="sum")])
    gradients = tape.gradient(loss, [table, other])
    for gradient in gradients:
        assert isinstance(gradient, PendingGradient) and isinstance(gradient, tf.IndexedSlices)
        assert gradient.shape == (6, 4) and gradient.dtype == tf.float32
        assert gradient._sok_reduced is None
        np.testing.assert_array_equal(gradient.dense_shape, [6, 4])
        np.testing.assert_array_equal(gradient.indices, [1, 2, 5])
        np.testing.assert_array_equal(tf.convert_to_tensor(gradient), EXPECTED)
        assert gradient.values is gradient.values


def test_nothing_is_reduced_in_a_function_unless_read():
    table = make_table()
    optimizer = sok.OptimizerWrapper(sok.SGD(0.5))

    @tf.function
    def train():
        with tf.GradientTape() as tape:
            loss = loss_of(table)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    before = table.numpy()
    train()
    assert not reduce_ops(train.get_concrete_function().graph)
    np.testing.assert_allclose(table.numpy(), before - 0.5 * EXPECTED, rtol=1e-6)

    @tf.function
    def inspect():
        with tf.GradientTape() as tape:
            loss = loss_of(table)
        gradient = tape.gradient(loss, table)
        return gradient.indices, gradient.values, tf.norm(gradient.values)

    assert len(reduce_ops(inspect.get_concrete_function().graph)) == 1
    np.testing.assert_array_equal(np.sort(table.held().keys(inspect()[0].numpy())), [1, 2, 5])


def test_across_a_function_boundary():
    table = make_table()
    compiled = tf.function(lambda: loss_of(table))
    with tf.GradientTape() as tape:
        loss = compiled()
    np.testing.assert_array_equal(harness.dense(tape.gradient(loss, table), table), EXPECTED)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = compiled()
        return tape.gradient(loss, table)

    result = gradient()
    assert isinstance(result, tf.IndexedSlices)
    np.testing.assert_array_equal(harness.dense(result, table), EXPECTED)


def test_several_calls_in_a_step_add_up():
    table = make_table()
    with tf.GradientTape() as tape:
        loss = loss_of(table) + 2 * loss_of(table) + tf.reduce_sum(sok.all2all_dense_embedding(table, [0, 5]))
    gradient = tape.gradient(loss, table)
    expected = 3 * EXPECTED
    expected[[0, 5]] += 1
    np.testing.assert_allclose(harness.by_key(gradient, table), expected)
    before = table.numpy()
    sok.OptimizerWrapper(sok.SGD(0.5)).apply_gradients([(gradient, table)])
    np.testing.assert_allclose(table.numpy(), before - 0.5 * expected, rtol=1e-5)


def test_a_table_that_is_read_densely_too():
    table = make_table()
    with tf.GradientTape() as tape:
        loss = loss_of(table) + tf.reduce_sum(tf.convert_to_tensor(table))
    gradient = tape.gradient(loss, table)
    np.testing.assert_allclose(harness.by_key(gradient, table), EXPECTED + 1)
    before = table.numpy()
    sok.OptimizerWrapper(sok.SGD(0.5)).apply_gradients([(gradient, table)])
    np.testing.assert_allclose(table.numpy(), before - 0.5 * (EXPECTED + 1), rtol=1e-5)


def test_conditional_and_loop():
    table = make_table()

    @tf.function
    def train(flag, steps):
        with tf.GradientTape() as tape:
            loss = tf.cond(flag, lambda: loss_of(table), lambda: 2 * loss_of(table))
            for _ in tf.range(steps):
                loss += loss_of(table)
        return tape.gradient(loss, table)

    for flag, steps, factor in ((True, 0, 1), (False, 0, 2), (True, 2, 3)):
        gradient = train(tf.constant(flag), tf.constant(steps))
        np.testing.assert_allclose(harness.by_key(gradient, table), factor * EXPECTED)


def test_frozen_tables_and_unwatched_ones_have_no_gradient():
    frozen = sok.Variable(np.ones((6, 4), np.float32), trainable=False)
    table = make_table()
    with tf.GradientTape() as tape:
        loss = loss_of(frozen) + loss_of(table)
    gradients = tape.gradient(loss, [frozen, table])
    assert gradients[0] is None and gradients[1] is not None


def test_second_use_of_a_persistent_tape():
    table = make_table()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(table)
    for _ in range(2):
        np.testing.assert_array_equal(harness.by_key(tape.gradient(loss, table), table), EXPECTED)


def test_clipping_and_arithmetic_of_tensorflow():
    table = make_table()
    with tf.GradientTape() as tape:
        loss = loss_of(table)
    gradient = tape.gradient(loss, table)
    (clipped,), norm = tf.clip_by_global_norm([gradient], 1.0)
    np.testing.assert_allclose(norm, np.linalg.norm(EXPECTED), rtol=1e-6)
    np.testing.assert_allclose(harness.by_key(clipped, table), EXPECTED / np.linalg.norm(EXPECTED), rtol=1e-6)
    np.testing.assert_array_equal(harness.by_key(-gradient, table), -EXPECTED)
    before = table.numpy()
    sok.OptimizerWrapper(sok.SGD(1.0)).apply_gradients([(clipped, table)])
    np.testing.assert_allclose(table.numpy(), before - EXPECTED / np.linalg.norm(EXPECTED), rtol=1e-5)


@pytest.mark.parametrize("in_graph", [False, True])
def test_scaled_gradients_cost_nothing_until_they_are_read(in_graph):
    """Of several gradients of a table, each with a factor of its own, and of tables with different factors."""
    tables = [make_table(), make_table()]
    before = [table.numpy().astype(np.float64) for table in tables]
    optimizer = sok.OptimizerWrapper(sok.SGD(0.5))
    factors = [(0.25, 3.0), (0.0, 2.0)]

    def step():
        pairs = []
        for table, pair in zip(tables, factors, strict=True):
            for factor in pair:
                with tf.GradientTape() as tape:
                    loss = loss_of(table)
                pairs.append((scaled(tape.gradient(loss, table), factor), table))
        pairs.append((scaled(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64), [6, 4]), 7.0), tables[0]))
        assert all(isinstance(gradient, PendingGradient) for gradient, _ in pairs[:-1])
        optimizer.apply_gradients(pairs)
        return scaled(pairs[1][0], 0.5).values

    values = (tf.function(step) if in_graph else step)()
    np.testing.assert_allclose(values, 1.5 * EXPECTED[[1, 2, 5]])
    sums = [3.25 * EXPECTED, 2.0 * EXPECTED]
    sums[0][5] += 7.0
    for table, was, gradient in zip(tables, before, sums, strict=True):
        np.testing.assert_allclose(table.numpy(), was - 0.5 * gradient, rtol=1e-6)


def test_what_the_update_waits_for_its_inputs_do_not(monkeypatch):
    """An input on the host that waits for an exchange on the GPU would wait for all that the GPU has queued."""
    tables = [make_table(), make_table()]
    optimizer = sok.OptimizerWrapper(sok.SGD(0.5))
    waiting = []

    def update(self, make):
        marker = tf.no_op("an_exchange")
        with tf.control_dependencies([marker]):
            made = make([])
        waiting.extend(op.type for op in marker.graph.get_operations() if marker in op.control_inputs)
        return made

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([loss_of(table) for table in tables])
        gradients = tape.gradient(loss, tables)
        dense = tf.ones([6, 4])
        pairs = [*zip([scaled(gradient, 0.5) for gradient in gradients], tables, strict=True), (dense, tables[0])]
        optimizer.apply_gradients(pairs)

    monkeypatch.setattr(Agreement, "update", update)
    step()
    assert waiting == ["SokApply"]


def test_an_optimizer_gets_output_gradients_of_an_unsorted_batch():
    table = make_table()
    ids = tf.SparseTensor([[2, 0], [0, 0], [2, 1], [0, 1], [2, 2]], tf.constant([2, 1, 2, 2, 5], tf.int64), [3, 3])
    with tf.GradientTape() as tape:
        loss = loss_of(table, ids)
    np.testing.assert_array_equal(harness.by_key(tape.gradient(loss, table), table), EXPECTED)


def test_second_derivatives_are_refused_not_wrong():
    table = make_table()
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(tf.square(sok.lookup_sparse(table, IDS, combiners="sum")))
        values = inner.gradient(loss, table).values
        total = tf.reduce_sum(values)
    with pytest.raises(LookupError):
        outer.gradient(total, table)
