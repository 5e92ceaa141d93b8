# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables in tf.train.Checkpoint, in Keras's files and in copies; ranks are in tests/distributed."""

import contextlib
import copy
import pickle
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from dict_store import DictStore

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.placement import ANY_KEY, Placement
from sparse_operation_kit.tensorflow import dynamic_saving, saving
from sparse_operation_kit.tensorflow.embedding import layer_class

KEYS, MORE = [[5, -3], [2**40, 5, 0]], [[7, -3, 11, 12]]
OPTIMIZERS = {
    "adam": lambda: sok.OptimizerWrapper(keras.optimizers.Adam(0.1)),
    "row-wise": lambda: sok.OptimizerWrapper(sok.RowWiseAdagrad(0.1)),
    "on rows": lambda: sok.OptimizerWrapper(keras.optimizers.Adam(0.1, amsgrad=True)),
}


def make(**options):
    return sok.DynamicVariable(3, "normal", name="t", max_capacity=7, **options)


def train(table, optimizer, keys):
    ids = tf.ragged.constant(keys, dtype=tf.int64, ragged_rank=1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="mean") ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def content(table, optimizer=None):
    """{key: its row and states}."""
    keys, slots = table.held_among(0, table.num_slots())
    columns = [table, *(() if optimizer is None else optimizer.slots(table).values())]
    joined = [tf.reshape(tf.cast(column.read_slots(slots), tf.float32), [len(keys), -1]) for column in columns]
    return dict(zip(keys.numpy().tolist(), np.concatenate(joined, axis=1).tolist(), strict=True))


@pytest.mark.parametrize("first", ["a", "z"], ids=["states first", "table first"])
@pytest.mark.parametrize("before", [None, MORE, [[1, 2, 3, 4], [8, 6]]], ids=["new", "trained", "full of others"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_checkpoint(kind, before, first, tmp_path):
    """Restored before the first step has made any state, and after it: both go on as the original."""
    table, optimizer = make(evict_strategy=None), OPTIMIZERS[kind]()
    train(table, optimizer, KEYS)
    train(table, optimizer, KEYS)
    tf.train.Checkpoint(**{first: optimizer, "m": table}).write(str(tmp_path / "c"))
    other, again = make(evict_strategy=None), OPTIMIZERS[kind]()
    if before is not None:
        train(other, again, before)
    status = tf.train.Checkpoint(**{first: again, "m": other}).read(str(tmp_path / "c"))
    assert content(other) == content(table)
    for each, wrapped in ((table, optimizer), (other, again)):
        train(each, wrapped, MORE)
    status.assert_consumed()
    assert content(other, again) == content(table, optimizer) and other.size == 7


def test_asynchronous_checkpoints(tmp_path):
    """Of a dynamic and a static table, which are saved as they were when save() returned."""

    def make_optimizer():  # Keras 3's variables are made anew by the second one, which TensorFlow refuses
        return sok.OptimizerWrapper(tf_keras.optimizers.Adam(0.1))

    table, static = make(), sok.Variable(shape=(9, 3), initializer="normal", name="s")
    optimizer = make_optimizer()
    train(table, optimizer, KEYS)
    train(static, optimizer, [[5], [7, 0]])
    saved = tf.train.Checkpoint(optimizer=optimizer, table=table, static=static)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    for number in range(2):
        path = saved.save(str(tmp_path / "c"), options=options)
        wanted, rows = content(table, optimizer), static.numpy()
        train(table, optimizer, [[5, number]])
        train(static, optimizer, [[5]])
        saved.sync()
        restored, plain, again = make(), sok.Variable(shape=(9, 3), name="s"), make_optimizer()
        again.build([restored, plain])
        tf.train.Checkpoint(optimizer=again, table=restored, static=plain).read(path)
        assert content(restored, again) == wanted
        np.testing.assert_array_equal(plain, rows)


def test_asynchronous_checkpoints_of_a_store_are_refused(tmp_path):
    table = make(store=DictStore())
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    with pytest.raises(RuntimeError, match="table 't' has rows in a store"):
        tf.train.Checkpoint(table=table).save(str(tmp_path / "c"), options=options)


def test_rows_without_an_order(tmp_path):
    """They count as used in the epoch that the table is in, as those that it had."""
    saved, table = make(evict_strategy=None), make(evict_strategy="epoch_lru")
    sok.assign(saved, tf.range(5), tf.ones([5, 3]))
    table.set_epoch(5)
    sok.assign(table, tf.range(2), tf.ones([2, 3]))
    dynamic_saving.restore(table, table, dynamic_saving.content(saved, saved))
    for key in (8, 9, 10):
        train(table, OPTIMIZERS["row-wise"](), [[key]])
    assert table.size == 7 and {8, 9, 10} < set(table.indices.numpy().tolist())


def test_states_wait_for_their_own_table(tmp_path):
    """States of another file do not reach a table that is restored later."""
    table, optimizer = make(), OPTIMIZERS["adam"]()
    train(table, optimizer, KEYS)
    tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "states"))
    train(table, optimizer, MORE)
    tf.train.Checkpoint(table=table).write(str(tmp_path / "table"))
    other, again = make(), OPTIMIZERS["adam"]()
    train(other, again, [[1]])
    tf.train.Checkpoint(optimizer=again).read(str(tmp_path / "states"))
    tf.train.Checkpoint(table=other).read(str(tmp_path / "table"))
    assert content(other) == content(table)
    assert not any(state for row in content(other, again).values() for state in row[3:])


def test_the_order_of_eviction_survives(tmp_path):
    table, optimizer = make(), OPTIMIZERS["adam"]()
    for key in (1, 2, 3, 4, 5, 6, 7, 1, 3):
        train(table, optimizer, [[key]])
    tf.train.Checkpoint(table=table, optimizer=optimizer).write(str(tmp_path / "c"))
    restored, again = make(), OPTIMIZERS["adam"]()
    train(restored, again, [[1, 2, 3, 50]])
    tf.train.Checkpoint(table=restored, optimizer=again).read(str(tmp_path / "c"))
    copies = [restored, copy.deepcopy(table), pickle.loads(pickle.dumps(table))]
    for each in (table, *copies):
        for key in (8, 9, 10):
            train(each, OPTIMIZERS["row-wise"](), [[key]])
        assert sorted(each.indices.numpy().tolist()) == [1, 3, 6, 7, 8, 9, 10]  # 2, 4 and 5 were used longest ago


def test_what_does_not_fit_is_refused(tmp_path):
    table = make()
    sok.assign(table, tf.range(7), tf.ones([7, 3]))
    tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
    small = sok.DynamicVariable(3, name="t", max_capacity=6)
    wide = sok.DynamicVariable(4, name="t")
    static = sok.Variable(shape=(9, 3), name="t")
    for other, error, text in (
        (small, ValueError, "'t' may hold 6 rows on this rank, and the checkpoint has 7"),
        (wide, ValueError, "'t' has"),
        (static, ValueError, "'t' has 9 rows"),
    ):
        with pytest.raises(error, match=text):
            tf.train.Checkpoint(table=other).read(str(tmp_path / "c"))
    assert small.size == wide.size == 0
    with saving.tables_left_alone():
        tf.train.Checkpoint(table=small).read(str(tmp_path / "c"))
    assert small.size == 0
    saved = dynamic_saving.content(table, table)
    saved[saving.LAYOUT] = saving.layout(Placement(ANY_KEY, 3, -1, 2, 1))
    with pytest.raises(ValueError, match=r"table 't' is dynamic .*rank 1 of 2.*from_all_ranks.*sok.dump and sok.load"):
        dynamic_saving.restore(small, small, saved)
    with pytest.raises(NotImplementedError, match="'t' is dynamic: a SavedModel cannot hold it"):
        tf.saved_model.save(holder(table), str(tmp_path / "saved"))


def test_larger_keys_than_the_tables_are_refused(tmp_path):
    """A table and its states have keys of 32 bits, the file larger ones, also among those that wait."""
    table, optimizer = make(admission_threshold=2), OPTIMIZERS["adam"]()
    train(table, optimizer, [[2**40 + 7]])
    train(table, optimizer, [[2**40 + 7]])
    tf.train.Checkpoint(table=table).write(str(tmp_path / "table"))
    tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "states"))
    waits = make(admission_threshold=2)
    sok.lookup_sparse(waits, tf.ragged.constant([[2**40 + 7]], tf.int64), combiners="sum")
    tf.train.Checkpoint(table=waits).write(str(tmp_path / "waits"))
    other, again = make(key_type=tf.int32, admission_threshold=2), OPTIMIZERS["adam"]()
    sok.assign(other, tf.constant([7]), tf.ones([1, 3]))
    again.build([other])
    before = content(other, again)
    for file in ("table", "waits", "states"):
        part = {"optimizer": again} if file == "states" else {"table": other}
        for block in (contextlib.nullcontext, saving.from_all_ranks):
            with pytest.raises(ValueError, match=r"'t'.*key 1099511627783; expected keys in \[-2147483648"), block():
                tf.train.Checkpoint(**part).read(str(tmp_path / file))
    assert content(other, again) == before


def holder(table):
    module = tf.Module()
    module.table = table
    return module


@pytest.mark.parametrize("owner", [-1, 1])
@pytest.mark.parametrize(("writers", "missing"), [(1, 0), (2, 1), (3, 2)])
def test_files_of_all_ranks(writers, missing, owner):
    """What ranks wrote, read by one; the file of one of them is forgotten first."""
    generator = np.random.default_rng(0)
    keys = generator.integers(-100, 100, 7)
    keys = np.unique(keys)
    rows = generator.standard_normal((len(keys), 3)).astype(np.float32)
    files = []
    for rank in range(writers):
        place = Placement(ANY_KEY, 3, min(owner, writers - 1), writers, rank)
        mine = place.mine(keys)
        files.append({saving.VALUE: rows[mine], dynamic_saving.KEYS: keys[mine], saving.LAYOUT: saving.layout(place)})
    table = make()
    sok.assign(table, [keys[0], 1000], tf.ones([2, 3]))
    owners = set(range(writers)) if owner < 0 else {min(owner, writers - 1)}
    if missing in owners and writers > 1:
        with (
            pytest.raises(ValueError, match=rf"'t': the rows of ranks \[{missing}\] are in none"),
            saving.from_all_ranks(),
        ):
            for rank, file in enumerate(files):
                if rank != missing:
                    dynamic_saving.restore(table, table, file)
        assert 1000 in content(table)
    with saving.from_all_ranks():
        for file in files:
            dynamic_saving.restore(table, table, file)
        assert 1000 in content(table)
    assert content(table) == dict(zip(keys.tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_keras_weights(kit, tmp_path):
    def model_of(key_type="int64"):
        made = {"dimension": 3, "initializer": "normal", "key_type": key_type}
        layer = layer_class(kit)({"t": made, "s": (9, 3)}, combiners="sum")
        inputs = {name: kit.Input((2,), dtype=key_type, name=name) for name in ("t", "s")}
        pooled = layer(inputs)
        return kit.Model(inputs, kit.layers.Dense(1)(pooled["t"] + pooled["s"])), layer.tables["t"]

    path = str(tmp_path / "m.weights.h5")
    (model, table), (other, restored) = model_of(), model_of()
    ids = {"t": np.array([[1, -(2**50)], [3, 3]]), "s": np.array([[1, 2], [3, 3]])}
    model.compile(sok.DistributedOptimizer(kit.optimizers.Adam(0.1)), "mse", jit_compile=False)
    model.fit(ids, np.ones(2), epochs=2, verbose=0)
    assert isinstance(table, sok.DynamicVariable) and table.size == 3
    model.save_weights(path)
    sok.assign(restored, [99], tf.ones([1, 3]))
    other.load_weights(path)
    assert content(restored) == content(table)
    np.testing.assert_array_equal(other.predict(ids, verbose=0), model.predict(ids, verbose=0))
    narrow, restored = model_of("int32")
    with pytest.raises(ValueError, match=r"expected keys in \[-2147483648"):
        narrow.load_weights(path)
    assert restored.size == 0


def test_a_saved_model_is_whole(tmp_path):
    """model.save and load_model of Keras 3 make the layer and its tables anew, with what they were made with."""
    options: dict[str, Any] = {"max_capacity": 40, "evict_strategy": "lfu"}
    made = sok.DynamicVariable(3, keras.initializers.RandomNormal(stddev=0.5, seed=3), name="t", seed=5, **options)
    layer = layer_class(keras)({"t": made}, combiners="sum")
    inputs = {"t": keras.Input((2,), dtype="int64", name="t")}
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)["t"]))
    ids = {"t": np.array([[1, -(2**50)], [3, 3]])}
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model(ids, training=True)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    table = next(layer for layer in loaded.layers if hasattr(layer, "tables")).tables["t"]
    assert content(table) == content(made) and table.size == 3
    assert (table.capacity, table.config()) == (40, made.config())
    new = {"t": np.array([[17, 18]])}
    np.testing.assert_array_equal(loaded(new, training=False), model(new, training=False))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_copies(clone, dtype):
    table = make(dtype=dtype, key_type=tf.int32, trainable=False)
    sok.assign(table, [5, -3, 8], tf.ones([3, 3]) * tf.constant([[1.0], [2.0], [3.0]]))
    table.erase([5])
    copied = clone(table)
    assert type(copied) is sok.DynamicVariable and copied.dtype == dtype and not copied.trainable
    assert (copied.table_name, copied.placement, copied.config()) == (table.table_name, table.placement, table.config())
    assert content(copied) == content(table) and copied.size == 2
    sok.assign(table, [-3], tf.zeros([1, 3]))
    np.testing.assert_array_equal(sok.all2all_dense_embedding(copied, [-3])[0], [2, 2, 2])
    rows = [sok.all2all_dense_embedding(each, [77]) for each in (table, copied)]
    np.testing.assert_array_equal(*rows)


def test_copies_of_states_are_refused():
    table, optimizer = make(), OPTIMIZERS["adam"]()
    train(table, optimizer, KEYS)
    with pytest.raises(NotImplementedError, match="a state of table 't', which is dynamic, cannot be copied"):
        copy.deepcopy(optimizer.slots(table)["m"])
    both = copy.deepcopy({"one": table, "two": table})
    assert both["one"] is both["two"] is not table
