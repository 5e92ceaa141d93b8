# SPDX-License-Identifier: Apache-2.0
"""Saver: files of SparseOperationKit 1.x both ways, and tf.compat.v1 graphs as its TF 1.15 scripts made them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.checkpoint import CheckpointError
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.legacy import layers, optimizers, saver


def dense(library=keras, rows=8, dimension=4, **options):
    return layers.classes(library).All2AllDenseEmbedding(rows, dimension, 2, 2, **options)


def keys_of(*values):
    return tf.constant(np.reshape(values, (-1, 2, 2)), tf.int64)


def rows_of(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))


@pytest.mark.parametrize("key_dtype", ["int64", "uint32", "int32"])
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_files(use_hashtable, key_dtype, tmp_path):
    layer = dense(use_hashtable=use_hashtable, key_dtype=key_dtype, table_name="users")
    rows = np.random.default_rng(3).normal(size=(8, 4)).astype(np.float32)
    files_of = sok.Saver()
    assert files_of.load_embedding_values(layer.var, [rows[:3], rows[3:5]]).numpy() == b"OK"
    held = rows_of(layer.var)
    assert len(held) == (5 if use_hashtable else 8)
    np.testing.assert_array_equal([held[key] for key in range(5)], rows[:5])
    assert files_of.dump_to_file(layer.var, tmp_path).numpy() == b"OK"
    keys = np.fromfile(tmp_path / "users_keys.file", np.uint32 if key_dtype == "uint32" else np.int64)
    values = np.fromfile(tmp_path / "users_values.file", np.float32).reshape(-1, 4)
    assert {int(k): v.tolist() for k, v in zip(keys, values, strict=True)} == held
    assert {path.name for path in tmp_path.iterdir()} == {"users_keys.file", "users_values.file"}
    # Files of either dtype, in any order, go into a table of any.
    order = np.random.default_rng(4).permutation(len(keys))
    for dtype in (np.uint32, np.int64):
        keys[order].astype(dtype).tofile(tmp_path / "users_keys.file")
        values[order].tofile(tmp_path / "users_values.file")
        again = dense(
            use_hashtable=use_hashtable, key_dtype=key_dtype, table_name="users", embedding_initializer="zeros"
        )
        assert files_of.restore_from_file(again.var, str(tmp_path)).numpy() == b"OK"
        assert rows_of(again.var) == held


def test_an_odd_number_of_uint32_keys_is_restored(tmp_path):
    np.array([3, 2**32 - 1, 5], np.uint32).tofile(tmp_path / "users_keys.file")
    np.arange(12, dtype=np.float32).tofile(tmp_path / "users_values.file")
    layer = dense(table_name="users")
    sok.Saver().restore_from_file(layer.var, tmp_path)
    assert rows_of(layer.var)[2**32 - 1] == [4, 5, 6, 7]


def files(folder, keys, values):
    np.asarray(keys).tofile(folder / "users_keys.file")
    np.asarray(values, np.float32).tofile(folder / "users_values.file")


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_files_that_do_not_fit_change_nothing(use_hashtable, tmp_path):
    layer = dense(use_hashtable=use_hashtable, table_name="users")
    layer(keys_of(0, 1, 2, 3))
    before = rows_of(layer.var)
    files_of = sok.Saver()

    def refuses(message):
        with pytest.raises(CheckpointError, match=message):
            files_of.restore_from_file(layer.var, tmp_path)
        assert rows_of(layer.var) == before

    refuses("is missing")
    for keys, values, message in (
        (np.zeros(0, np.int64), [], "is empty"),
        (np.arange(3), np.ones(13), r"8 .int64. or 4"),
        (np.arange(3, dtype=np.int16), np.ones(12), r"8 .int64. or 4"),
        (np.array([1, 2, 1]), np.ones(12), "a key twice"),
        *([] if use_hashtable else [(np.array([1, 2, 8]), np.ones(12), "keys from 1 to 8")]),
        *([(np.arange(3, 9), np.ones(24), "would hold 9 keys")] if use_hashtable else []),
    ):
        files(tmp_path, keys, values)
        refuses(message)
    with pytest.raises(CheckpointError, match="cannot write"):
        files_of.dump_to_file(layer.var, tmp_path / "missing")
    with pytest.raises(ValueError, match="has 8 rows"):
        files_of.load_embedding_values(layer.var, np.ones((9, 4)))
    with pytest.raises(ValueError, match="rows of 4"):
        files_of.load_embedding_values(layer.var, np.ones((2, 3)))
    with pytest.raises(TypeError, match="must be that of"):
        files_of.dump_to_file(sok.Variable(shape=(2, 2)), tmp_path)


def test_files_of_many_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "_ROWS_AT_A_TIME", 3)
    layer, again = (
        dense(rows=17, use_hashtable=False, table_name="users", embedding_initializer=i) for i in ("normal", "zeros")
    )
    sok.Saver().dump_to_file(layer.var, tmp_path)
    sok.Saver().restore_from_file(again.var, tmp_path)
    np.testing.assert_array_equal(again.var, layer.var)


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_graph(use_hashtable, tmp_path, device):
    """Init, layer, plug-in Adam, files: in a session of tf.compat.v1."""
    if device == "gpu":
        pytest.skip("a session of its own places what it likes")
    runtime.shutdown()
    rows = np.random.default_rng(5).normal(size=(8, 4)).astype(np.float32)
    with tf.Graph().as_default():
        initialised = sok.Init(global_batch_size=2)
        layer = dense(tf_keras, use_hashtable=use_hashtable, table_name="users", dtype="float32")
        ids = tf.compat.v1.placeholder(tf.int64, [None, 2, 2])
        loss = tf.reduce_sum(layer(ids, training=True) ** 2)
        (gradient,) = tf.gradients(loss, [layer.var])
        adam = tf_keras.optimizers.legacy.Adam(learning_rate=0.1)
        with sok.OptimizerScope([layer.var]):
            train = adam.apply_gradients([(gradient, layer.var)])
        lazy = optimizers.LazyAdamOptimizer(0.1).apply_gradients([(gradient, layer.var)])
        load = sok.Saver().load_embedding_values(layer.var, rows)
        dump = sok.Saver().dump_to_file(layer.var, tmp_path)
        restore = sok.Saver().restore_from_file(layer.var, tmp_path)
        exported = sok.export(layer.var)
        with tf.compat.v1.Session() as session:
            session.run(initialised)
            session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
            assert session.run(load) == b"OK"
            session.graph.finalize()
            assert session.run(dump) == b"OK"
            session.run(train, {ids: [[[0, 1], [2, 3]]]})
            session.run(lazy, {ids: [[[0, 1], [2, 3]]]})
            keys, values = session.run(exported)
            assert sorted(np.flatnonzero((values != rows[keys]).any(1))) == sorted(np.flatnonzero(keys < 4))
            assert session.run(restore) == b"OK"
            keys, values = session.run(exported)
            np.testing.assert_array_equal(values, rows[keys])
            (tmp_path / "users_keys.file").write_bytes(b"odd")
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"8 .int64."):
                session.run(restore)


def test_names_of_layers_made_after_a_model_was_loaded(monkeypatch):
    from sparse_operation_kit.tensorflow.legacy import variables

    monkeypatch.setattr(variables, "_given", set())
    monkeypatch.setitem(variables._names, "EmbeddingVariable", iter(range(9)))
    loaded = sok.All2AllDenseEmbedding(4, 2, 1, 1, table_name="EmbeddingVariable")  # as its configuration says
    assert loaded.var.table_name == "EmbeddingVariable"
    assert [sok.All2AllDenseEmbedding(4, 2, 1, 1).var.table_name for _ in range(2)] == [
        "EmbeddingVariable_1",
        "EmbeddingVariable_2",
    ]
