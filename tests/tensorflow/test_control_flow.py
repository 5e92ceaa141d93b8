# SPDX-License-Identifier: Apache-2.0
"""Lookups in tf.cond, tf.switch_case and tf.while_loop of a tf.function, beside the same in eager mode."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok


def look(table, keys=(1, 2, 3), scale=1.0):
    """[2, 2] of the row of keys[0] and the sum of the others."""
    ids = tf.RaggedTensor.from_row_splits(tf.constant(keys, tf.int64), [0, 1, len(keys)])
    return sok.lookup_sparse(table, ids, combiners="sum") * scale


def nothing():
    return tf.zeros([2, 2])


def loop(body):
    return tf.while_loop(lambda i, total: i < 3, lambda i, total: (i + 1, total + body(i)), (0, nothing()))[1]


def weighted(table, factor):
    ids = tf.RaggedTensor.from_row_splits(tf.constant([1, 2, 3], tf.int64), [0, 1, 3])
    return sok.lookup_sparse(table, ids, ids.with_values(factor * tf.ones([3])), combiners="sum")


FORMS = {
    "one branch": lambda table, yes, x: tf.cond(yes, lambda: look(table), nothing),
    "each branch": lambda table, yes, x: tf.cond(yes, lambda: look(table), lambda: look(table, (5, 3), 2.0)),
    "a branch and outside": lambda table, yes, x: look(table, (5, 3)) + tf.cond(yes, lambda: look(table), nothing),
    "switch": lambda table, yes, x: tf.switch_case(
        tf.cast(yes, tf.int32), [nothing, lambda: look(table), lambda: look(table, (4, 4))]
    ),
    "a branch in a branch": lambda table, yes, x: tf.cond(
        yes, lambda: tf.cond(x > 0, lambda: look(table), nothing), nothing
    ),
    "loop": lambda table, yes, x: loop(lambda i: look(table)),
    "a branch in a loop": lambda table, yes, x: loop(lambda i: tf.cond(yes, lambda: look(table), nothing)),
    "dense": lambda table, yes, x: tf.cond(yes, lambda: sok.all2all_dense_embedding(table, [1, 1]), nothing),
    "weights": lambda table, yes, x: tf.cond(yes, lambda: weighted(table, x), nothing),
}


def table_of():
    return sok.Variable(np.arange(16, dtype=np.float32).reshape(8, 2), name="items")


def losses_and_gradients(form, table, x, yes):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(FORMS[form](table, yes, x) * [[1.0, 2.0], [3.0, 4.0]]) * x
    return loss, tape.gradient(loss, [table, x])


@pytest.mark.parametrize("form", FORMS)
def test_as_in_eager_mode(form):
    table, x = table_of(), tf.Variable(2.0)
    compiled = tf.function(losses_and_gradients)
    for yes in (True, False):
        loss, (of_table, of_x) = compiled(form, table, x, tf.constant(yes))
        expected, (expected_of_table, expected_of_x) = losses_and_gradients(form, table, x, tf.constant(yes))
        np.testing.assert_allclose(loss, expected)
        np.testing.assert_allclose(of_x, expected_of_x)
        # The rows that were looked up, and no others.
        assert isinstance(of_table, tf.IndexedSlices) and of_table.dense_shape.numpy().tolist() == [8, 2]
        if expected_of_table is None:
            assert of_table.indices.shape == [0] and of_table.values.shape == [0, 2]
        else:
            assert set(of_table.indices.numpy()) == set(expected_of_table.indices.numpy())
            np.testing.assert_allclose(tf.convert_to_tensor(of_table), tf.convert_to_tensor(expected_of_table))


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("form", ["one branch", "loop", "a branch in a loop", "map"])
@pytest.mark.parametrize("tapes", ["persistent", "nested"])
def test_tapes(tapes, form, is_dynamic):
    forms = {**FORMS, "map": lambda table, yes, x: tf.reduce_sum(tf.map_fn(lambda n: look(table) * n, tf.ones([3])), 0)}

    def gradient(table, yes):
        with tf.GradientTape(persistent=tapes == "persistent") as tape:
            if tapes == "persistent":
                loss = tf.reduce_sum(forms[form](table, yes, tf.constant(1.0)) * [[1.0, 2.0], [3.0, 4.0]])
            else:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_sum(forms[form](table, yes, tf.constant(1.0)) * [[1.0, 2.0], [3.0, 4.0]])
        found = (tape if tapes == "persistent" else inner).gradient(loss, table)
        return found.indices, found.values

    table = sok.DynamicVariable(2, name="items") if is_dynamic else table_of()
    look(table, (1, 2, 3))
    assert forms["one branch"](table, True, None).shape == [2, 2]
    results = [each(table, tf.constant(True)) for each in (gradient, tf.function(gradient))]
    sums = [
        tf.math.unsorted_segment_sum(tf.convert_to_tensor(values), tf.convert_to_tensor(indices), 64)
        for indices, values in results
    ]
    assert np.count_nonzero(sums[0]) == 6
    np.testing.assert_allclose(*sums)


@pytest.mark.parametrize("form", ["one branch", "loop", "a branch in a loop"])
@pytest.mark.parametrize("tapes", ["persistent", "nested"])
def test_tapes_over_a_table_that_nothing_trains(tapes, form):
    table, x = sok.DynamicVariable(2, name="items", trainable=False), tf.Variable(2.0)

    @tf.function
    def gradient():
        with tf.GradientTape(persistent=tapes == "persistent") as tape, tf.GradientTape() as inner:
            loss = tf.reduce_sum(x * FORMS[form](table, tf.constant(True), tf.constant(1.0)))
        return (tape if tapes == "persistent" else inner).gradient(loss, x)

    np.testing.assert_allclose(gradient(), tf.reduce_sum(FORMS[form](table, True, tf.constant(1.0))), rtol=1e-6)


def test_a_step_touches_the_rows_of_the_branch_that_was_taken():
    """With momentum: rows that have a gradient of zero would move."""
    table, x, optimizer = table_of(), tf.Variable(1.0), sok.OptimizerWrapper(keras.optimizers.SGD(0.1, momentum=0.9))

    @tf.function
    def step(yes):
        _, (gradient, _) = losses_and_gradients("one branch", table, x, yes)
        optimizer.apply_gradients([(gradient, table)])

    step(tf.constant(True))
    before = table.numpy()
    assert (before[[1, 2, 3]] != table_of().numpy()[[1, 2, 3]]).all()
    step(tf.constant(False))
    np.testing.assert_array_equal(table, before)


def test_steps_and_lookups_keep_their_order():
    """In a branch and beside it each lookup sees the steps that come before it in the program."""
    table, optimizer = table_of(), sok.OptimizerWrapper(sok.SGD(1.0))

    def step():
        with tf.GradientTape() as tape:
            before = look(table)
        optimizer.apply_gradients([(tape.gradient(before, table), table)])
        return before, look(table)

    @tf.function
    def run(yes):
        inside = tf.cond(yes, step, lambda: (nothing(), nothing()))
        outside = look(table)
        step()
        later = tf.cond(yes, lambda: look(table), nothing)
        return *inside, outside, later

    rows = table.numpy()
    seen = [np.stack([rows[1], rows[2] + rows[3]]) - [[n], [2 * n]] for n in (0, 1, 1, 2)]
    for actual, expected in zip(run(tf.constant(True)), seen, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_in_a_graph():
    with tf.Graph().as_default():
        table, yes = table_of(), tf.compat.v1.placeholder(tf.bool, [])
        gradient = tf.compat.v1.gradients(FORMS["one branch"](table, yes, None), table)[0]
        with tf.compat.v1.Session() as session:
            session.run(table.initializer)
            assert session.run(gradient.indices, {yes: True}).tolist() == [1, 2, 3]
            assert session.run(gradient.indices, {yes: False}).tolist() == []
