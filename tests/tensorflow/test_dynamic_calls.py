# SPDX-License-Identifier: Apache-2.0
"""What users call on dynamic tables between steps: erase, clear, epochs, ranks of their own, counts, rows with those
that went for them.
"""

import dataclasses
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_harness import finished

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.dynamic import MOST_SCORE, Statistics
from sparse_operation_kit.placement import Placement

INVALID = tf.errors.InvalidArgumentError


def make(capacity=4, initializer="zeros", **options):
    return sok.DynamicVariable(2, initializer, name="t", max_capacity=capacity, **options)


def use(table, *keys):
    """One call that trains, or could."""
    return sok.all2all_dense_embedding(table, tf.constant(keys, table.key_type))


def held(table):
    return sorted(table.indices.numpy().tolist())


def train(table, optimizer, *keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(use(table, *keys))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def row_of(column, table, key):
    return column.read_slots(table.find(tf.constant([key]))).numpy().tolist()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_erase(compiled):
    table, optimizer = make(), sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0))
    train(table, optimizer, 1, 2, 3)
    erase = tf.function(table.erase) if compiled else table.erase
    assert int(erase(tf.constant([2, 9, 2, 3]))) == 2 and held(table) == [1]
    assert int(erase(tf.constant([2], tf.int64))) == 0 == int(erase(tf.zeros([0], tf.int64)))
    train(table, optimizer, 2)
    assert held(table) == [1, 2]
    assert row_of(optimizer.slots(table)["accumulator"], table, 2) == [[1, 1]]  # it began as new


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("how", ["erase", "clear"])
def test_a_gradient_of_an_erased_row_is_refused(how, compiled):
    table, optimizer = make(), sok.OptimizerWrapper(sok.SGD(1.0))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(use(table, 1, 2))
        gradient = tape.gradient(loss, table)
        table.erase([2]) if how == "erase" else table.clear()
        use(table, 3)
        optimizer.apply_gradients([(gradient, table)])

    with pytest.raises(
        tf.errors.FailedPreconditionError, match=r"table 't': a row of this gradient was erased or evicted"
    ):
        tf.function(step)() if compiled else step()
        sok.check_errors()
    assert not sok.export(table)[1].numpy().any() and 3 in held(table)
    train(table, optimizer, 3)
    assert row_of(table, table, 3) == [[-1, -1]]


def test_clear():
    table, optimizer = make(), sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0))
    train(table, optimizer, 1, 2, 3)
    assert table.clear() is None and table.size == 0
    train(table, optimizer, 7)
    assert held(table) == [7] and row_of(optimizer.slots(table)["accumulator"], table, 7) == [[1, 1]]


def test_rows_assigned_between_steps_go_before_those_of_the_step():
    table, optimizer = make(evict_strategy="lfu"), sok.OptimizerWrapper(sok.SGD(1.0))
    for _ in range(5):
        sok.assign(table, tf.constant([1, 2]), tf.ones([2, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(use(table, 3, 4)) + tf.reduce_sum(use(table, 5, 6))
    assert held(table) == [3, 4, 5, 6]
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


@pytest.mark.parametrize("strategy", ["epoch_lru", "epoch_lfu"])
def test_epochs(strategy):
    table = make(evict_strategy=strategy)
    use(table, 1)
    table.set_epoch(1)
    use(table, 2, 3)
    for _ in range(3):
        use(table, 1)
    table.set_epoch(2)
    use(table, 3, 4)
    table.end_step()
    use(table, 5)
    assert held(table) == [1, 3, 4, 5]
    for epoch in (-1, 2**31):
        with pytest.raises(ValueError, match=r"the epoch of table 't' must be in"):
            table.set_epoch(epoch)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_scores(compiled):
    table = make(evict_strategy="customized")
    use(table, 1, 2, 3, 4)
    scores, set_scores = table.scores, table.set_scores
    if compiled:
        scores, set_scores = tf.function(scores), tf.function(set_scores)
    assert scores(tf.constant([4, 9, 1])).numpy().tolist() == [0, -1, 0]
    set_scores(tf.constant([3, 1, 9, 2, 4]), tf.constant([5, MOST_SCORE, 7, 0, 6], tf.int64))
    assert scores(tf.constant([1, 2, 3, 4])).numpy().tolist() == [MOST_SCORE, 0, 5, 6] and held(table) == [1, 2, 3, 4]
    table.end_step()
    for key, gone in ((5, 2), (6, 5)):  # 5 has rank 0, but is used by the running step
        use(table, key)
        assert gone not in held(table)
        table.end_step()
    set_scores(tf.constant([6]), tf.constant([8]))
    use(table, 7)
    assert held(table) == [1, 4, 6, 7]


def test_ranks_leave_the_order_of_use():
    table = make(3, evict_strategy="customized")
    for key in (3, 1, 2, 3):
        use(table, key)
    table.set_scores([2, 1, 3], [4, 4, 4])
    table.end_step()
    use(table, 5)
    assert held(table) == [2, 3, 5]


def test_wrong_scores_change_nothing():
    table = make(evict_strategy="customized")
    use(table, 1, 2)
    for scores in ([1, -1], [MOST_SCORE + 1, 0], [2**32, 0]):
        with pytest.raises(INVALID, match=rf"table 't': scores must be in \[0, {MOST_SCORE}\]"):
            table.set_scores([1, 2], tf.constant(scores, tf.int64))
    with pytest.raises(ValueError, match=r"table 't': scores must be \[2\]"):
        table.set_scores([1, 2], [1])
    with pytest.raises(TypeError, match="table 't': scores must be integers"):
        table.set_scores([1, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"table 't': keys must be \[n\]"):
        table.set_scores([[1, 2]], [[1, 2]])
    with pytest.raises(TypeError, match="table 't': keys must be int32 or int64, got float32"):
        table.erase([1.0])
    assert table.scores([1, 2]).numpy().tolist() == [0, 0]
    for strategy in ("lru", None):
        other = make(evict_strategy=strategy)
        for call, arguments in ((other.scores, [[1]]), (other.set_scores, [[1], [1]])):
            with pytest.raises(ValueError, match=f"no scores of yours: evict_strategy is {strategy!r}"):
                call(*arguments)
        with pytest.raises(ValueError, match="table 't' has no epochs"):
            other.set_epoch(1)


def test_prefetching_without_a_second_memory():
    """Nothing is to be brought, whatever the tables are, also in a function. What is no table is refused."""
    table, static = make(9), sok.Variable(shape=(4, 2), name="static")
    assert table.device_rows == 0 and make(max_hbm_for_vectors=0.5).device_rows == 2**29 // 8
    use(table, 1, 2)
    before = table.statistics()
    ids = tf.ragged.constant([[1], [7]], dtype=tf.int64)
    assert sok.prefetch([table, static], [ids, ids]) is None and sok.prefetch(table, ids) is None
    tf.function(lambda: sok.prefetch([table], [ids]))()
    assert table.statistics() == before and before.host_bytes == before.moves == 0
    with pytest.raises(TypeError):
        sok.prefetch(tf.zeros(3), ids)


def test_statistics(device):
    table = make(3)
    assert table.statistics() == Statistics.of(0, 3, 0, 0, 0, 0, 0)
    use(table, 1, 2, 1)
    use(table, 3)
    assert table.statistics() == Statistics.of(3, 3, 4, 3, 0, 0, 0) and table.statistics().load_factor == 1
    use(table, 4, 3)
    assert table.statistics() == Statistics.of(3, 3, 6, 4, 1, 0, 0)
    sok.lookup_sparse(table, tf.ragged.constant([[99, 1]]), training=False)
    table.erase([3])
    assert table.statistics() == dataclasses.replace(Statistics.of(3, 3, 6, 4, 1, 0, 0), size=2, load_factor=2 / 3)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        finished(use, table, 1, 2, 3, 4, 5)
    lookups = 11 if device == "gpu" else 6  # a GPU refuses keys when the host has counted them
    assert table.statistics() == Statistics.of(2, 3, lookups, 4, 1, 0, 0)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("key_type", [tf.int32, tf.int64])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_read_and_evict(dtype, key_type, compiled):
    table, fresh = (make(capacity, "normal", dtype=dtype, key_type=key_type) for capacity in (3, 99))
    read = tf.function(sok.sparse_read_and_evict) if compiled else sok.sparse_read_and_evict
    keys = tf.constant([[1, 2], [1, 3]], key_type)
    rows, gone, gone_rows = read(table, keys)
    np.testing.assert_array_equal(rows, tf.cast(tf.reshape(use(fresh, 1, 2, 1, 3), [2, 2, 2]), dtype))
    assert rows.dtype == dtype and gone.dtype == key_type and gone_rows.shape == (0, 2) and held(table) == [1, 2, 3]
    sok.assign(table, keys[0], [[1.0, 2], [3, 4]])
    table.end_step()
    rows, gone, gone_rows = read(table, tf.constant([2, 5, 6], key_type))
    assert rows[0].numpy().tolist() == [3, 4] and held(table) == [2, 5, 6]
    assert dict(zip(gone.numpy().tolist(), gone_rows.numpy().tolist(), strict=True)) == {
        1: [1, 2],
        3: tf.cast(use(fresh, 3), dtype)[0].numpy().tolist(),
    }
    before = [value.numpy().tolist() for value in sok.export(table)]
    with pytest.raises(tf.errors.ResourceExhaustedError, match="table 't'"):
        read(table, tf.range(4, dtype=key_type))
    assert before == [value.numpy().tolist() for value in sok.export(table)] and gone_rows.dtype == dtype
    empty = read(table, tf.zeros([0, 5], key_type))
    assert empty[0].shape == (0, 5, 2) and len(empty[1]) == 0


def test_read_and_evict_of_a_table_that_evicts_nothing():
    table = make(evict_strategy=None)
    rows, gone, gone_rows = sok.sparse_read_and_evict(table, tf.constant([[5]]))
    assert rows.numpy().tolist() == [[[0, 0]]] and len(gone) == len(gone_rows) == 0 and held(table) == [5]
    with pytest.raises(TypeError, match=r"must be a sok\.DynamicVariable"):
        sok.sparse_read_and_evict(sok.Variable(shape=(3, 2)), [1])


def test_keys_of_other_ranks(monkeypatch):
    """They are not held here; rows are read of this rank's alone."""
    table = make()
    monkeypatch.setattr(table, "_placement", Placement(-1, 2, -1, 3, 1))
    with pytest.raises(INVALID, match="table 't': key -3 belongs to rank 0, not to this one"):
        sok.sparse_read_and_evict(table, [4, -3])
    assert table.size == 0 and table.erase([0, 1]) == 0


def test_tf1_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table, ranked, old = make(3), make(3, evict_strategy="customized"), make(3, evict_strategy="epoch_lru")
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        used = [sok.all2all_dense_embedding(each, keys) for each in (table, ranked, old)]
        erased, cleared, statistics = table.erase(keys), table.clear(), table.statistics()
        read = sok.sparse_read_and_evict(table, keys)
        scores, ranks = ranked.scores(keys), ranked.set_scores(keys, tf.range(tf.size(keys)))
        epoch, ended = old.set_epoch(3), [each.end_step() for each in (table, ranked, old)]
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(used, {keys: [1, 2, 3]})
        session.run(ended)
        rows, gone, _ = session.run(read, {keys: [4, 2]})
        assert rows.shape == (2, 2) and gone.tolist() == [1]
        assert session.run(erased, {keys: [2, 8]}) == 1
        found = session.run({name: value for name, value in vars(statistics).items() if tf.is_tensor(value)})
        assert [found[name] for name in ("size", "insertions", "evictions", "load_factor")] == [2, 4, 1, 2 / 3]
        session.run(cleared)
        assert session.run(statistics.size) == 0
        session.run(ranks, {keys: [3, 1, 2]})
        assert session.run(scores, {keys: [1, 2, 3, 4]}).tolist() == [1, 2, 0, -1]
        with pytest.raises(INVALID, match="scores must be in"):
            session.run(ranked.set_scores(keys, -tf.ones_like(keys)), {keys: [1]})
        session.run(epoch)
        session.run(used, {keys: [2]})
        session.run(ended)
        session.run(used[1:], {keys: [9]})
        assert [sorted(session.run(each.indices)) for each in (ranked, old)] == [[1, 2, 9], [2, 3, 9]]


def test_tf1_graph_reads_before_it_steps():
    """A step whose gradient is a constant comes after the read that inserts its rows: a graph gives no other order."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = make(initializer="ones")
        with tf.control_dependencies([tf.numpy_function(lambda: time.sleep(1), [], [])]):
            rows, _, _ = sok.sparse_read_and_evict(table, tf.constant([4, 2], tf.int64))
        gradients = tf.gradients(rows, [table], [tf.ones([2, 2])])
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        step = optimizer.apply_gradients(zip(gradients, [table], strict=True))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step)
        assert session.run(sok.export(table)[1]).tolist() == [[0.5, 0.5]] * 2
