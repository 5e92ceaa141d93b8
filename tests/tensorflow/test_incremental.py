# SPDX-License-Identifier: Apache-2.0
"""Changed rows in a process alone: everything that changes a row is noticed, and a copy follows."""

import datetime
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit import held
from sparse_operation_kit.tensorflow import stamps


def now():
    return datetime.datetime.now(datetime.timezone.utc)


def table_of(rows=10, name="items", dtype=None):
    return sok.Variable(np.arange(rows * 2, dtype=np.float32).reshape(rows, 2), name=name, dtype=dtype)


def step(table, optimizer, keys):
    ids = tf.RaggedTensor.from_row_splits(keys, [0, tf.size(keys)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
    optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))


def has_stamps(table):
    return table._sok_stamps is not None and int(tf.size(table._sok_stamps)) > 0


def changed_by(table, change):
    """The keys that a change of a tracked table is seen to change."""
    since = now()
    change()
    (keys,), (rows,) = sok.incremental_model_dump([table], since)
    np.testing.assert_array_equal(rows, table.numpy()[keys])
    return keys.tolist()


def test_in_pieces(monkeypatch):
    """Of tables of more slots than are looked at together."""
    monkeypatch.setattr(stamps, "SLOTS_OF_CALL", 4)
    monkeypatch.setattr(held, "SLOTS_OF_CALL", 3)
    static = table_of()
    sok.incremental_model_dump(static, now())
    assert changed_by(static, lambda: sok.assign(static, [3, 4, 9], np.ones([3, 2]))) == [3, 4, 9]
    table = sok.DynamicVariable(2, "zeros", name="d")
    sok.assign(table, np.arange(10), np.ones([10, 2]))
    (keys,), _ = sok.incremental_model_dump(table, now())
    assert keys.tolist() == list(range(10))
    since = now()
    sok.assign(table, [9, 3, 4, 0], np.ones([4, 2]))
    table.erase([4])
    (keys,), _ = sok.incremental_model_dump(table, since)
    assert keys.tolist() == [0, 3, 9]


def test_the_first_call_gives_every_row():
    table = table_of()
    since = now()
    keys, rows = sok.incremental_model_dump(table, since)
    assert [key.tolist() for key in keys] == [list(range(10))] and keys[0].dtype == np.int64
    np.testing.assert_array_equal(rows[0], table)
    assert changed_by(table, lambda: None) == []
    # Rows of before are found when asked for.
    assert len(sok.incremental_model_dump(table, since)[0][0]) == 10


OPTIMIZERS = {
    "fused": lambda: sok.OptimizerWrapper(keras.optimizers.Adam()),
    "distributed": lambda: sok.DistributedOptimizer(keras.optimizers.Adam()),
    "own": lambda: sok.RowWiseAdagrad(0.1),
    "on rows": lambda: sok.OptimizerWrapper(keras.optimizers.Adam(amsgrad=True)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps(kind, compiled):
    """Tracking begins after the function was traced; its steps are seen all the same."""
    table, optimizer = table_of(), OPTIMIZERS[kind]()
    run: Any = lambda keys: step(table, optimizer, keys)  # noqa: E731
    if compiled:
        run = tf.function(run, input_signature=[tf.TensorSpec([None], tf.int64)])
    run(tf.constant([1, 2], tf.int64))
    assert not has_stamps(table), "stamps take memory before anyone wants them"
    traces = run.experimental_get_tracing_count() if compiled else None
    sok.track_changes(table)
    assert changed_by(table, lambda: run(tf.constant([7, 3, 7], tf.int64))) == [3, 7]
    assert changed_by(table, lambda: run(tf.constant([0], tf.int64))) == [0]
    assert not compiled or run.experimental_get_tracing_count() == traces


def test_a_traced_step_captures_one_resource_for_stamps():
    """Whoever calls a tf.function pays for each variable that it uses: those of stamps are one resource."""
    tables, optimizer = [table_of(name=f"table{i}") for i in range(3)], sok.OptimizerWrapper(sok.SGD(0.1))
    sok.track_changes(tables[1])

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(tables, [tf.ragged.constant([[1]], tf.int64)] * 3)
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    since = now()
    run()
    captured = [id(capture) for capture in run.get_concrete_function().captured_inputs if capture.dtype == tf.resource]
    assert {id(table.handle) for table in tables} < set(captured)
    assert len(captured) <= len(tables) + 3, "the stamps, the iterations and the learning rate"
    (keys,), _ = sok.incremental_model_dump([tables[1]], since)
    assert keys.tolist() == [1]


class Trained(tf.Module):
    """A table and a step of it, to be exported."""

    def __init__(self):
        super().__init__()
        self.table, self.optimizer = table_of(), sok.OptimizerWrapper(sok.SGD(1.0))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def train(self, keys):
        step(self.table, self.optimizer, keys)


def test_a_step_can_be_exported(tmp_path):
    module = Trained()
    sok.track_changes(module.table)
    module.train(tf.constant([3], tf.int64))
    tf.saved_model.save(module, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")
    loaded.train(tf.constant([3, 5], tf.int64))
    module.train(tf.constant([3, 5], tf.int64))
    np.testing.assert_array_equal(loaded.table, module.table)


def test_stamps_go_with_their_table():
    """Neither memory nor a stranger's stamps are left where a table was; 300 tables take each other's place."""
    for i in range(300):
        table = table_of(1000, name=f"passing{i % 2}")
        optimizer = sok.OptimizerWrapper(sok.SGD(0.1))
        if i % 2:
            sok.track_changes(table)
            assert changed_by(table, lambda: step(table, optimizer, tf.constant([i % 7], tf.int64))) == [i % 7]  # noqa: B023
        else:
            step(table, optimizer, tf.constant([i % 7], tf.int64))
            assert not has_stamps(table)


def test_only_tracked_tables_are_asked():
    tracked, other = table_of(), table_of(4, "other")
    sok.track_changes([tracked])
    optimizer = sok.OptimizerWrapper(sok.SGD(0.1))

    def change():
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse([other, tracked], [tf.ragged.constant([[1]]), tf.ragged.constant([[2]])])
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
        optimizer.apply_gradients(zip(tape.gradient(loss, [other, tracked]), [other, tracked], strict=True))

    assert changed_by(tracked, change) == [2]


def slices(*slots):
    return tf.IndexedSlices(tf.ones([len(slots), 2]), tf.constant(slots))


ONE = [[1.0, 1.0]]
V1 = tf.compat.v1
CHANGES: dict[str, tuple[Any, Any]] = {
    "sok.assign": (lambda t: sok.assign(t, [4, 1, 4], tf.ones([3, 2])), [1, 4]),
    "assign": (lambda t: t.assign(tf.ones([10, 2])), range(10)),
    "assign, by name": (lambda t: t.assign(value=tf.ones([10, 2]), read_value=False), range(10)),
    "assign_add": (lambda t: t.assign_add(tf.ones([10, 2])), range(10)),
    "assign_sub": (lambda t: t.assign_sub(tf.ones([10, 2])), range(10)),
    **{
        name: (lambda t, name=name: getattr(t, name)(slices(5, 0)), [0, 5])
        for name in ("scatter_add", "scatter_div", "scatter_max", "scatter_min", "scatter_mul", "scatter_sub")
    },
    "scatter_update": (lambda t: t.scatter_update(sparse_delta=slices(5, 0)), [0, 5]),
    "batch_scatter_update": (lambda t: t.batch_scatter_update(slices(5, 0)), [0, 5]),
    **{
        name: (lambda t, name=name: getattr(t, name)([[6], [2]], ONE * 2), [2, 6])
        for name in ("scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_sub", "scatter_nd_update")
    },
    "scatter_nd_update of elements": (lambda t: t.scatter_nd_update(indices=[[6, 1]], updates=[3.0]), [6]),
    "a range": (lambda t: t[1:3].assign(ONE * 2), [1, 2]),
    "every other": (lambda t: t[::-4].assign(ONE * 3), [1, 5, 9]),
    "a row": (lambda t: t[7].assign([1.0, 1.0]), [7]),
    "a column": (lambda t: t[:, 1].assign(tf.ones([10])), range(10)),
    "the last": (lambda t: t[-2:, 1:].assign([[1.0], [1.0]]), [8, 9]),
    "the column of all": (lambda t: t[..., 0].assign(tf.ones([10])), range(10)),
    "tf.compat.v1.scatter_update": (lambda t: V1.scatter_update(t, [5], ONE), range(10)),
    "tf.compat.v1.scatter_nd_add": (lambda t: V1.scatter_nd_add(t, [[5]], ONE), range(10)),
    "tf.compat.v1.assign": (lambda t: V1.assign(t, tf.ones([10, 2])), range(10)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_other_changes(name, compiled):
    (change, expected), table = CHANGES[name], table_of()
    sok.track_changes(table)
    sok.track_changes(table)
    run = (lambda: (change(table), None)[1]) if not compiled else tf.function(lambda: (change(table), None)[1])
    assert changed_by(table, run) == list(expected)
    assert changed_by(table, lambda: None) == []


def test_every_method_that_writes_is_known():
    """A version of TensorFlow with another one fails here."""
    known = {name.removesuffix(", by name") for name in CHANGES}
    inherited = tf.Variable([1.0])
    for name in dir(type(inherited)):
        if name.startswith(("assign", "scatter_", "batch_scatter")):
            assert name in known, name


@pytest.mark.parametrize("compiled", [False, True])
def test_a_change_after_a_change(compiled):
    table = table_of()
    sok.track_changes(table)

    def change():
        table.scatter_update(slices(5)).scatter_add(slices(7))

    assert changed_by(table, tf.function(change) if compiled else change) == [5, 7]
    np.testing.assert_array_equal(table.numpy()[[5, 7]], [[1, 1], [15, 16]])


@pytest.mark.parametrize("compiled", [False, True])
def test_raw_operations_are_not_seen_but_can_be_told(compiled):
    table = table_of()
    sok.track_changes(table)

    def change(told):
        tf.raw_ops.ResourceScatterAdd(resource=table.handle, indices=[5, 8], updates=tf.ones([2, 2]))
        if told:
            table.scatter_add(tf.IndexedSlices(tf.zeros([2, 2]), tf.constant([5, 8])))

    run = tf.function(change) if compiled else change
    before = table.numpy()
    assert changed_by(table, lambda: run(False)) == []
    assert changed_by(table, lambda: run(True)) == [5, 8]
    np.testing.assert_array_equal(table.numpy()[[5, 8]], before[[5, 8]] + 2)


def test_an_assignment_that_fails_marks_nothing():
    table = table_of()
    sok.track_changes(table)
    with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
        sok.assign(table, [3, 99], tf.ones([2, 2]))
    assert changed_by(table, lambda: None) == []


def test_methods_of_an_untracked_table():
    table = table_of(3)
    table.assign(np.ones((3, 2), np.float32))
    table.scatter_sub(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1])))
    np.testing.assert_array_equal(table.numpy()[:, 0], [1, 0, 1])
    assert not has_stamps(table)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("way", ["arrays", "file"])
def test_a_copy_follows(tmp_path, way, dtype):
    table, copy = table_of(dtype=dtype), table_of(dtype=dtype)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.3))
    sok.track_changes([table, copy])
    for keys in ([1, 2], [2, 9], []):
        since = now()
        step(table, optimizer, tf.constant(keys, tf.int64))
        delta = sok.incremental_model_dump([table], since)
        if way == "file":
            sok.save_incremental(tmp_path / "delta", [table], *delta, step=5)
            delta = tmp_path / "delta"
        # A copy that others follow stamps what it takes.
        assert changed_by(copy, lambda delta=delta: sok.load_incremental(delta, [copy])) == keys
        np.testing.assert_array_equal(table, copy)


def test_in_a_graph():
    with tf.Graph().as_default():
        table, copy = table_of(), table_of(name="copy")
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        ids = tf.RaggedTensor.from_row_splits(keys, [0, tf.size(keys)])
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
        train = optimizer.apply_gradients(zip(tf.compat.v1.gradients(loss, [table]), [table], strict=True))
        assigned = sok.assign(table, keys, tf.ones([2, 2]))
        with pytest.raises(RuntimeError, match="default session"):
            sok.track_changes(table)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train, {keys: [1, 2]})
            sok.track_changes([table])
            since = now()
            session.run(train, {keys: [3, 8]})
            assert sok.incremental_model_dump([table], since)[0][0].tolist() == [3, 8]
            size = len(session.graph.get_operations())
            since = now()
            session.run(assigned, {keys: [9, 0]})
            delta = sok.incremental_model_dump([table], since)
            assert delta[0][0].tolist() == [0, 9] and (delta[1][0] == 1).all()
            assert len(session.graph.get_operations()) == size, "a call adds nodes to the graph each time"
            session.run(copy.assign(tf.zeros([10, 2])))
            sok.load_incremental(delta, [copy])
            assert np.flatnonzero(session.run(copy)[:, 0]).tolist() == [0, 9]


def test_errors():
    table = table_of()
    with pytest.raises(ValueError, match="no time zone"):
        sok.incremental_model_dump(table, datetime.datetime.now())
    with pytest.raises(TypeError, match="datetime"):
        sok.incremental_model_dump(table, 0)  # type: ignore[arg-type]
    for call in (sok.track_changes, lambda x: sok.incremental_model_dump(x, now())):
        with pytest.raises(TypeError, match=r"vars\[1\] must be a sok.Variable, got ResourceVariable"):
            call([table, tf.Variable(1.0)])
    with pytest.raises(ValueError, match="key 10 is outside"):
        sok.load_incremental(([np.array([10])], [np.zeros((1, 2), np.float32)]), [table])
    with pytest.raises(RuntimeError, match="between steps"):
        tf.function(lambda: sok.track_changes(table))()


def test_changes_in_compiled_functions_cannot_be_followed():
    """XLA has no clock."""
    table, other = sok.Variable(shape=(4, 2), name="compiled"), sok.Variable(shape=(4, 2), name="other")

    def double(member):
        tf.function(lambda: member.assign(2.0 * member), jit_compile=True)()

    before = table.numpy()
    double(table)
    np.testing.assert_array_equal(table.numpy(), 2 * before)
    with pytest.raises(NotImplementedError, match=r"'compiled'.*jit_compile=False"):
        sok.track_changes([table])
    sok.track_changes([other])
    with pytest.raises(NotImplementedError, match=r"'other'.*jit_compile=False"):
        double(other)
