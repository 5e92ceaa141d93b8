# SPDX-License-Identifier: Apache-2.0
"""Lookups that train nothing, of tables that hold all keys, some or none, against the reference."""

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow.embedding import layer_class

DIMENSION = 5
HELD = [5, -2, 0, 17, 8, 2**31 - 1, -(2**31)]
LACKED = [-1, 6, 77]


def insert(table, keys):
    sok.all2all_dense_embedding(table, tf.constant(keys, table.key_type))


def exported(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), tf.cast(rows, tf.float64).numpy(), strict=True))


def make(name, held, dtype):
    """(a table that holds rows which are not the initial ones, what each key of the test has there)"""
    table, initial = (sok.DynamicVariable(DIMENSION, "normal", name=name, dtype=dtype) for _ in range(2))
    insert(initial, HELD + LACKED)
    if held:
        insert(table, held)
        keys, rows = sok.export(table)
        sok.assign(table, keys, 3 * rows)
    return table, exported(initial) | exported(table)


def some_bags(generator, key_type, weighted, batch=20):
    """(keys, weights), ragged: keys occur several times in a bag, some bags are empty."""
    lengths = generator.integers(0, 7, batch)
    keys = tf.constant(generator.choice(HELD + LACKED + LACKED, lengths.sum()), key_type)
    weights = tf.constant((generator.integers(1, 9, lengths.sum()) / 8).astype(np.float32)) if weighted else None
    bags = tf.RaggedTensor.from_row_lengths(keys, lengths)
    return bags, None if weights is None else bags.with_values(weights)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("key_type", ["int32", "int64"])
def test_keys_that_tables_lack(compiled, dtype, key_type):
    generator = np.random.default_rng(0)
    tables, rows = map(list, zip(*(make(f"t{i}", h, dtype) for i, h in enumerate([HELD, HELD[:3], []])), strict=True))
    static = sok.Variable(shape=(9, DIMENSION), name="static")
    before = [(exported(table), table.statistics()) for table in tables]
    combiners = [combiner for combiner in reference.COMBINERS for _ in tables]
    ids, weights = map(list, zip(*(some_bags(generator, key_type, i % 2) for i in range(9)), strict=True))
    learned = [each.values for each in weights if each is not None]
    incoming = [generator.standard_normal((20, DIMENSION)).astype(np.float32) for _ in ids]

    def look_up():
        with tf.GradientTape() as tape:
            tape.watch(learned)
            *outputs, other = sok.lookup_sparse(
                [*tables * 3, static],
                [*ids, tf.ragged.constant([[3]], key_type)],
                [*weights, None],
                [*combiners, "sum"],
                training=False,
            )
            loss = tf.add_n([tf.reduce_sum(a * b) for a, b in zip(outputs, incoming, strict=True)])
        return outputs, other, tape.gradient(loss, learned)

    outputs, other, gradients = (tf.function(look_up) if compiled else look_up)()
    np.testing.assert_array_equal(other, static[3:4])
    gradients = iter(gradients)
    for i, (bags, given, combiner) in enumerate(zip(ids, weights, combiners, strict=True)):
        of_entry = np.array([rows[i % 3][key] for key in bags.values.numpy().tolist()])
        given = None if given is None else given.values.numpy()
        arguments = (np.arange(len(of_entry)), bags.row_splits.numpy(), given, combiner)
        magnitude = reference.pool(of_entry, *arguments, absolute=True)
        reference.assert_close(outputs[i], reference.pool(of_entry, *arguments), magnitude=magnitude)
        if given is not None:
            magnitude = reference.weight_gradient(of_entry, incoming[i], *arguments, absolute=True)
            expected = reference.weight_gradient(of_entry, incoming[i], *arguments)
            reference.assert_close(next(gradients), expected, magnitude=magnitude)
    for table, (rows_before, statistics) in zip(tables, before, strict=True):
        after = exported(table)
        assert table.statistics() == statistics and after.keys() == rows_before.keys()
        assert all((after[key] == row).all() for key, row in rows_before.items())


def test_bags_of_one_key_and_of_none():
    table, rows = make("t", HELD, "float32")
    keys = HELD[:3] + LACKED
    found = sok.lookup_sparse(table, tf.ragged.constant([[key] for key in keys], tf.int64), training=False)
    np.testing.assert_array_equal(found, np.stack([rows[key] for key in keys]).astype("f"))
    none = tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [0, 0])
    assert not sok.lookup_sparse(table, none, training=False).numpy().any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_what_training_may_be(kit, compiled):
    """A collection takes for it what lookup_sparse does, and None, which is what Keras may give."""
    ids = tf.constant([[1], [2]], tf.int64)

    def make():
        table, layer = sok.DynamicVariable(2), layer_class(kit)({"user": {"dimension": 2}})
        bags = tf.RaggedTensor.from_tensor(ids)
        yield table, lambda training: sok.lookup_sparse(table, bags, training=training)
        yield layer.tables["user"], lambda training: layer({"user": ids}, training=training)

    def step(look_up, given):
        call = lambda: look_up(given)  # noqa: E731  (as an argument tf.function would make a tensor of it)
        return tf.function(call) if compiled else call

    for given in (False, 0, np.False_, tf.constant(False), True, 1, np.True_, tf.constant(True), None):
        for table, look_up in list(make())[given is None :]:
            step(look_up, given)()
            assert table.size == (2 if given is None or given else 0), repr(given)
    for table, look_up in make():
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError, match="bool"):
            tf.function(look_up)(tf.constant(False))  # not known when the graph is made
        assert table.size == 0
