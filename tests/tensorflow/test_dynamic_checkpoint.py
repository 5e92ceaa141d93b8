# SPDX-License-Identifier: Apache-2.0
"""dump and load of dynamic tables with their optimizers' states, to and from static tables, and changed rows."""

import datetime

import keras
import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

OPTIMIZERS = {
    "adam": lambda: sok.OptimizerWrapper(keras.optimizers.Adam(0.1)),
    "row-wise adagrad": lambda: sok.OptimizerWrapper(sok.RowWiseAdagrad(0.1)),
    "not fused": lambda: sok.OptimizerWrapper(keras.optimizers.Nadam(0.1)),
}
KEYS = [[5, -3], [2**40, 5, 0]]
MORE = [[7, -3, 11, 12]]


def ids_of(keys):
    return tf.ragged.constant(keys, dtype=tf.int64, ragged_rank=1)


def train(table, optimizer, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids_of(keys), combiners="mean") ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def content(table, optimizer):
    """{key: its row and states}."""
    keys, slots = table.held_among(0, table.num_slots())
    columns = [tf.cast(column.read_slots(slots), tf.float32) for column in (table, *optimizer.slots(table).values())]
    joined = np.concatenate([tf.reshape(column, [len(keys), -1]) for column in columns], axis=1)
    return dict(zip(keys.numpy().tolist(), joined.tolist(), strict=True))


def rows_of(exported):
    """{key: row} of arrays that export gave."""
    return dict(zip(*(value.tolist() for value in exported), strict=True))


def make(kind, dtype=tf.float32, **options):
    table = sok.DynamicVariable(3, "normal", name="t", dtype=dtype, max_capacity=50, **options)
    return table, OPTIMIZERS[kind]()


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on(kind, dtype, tmp_path):
    table, optimizer = make(kind, dtype)
    train(table, optimizer, KEYS)
    sok.dump(tmp_path / "d", table, optimizer)
    other, restored = make(kind, dtype)
    train(other, restored, MORE)
    sok.load(tmp_path / "d", other, restored)
    assert content(other, restored) == content(table, optimizer) and len(content(table, optimizer)) == 4
    for each, wrapped in ((table, optimizer), (other, restored)):
        train(each, wrapped, MORE)
    assert content(other, restored) == content(table, optimizer) and other.size == 7


def test_to_and_from_static_tables(tmp_path):
    static = sok.Variable(shape=(20, 3), initializer="normal", name="t")
    sok.dump(tmp_path / "static", static)
    table = sok.DynamicVariable(3, "zeros", name="t", key_type=tf.int32)
    sok.load(tmp_path / "static", table)
    keys, rows = sok.export(table)
    np.testing.assert_array_equal(rows, tf.gather(static, keys))
    assert sorted(keys.numpy().tolist()) == list(range(20))
    sok.assign(table, tf.constant([7]), tf.ones([1, 3]))
    sok.dump(tmp_path / "dynamic", table)
    sok.load(tmp_path / "dynamic", static)
    np.testing.assert_array_equal(tf.gather(static, keys), sok.export(table)[1])
    np.testing.assert_array_equal(static[7], [1, 1, 1])


def test_more_rows_than_the_capacity_change_nothing(tmp_path):
    table, optimizer = make("adam")
    train(table, optimizer, KEYS)
    sok.dump(tmp_path / "d", table)
    small = sok.DynamicVariable(3, name="t", max_capacity=3)
    sok.assign(small, [1], tf.ones([1, 3]))
    with pytest.raises(ValueError, match="has 4 rows for this rank"):
        sok.load(tmp_path / "d", small)
    assert small.indices.numpy().tolist() == [1]


def test_the_order_of_eviction_survives(tmp_path):
    tables = [sok.DynamicVariable(2, "ones", name="t", max_capacity=4) for _ in range(2)]
    optimizers = [sok.OptimizerWrapper(sok.SGD(0.1)) for _ in tables]
    for key in (1, 2, 3, 4, 1, 3):
        train(tables[0], optimizers[0], [[key]])
    sok.dump(tmp_path / "d", tables[0])
    sok.load(tmp_path / "d", tables[1])
    for table, optimizer in zip(tables, optimizers, strict=True):
        for key in (5, 6):
            train(table, optimizer, [[key]])
        assert sorted(table.indices.numpy().tolist()) == [1, 3, 5, 6]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_changed_rows(kind, compiled):
    """Tracking begins after a function was traced, and while the table grows."""
    table, optimizer = make(kind)
    step = tf.function(train) if compiled else train
    step(table, optimizer, KEYS)
    keys, rows = sok.incremental_model_dump(table, datetime.datetime.now(datetime.timezone.utc))
    assert sorted(keys[0].tolist()) == [-3, 0, 5, 2**40]  # those of a table that was not tracked
    start = datetime.datetime.now(datetime.timezone.utc)
    assert not len(sok.incremental_model_dump(table, start)[0][0])
    step(table, optimizer, MORE)
    sok.assign(table, [99], tf.ones([1, 3]))
    sok.lookup_sparse(table, ids_of([[5, 1000]]), training=False)
    keys, rows = sok.incremental_model_dump(table, start)
    assert keys[0].tolist() == [-3, 7, 11, 12, 99]
    held = {key: row[:3] for key, row in content(table, optimizer).items()}
    assert all(held[key] == row.tolist() for key, row in zip(keys[0].tolist(), rows[0], strict=True))
    later = datetime.datetime.now(datetime.timezone.utc)
    table.erase([7])
    sok.assign(table, [500], tf.ones([1, 3]))  # in the slot that was given up
    assert sok.incremental_model_dump(table, later)[0][0].tolist() == [500]
    assert 7 not in sok.incremental_model_dump(table, start)[0][0]


def test_increments_are_applied(tmp_path):
    table, optimizer = make("adam")
    sok.track_changes(table)
    start = datetime.datetime.now(datetime.timezone.utc)
    train(table, optimizer, KEYS)
    keys, rows = sok.incremental_model_dump(table, start)
    sok.save_incremental(tmp_path / "delta", table, keys, rows)
    follower = sok.DynamicVariable(3, "zeros", name="t")
    sok.load_incremental(tmp_path / "delta", follower)
    found, expected = (rows_of(value.numpy() for value in sok.export(each)) for each in (follower, table))
    assert found == expected and len(found) == 4


@pytest.mark.parametrize("kind", ["adam", "row-wise adagrad"])
def test_tf1_graph(kind, tmp_path):
    """dump, load and changed rows in sessions, and a table of one of them read eagerly."""
    with tf.Graph().as_default(), tf.compat.v1.Session().as_default() as session:
        table = sok.DynamicVariable(3, "normal", name="t")
        wrapped = tf.compat.v1.train.AdamOptimizer(0.1) if kind == "adam" else sok.RowWiseAdagrad(0.1)
        optimizer = sok.OptimizerWrapper(wrapped)
        placeholder = tf.compat.v1.placeholder(tf.int64, [None])
        ids = tf.RaggedTensor.from_uniform_row_length(placeholder, 1)
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids) ** 2)
        (gradient,) = tf.gradients(loss, [table])
        step = optimizer.apply_gradients([(gradient, table)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step, {placeholder: [5, -3]})
        sok.track_changes(table)
        since = datetime.datetime.now(datetime.timezone.utc)
        session.run(step, {placeholder: [2**40, 5, 8]})
        keys, _ = sok.incremental_model_dump(table, since)
        assert keys[0].tolist() == [5, 8, 2**40]
        sok.dump(tmp_path / "d", table, optimizer)
        exported = sok.export(table)
        trained = [session.run(exported)]
        session.run(step, {placeholder: [5, 77]})
        trained.append(session.run(exported))
        sok.load(tmp_path / "d", table, optimizer)
        for expected in trained:
            assert rows_of(session.run(exported)) == rows_of(expected)
            session.run(step, {placeholder: [5, 77]})
    eager = sok.DynamicVariable(3, "zeros", name="t")
    sok.load(tmp_path / "d", eager)
    assert rows_of(value.numpy() for value in sok.export(eager)) == rows_of(trained[0])
