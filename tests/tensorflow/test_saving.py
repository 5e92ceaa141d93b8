# SPDX-License-Identifier: Apache-2.0
"""Tables in tf.train.Checkpoint and in Keras's weight files, in a process alone; ranks are in tests/distributed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.placement import Placement, stack
from sparse_operation_kit.tensorflow import saving
from sparse_operation_kit.tensorflow.embedding import layer_class

IDS = np.array([[1, 2], [3, 3]])

OPTIMIZERS = {
    "wrapper": lambda kit: sok.OptimizerWrapper(kit.optimizers.Adam(0.1)),
    "distributed": lambda kit: sok.DistributedOptimizer(kit.optimizers.Adagrad(0.1)),
    "own": lambda kit: sok.RowWiseAdagrad(0.1),
    "averaging": lambda kit: sok.DistributedOptimizer(sok.Ftrl(0.1)),
    # tf_keras's Nadam does not go on with dense variables, without this package.
    "on rows": lambda kit: sok.OptimizerWrapper(
        kit.optimizers.Nadam(0.1) if kit is keras else kit.optimizers.Adam(0.1, amsgrad=True)
    ),
}
COUNTING = [
    lambda: keras.optimizers.Adam(0.1),
    lambda: keras.optimizers.Nadam(0.1),
    lambda: tf_keras.optimizers.Nadam(0.1, jit_compile=False),
]


def model_of(kit=keras, mode=None, stack=False):
    layer = layer_class(kit)({"items": (7, 3), "users": (5, 3)}, combiners="sum", mode=mode, stack=stack)
    inputs = {name: kit.Input((2,), dtype="int64", name=name) for name in ("items", "users")}
    pooled = layer(inputs)
    model = kit.Model(inputs, kit.layers.Dense(1)(pooled["items"] + pooled["users"]))
    return model, layer


def train(model, optimizer, steps=2):
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model({"items": IDS, "users": IDS}) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )


def assert_same(model, other, count=4):
    assert len(model.variables) == len(other.variables) == count
    for ours, theirs in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoint(name, kit, tmp_path):
    """Restored before the first step has made any state, and after it: both go on as the original."""
    model, _ = model_of(kit)
    optimizer = OPTIMIZERS[name](kit)
    train(model, optimizer)
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "c"))
    resumed = []
    for steps in (0, 1):
        other, _ = model_of(kit)
        again = OPTIMIZERS[name](kit)
        train(other, again, steps)
        status = tf.train.Checkpoint(model=other, optimizer=again).read(str(tmp_path / "c"))
        assert_same(model, other)
        resumed.append((other, again, status))
    train(model, optimizer)
    for other, again, status in resumed:
        train(other, again)
        status.assert_consumed()
        assert_same(model, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dump_after_a_checkpoint_was_read(name, tmp_path):
    """It has the states that TensorFlow restores when they are made, at the first step."""
    model, layer = model_of()
    optimizer = OPTIMIZERS[name](keras)
    train(model, optimizer)
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "c"))
    again, its_layer = model_of()
    read = OPTIMIZERS[name](keras)
    tf.train.Checkpoint(model=again, optimizer=read).read(str(tmp_path / "c"))
    for folder, tables, stepped in (("first", layer, optimizer), ("second", its_layer, read)):
        sok.dump(str(tmp_path / folder), list(tables.tables.values()), optimizer=stepped, progress=False)
    files = [{f.name: f.read_bytes() for f in (tmp_path / d).glob("*-*")} for d in ("first", "second")]
    assert files[0] and files[0] == files[1]


@pytest.mark.parametrize("make", COUNTING, ids=["Adam", "Nadam", "Nadam of tf_keras"])
@pytest.mark.parametrize("reads", [1, 2])
def test_the_count_of_steps_comes_along_before_the_first_step(reads, make, tmp_path):
    """A table alone, whose steps the wrapper counts; read, and written or dumped again before any step."""

    def made():
        return sok.Variable(np.ones((2, 3), np.float32), name="counted"), sok.OptimizerWrapper(make())

    def step(table, optimizer):
        ids = tf.RaggedTensor.from_row_splits(tf.constant([0, 1], tf.int64), [0, 2])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum") ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    table, optimizer = made()
    for _ in range(3):
        step(table, optimizer)
    path = tf.train.Checkpoint(table=table, optimizer=optimizer).write(str(tmp_path / "0"))
    for read in range(reads):
        other, its = made()
        its.build([other])
        checkpoint = tf.train.Checkpoint(table=other, optimizer=its)
        checkpoint.read(path)
        path = checkpoint.write(str(tmp_path / str(read + 1)))
    sok.dump(str(tmp_path / "d"), other, optimizer=its, progress=False)
    assert sok.load(str(tmp_path / "d"), other, optimizer=its, progress=False).step is None
    step(table, optimizer)
    step(other, its)
    np.testing.assert_array_equal(other, table)


def test_a_bare_table(tmp_path):
    table = sok.Variable(np.arange(8, dtype=np.float32).reshape(4, 2), name="t")
    sok.track_changes(table)
    tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
    table.assign(np.zeros((4, 2), np.float32))
    tf.train.Checkpoint(table=table).read(str(tmp_path / "c")).assert_consumed()
    np.testing.assert_array_equal(table[:, 0], [0, 2, 4, 6])


class Saved(tf.Module):
    """What a rank of several writes: rows and their layout."""

    def __init__(self, place, name="t"):
        super().__init__()
        rows = np.arange(place.num_rows * 2, dtype=np.float32).reshape(-1, 2)[place.rows]
        self.table = saving.StateVariable(name=name, place=place, initial_value=rows, trainable=False)


@pytest.mark.parametrize("place", [Placement(4, 2, -1, 2, 1), Placement(3, 2), Placement(4, 2, 1, 2, 0)])
def test_rows_of_others_are_refused(place, tmp_path):
    tf.train.Checkpoint(model=Saved(place)).write(str(tmp_path / "c"))
    target = tf.Module()
    target.table = sok.Variable(np.full((4, 2), 9, np.float32), name="t")
    with pytest.raises(ValueError, match=r"table 't' has 4 rows .*from_all_ranks.* sok.dump and sok.load"):
        tf.train.Checkpoint(model=target).read(str(tmp_path / "c"))
    assert (target.table.numpy() == 9).all()
    with saving.tables_left_alone():
        tf.train.Checkpoint(model=target).read(str(tmp_path / "c"))
    assert (target.table.numpy() == 9).all()


def test_a_whole_table_is_taken(tmp_path):
    tf.train.Checkpoint(model=Saved(Placement(4, 2, 1, 3, 1))).write(str(tmp_path / "c"))
    target = tf.Module()
    target.table = sok.Variable(np.full((4, 2), 9, np.float32), name="t")
    tf.train.Checkpoint(model=target).read(str(tmp_path / "c")).assert_consumed()
    np.testing.assert_array_equal(target.table[:, 0], [0, 2, 4, 6])


@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_keras_weights(kit, tmp_path):
    path = str(tmp_path / "m.weights.h5")
    model, _ = model_of(kit)
    train(model, sok.OptimizerWrapper(sok.SGD(0.1)))
    model.save_weights(path)
    other, _ = model_of(kit)
    other.load_weights(path)
    assert_same(model, other)


def test_keras_weights_of_other_ranks(tmp_path, monkeypatch):
    path = str(tmp_path / "m.weights.h5")
    model, _ = model_of()
    monkeypatch.setattr(saving, "layout", lambda place: np.array([place.num_rows * 2, -1, 2, 1]))
    model.save_weights(path)
    monkeypatch.undo()
    other, layer = model_of()
    for table in layer.tables.values():
        table.assign(tf.zeros_like(table))
    with pytest.raises(ValueError, match="rank 1 of 2"):
        other.load_weights(path)
    assert not any(table.numpy().any() for table in layer.tables.values())
    with saving.tables_left_alone():
        other.load_weights(path)
    assert not any(table.numpy().any() for table in layer.tables.values())
    np.testing.assert_array_equal(model.layers[-1].kernel, other.layers[-1].kernel)


@pytest.mark.parametrize("stack", [False, True], ids=["apart", "stacked"])
def test_a_saved_model_is_whole(stack, tmp_path):
    """model.save and load_model of Keras 3 make the layer and its tables anew."""
    model, _ = model_of(stack=stack)
    train(model, sok.OptimizerWrapper(sok.SGD(0.1)))
    model.save(tmp_path / "m.keras")
    assert_same(model, keras.models.load_model(tmp_path / "m.keras"), 3 if stack else 4)


class OfRank(tf.Module):
    """A table and a state of it, on one of several ranks."""

    def __init__(self, place, rows, name="t"):
        super().__init__()
        self.table = saving.StateVariable(name=name, place=place, initial_value=rows[place.rows], trainable=False)
        counts = np.arange(place.num_rows, dtype=np.float32)[place.rows]
        self.state = saving.StateVariable(name=name, place=place, initial_value=counts, trainable=False)
        self.dense = tf.Variable([3.0])


@pytest.mark.parametrize("owner", [-1, 1])
@pytest.mark.parametrize("writers, readers", [(1, 3), (2, 3), (3, 2), (4, 1), (2, 2)])
def test_files_of_all_ranks(writers, readers, owner, tmp_path):
    rows = np.random.default_rng(0).standard_normal((11, 3)).astype(np.float32)
    for rank in range(writers):
        place = Placement(11, 3, min(owner, writers - 1), writers, rank)
        tf.train.Checkpoint(model=OfRank(place, rows)).write(str(tmp_path / f"c-{rank}"))
    for rank in range(readers):
        place = Placement(11, 3, -1, readers, rank)
        target = OfRank(place, np.zeros_like(rows))
        target.state.assign(tf.zeros_like(target.state))
        target.dense.assign([0.0])
        with saving.from_all_ranks():
            for writer in range(writers):
                tf.train.Checkpoint(model=target).read(str(tmp_path / f"c-{writer}")).assert_consumed()
            assert not target.table.numpy().any()
        np.testing.assert_array_equal(target.table, rows[place.rows])
        np.testing.assert_array_equal(target.state, np.arange(11)[place.rows])
        assert target.dense.numpy() == 3


@pytest.mark.parametrize("owner", [-1, 1])
@pytest.mark.parametrize("writers, readers", [(1, 3), (2, 3), (3, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("sizes", [(7, 4), (1, 3, 1)])  # the latter's keys on 2 and 3 ranks end alike
def test_files_of_all_ranks_of_a_stack(sizes, writers, readers, owner, tmp_path):
    tables = [np.random.default_rng(t).standard_normal((size, 2)).astype(np.float32) for t, size in enumerate(sizes)]

    def variable(ranks, rank, filled):
        place, members = stack({str(t): size for t, size in enumerate(sizes)}, 2, min(owner, ranks - 1), ranks, rank)
        rows = np.zeros((place.local_rows, 2), np.float32)
        for member in members.values():
            if filled:
                rows[member.slots] = tables[int(member.name)][member.placement.rows]
        return saving.StateVariable(name="s", place=place, initial_value=rows, trainable=False), members

    for rank in range(writers):
        tf.train.Checkpoint(table=variable(writers, rank, True)[0]).write(str(tmp_path / f"c-{rank}"))
    for rank in range(readers):
        target, members = variable(readers, rank, False)
        with saving.from_all_ranks():
            for writer in range(writers):
                tf.train.Checkpoint(table=target).read(str(tmp_path / f"c-{writer}")).assert_consumed()
        for member in members.values():
            np.testing.assert_array_equal(target[member.slots], tables[int(member.name)][member.placement.rows])


def test_a_file_that_was_forgotten(tmp_path):
    rows = np.ones((5, 2), np.float32)
    for rank in range(2):
        tf.train.Checkpoint(model=OfRank(Placement(5, 2, -1, 2, rank), rows)).write(str(tmp_path / f"c-{rank}"))
    target = OfRank(Placement(5, 2), np.zeros_like(rows))
    with pytest.raises(ValueError, match="'t': 2 of this rank's 5 rows"), saving.from_all_ranks():
        tf.train.Checkpoint(model=target).read(str(tmp_path / "c-0"))
    assert not target.table.numpy().any()
    other = OfRank(Placement(6, 2), np.zeros((6, 2), np.float32))
    with pytest.raises(ValueError, match="has 6 rows"), saving.from_all_ranks():
        tf.train.Checkpoint(model=other).read(str(tmp_path / "c-0"))
    with pytest.raises(RuntimeError, match="nested"), saving.from_all_ranks(), saving.from_all_ranks():
        pass


@pytest.mark.parametrize(("name", "stack"), [*((name, False) for name in OPTIMIZERS), ("distributed", True)])
def test_states_that_are_built_are_restored(name, stack, tmp_path):
    model, layer = model_of(stack=stack)
    optimizer = OPTIMIZERS[name](keras)
    train(model, optimizer)
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "c"))
    other, other_layer = model_of(stack=stack)
    again = OPTIMIZERS[name](keras)
    getattr(again, "sok_build", getattr(again, "build", None))(other_layer.tables.values())
    with saving.from_all_ranks():
        tf.train.Checkpoint(model=other, optimizer=again).read(str(tmp_path / "c"))
    slots = getattr(optimizer, "sok_slots", getattr(optimizer, "slots", None))
    restored = getattr(again, "sok_slots", getattr(again, "slots", None))
    for name, table in layer.tables.items():
        states = slots(table)
        assert states
        for key, state in states.items():
            np.testing.assert_array_equal(state, restored(other_layer.tables[name])[key])
    train(model, optimizer)
    train(other, again)
    assert_same(model, other, 3 if stack else 4)


def test_weight_files_of_all_ranks(tmp_path):
    model, _ = model_of()
    model.save_weights(tmp_path / "m.weights.h5")
    other, _ = model_of()
    with saving.from_all_ranks():
        other.load_weights(tmp_path / "m.weights.h5")
    assert_same(model, other)
