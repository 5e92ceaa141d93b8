# SPDX-License-Identifier: Apache-2.0
"""DeepRec's names: group lookups, feature columns, which give what TensorFlow's own give, and embedding variables."""

import unittest.mock
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.checkpoint import open_dump
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.legacy import feature_columns

fc = tf.feature_column
RNG = np.random.default_rng(11)


def sparse_of(rows, dtype=tf.int64):
    return tf.RaggedTensor.from_row_lengths(
        tf.constant(np.concatenate(rows), dtype), [len(r) for r in rows]
    ).to_sparse()


# --- group lookups ---------------------------------------------------------------------------------------------------


def test_group_lookups():
    tables = [sok.Variable(RNG.normal(size=(10, d)).astype(np.float32)) for d in (2, 3)]
    rows = [[1, 2], [], [9]], [[0], [5, 5, 6], []]
    ids = [sparse_of(rows[0]), tf.RaggedTensor.from_row_lengths(tf.constant([0, 5, 5, 6], tf.int64), [1, 3, 0])]
    outputs = sok.group_embedding_lookup_sparse(tables, ids, ["mean", "sum"])
    pools: list[Any] = [np.mean, np.sum]
    for table, bags, output, pool in zip(tables, rows, outputs, pools, strict=True):
        expected = [pool(table.numpy()[bag], axis=0) if bag else np.zeros(table.shape[1]) for bag in bags]
        np.testing.assert_allclose(output, expected, rtol=1e-6)
    weights = [ids[0].with_values(tf.constant([1.0, 3.0, 2.0])), None]
    for given in ({"sp_weights": weights}, {"partition_strategy": weights}):  # newer versions: in the fourth place
        weighted = sok.group_embedding_lookup_sparse(tables, ids, ["mean", "sum"], **given)
        first = tables[0].numpy()
        np.testing.assert_allclose(weighted[0][0], (first[1] + 3 * first[2]) / 4, rtol=1e-6)
        np.testing.assert_array_equal(weighted[1], outputs[1])
    np.testing.assert_array_equal(sok.group_embedding_lookup_sparse(tables[0], ids[0], None)[0], outputs[0])
    sequences = sok.group_embedding_lookup_sparse(tables, ids, ["mean", "sum"], is_sequence=True)
    assert [s.shape.as_list() for s in sequences] == [[3, 2, 2], [3, 3, 3]]
    with pytest.raises(ValueError, match="with is_sequence nothing is"):
        sok.group_embedding_lookup_sparse(tables, ids, ["mean", "sum"], sp_weights=weights, is_sequence=True)
    np.testing.assert_array_equal(sequences[0][2], [tables[0].numpy()[9], [0, 0]])
    dense = sok.group_embedding_lookup(tables, [tf.constant([[1, 2]]), tf.constant([3])])
    np.testing.assert_array_equal(dense[0], tables[0].numpy()[[[1, 2]]])
    np.testing.assert_array_equal(dense[1], tables[1].numpy()[[3]])


def test_group_lookups_refuse():
    table, ids = sok.Variable(shape=(4, 2)), sparse_of([[1]])
    with pytest.raises(TypeError, match=r"sok.Variable\(tensor\)"):
        sok.group_embedding_lookup_sparse([tf.Variable(tf.ones([4, 2]))], [ids], ["sum"])
    with tf.Graph().as_default(), tf.compat.v1.variable_scope("v", partitioner=tf.compat.v1.fixed_size_partitioner(2)):
        partitioned = tf.compat.v1.get_variable("p", [4, 2])
        with pytest.raises(TypeError, match="partitioned"):
            sok.group_embedding_lookup_sparse(partitioned, [ids], ["sum"])
    for arguments, message in (
        (([table, table], [ids], ["sum", "sum"]), "2 params have 1 sp_ids"),
        (([table], [ids], ["sum", "sum"]), "1 params have 2 combiners"),
        (([table], [ids], ["max"]), "combiners must be"),
        (([table], [ids], ["sum"], "div"), "partition_strategy"),
    ):
        with pytest.raises(ValueError, match=message):
            sok.group_embedding_lookup_sparse(*arguments)
    with pytest.raises(ValueError, match="collective"):
        sok.enable_distributed_strategy("parameter_server")


def test_group_lookup_starts_a_process_alone():
    table = sok.Variable(shape=(4, 2))
    runtime.shutdown()
    assert sok.group_embedding_lookup(table, tf.constant([1]))[0].shape == (1, 2)


# --- feature columns -------------------------------------------------------------------------------------------------

FEATURES = {
    "id": tf.constant([[3], [1], [7]], tf.int64),
    "tags": tf.SparseTensor([[0, 0], [0, 1], [2, 1]], tf.constant(["a", "b", "zz"]), [3, 2]),
    "words": tf.SparseTensor([[0, 0], [0, 1], [2, 1]], tf.constant(["a", "b", "zz"]), [3, 2]),
    "terms": tf.SparseTensor([[0, 0], [0, 1], [2, 1]], tf.constant(["a", "b", "zz"]), [3, 2]),
    "many": tf.SparseTensor([[0, 0], [0, 1], [1, 0], [2, 0]], tf.constant([5, -1, 2, 2], tf.int64), [3, 2]),
    "weights": tf.SparseTensor([[0, 0], [0, 1], [1, 0], [2, 0]], [0.5, 2.0, -1.0, 3.0], [3, 2]),
    "price": tf.constant([[1.5], [2.5], [40.0]]),
}


def categorical_columns():
    return {
        "identity": fc.categorical_column_with_identity("id", 8),
        "hashed": fc.categorical_column_with_hash_bucket("tags", 5),
        "vocabulary": fc.categorical_column_with_vocabulary_list("words", ["a", "b"], num_oov_buckets=1),
        "no_oov": fc.categorical_column_with_vocabulary_list("terms", ["a", "b"]),
        "many": fc.categorical_column_with_identity("many", 6),
        "weighted": fc.weighted_categorical_column(fc.categorical_column_with_identity("many", 6), "weights"),
        "buckets": fc.bucketized_column(fc.numeric_column("price"), [2.0, 10.0]),
        "crossed": fc.crossed_column(["tags", "id"], 9),
    }


def made(make):
    """Embedding columns of every kind, each with a pooling, and two columns without a table."""
    pooling = ("mean", "sum", "sqrtn")
    named = categorical_columns()
    embedded = {
        name: make(column, 2 + i % 3, combiner=pooling[i % 3]) for i, (name, column) in enumerate(named.items())
    }
    return embedded, [fc.numeric_column("price"), fc.indicator_column(named["vocabulary"])]


def test_columns_equal_tensorflows_own():
    """In DenseFeatures of tf_keras and in sok.input_layer: numbers, and their order."""
    theirs, plain = made(fc.embedding_column)
    with sok.group_embedding_column_scope("group"):
        mine, _ = made(fc.embedding_column)
    assert fc.embedding_column(fc.categorical_column_with_identity("id", 8), 2).__class__.__module__.startswith(
        "tensor"
    )
    names = [name for name in theirs if name != "no_oov"]  # its name is that of "vocabulary"
    reference = tf_keras.layers.DenseFeatures([*(theirs[n] for n in names), *plain])
    expected = reference(FEATURES)
    layer = tf_keras.layers.DenseFeatures([*(mine[n] for n in names), *plain])
    with unittest.mock.patch.object(feature_columns, "lookup_sparse", wraps=sok.lookup_sparse) as lookup:
        layer(FEATURES)
    assert lookup.call_count == 1, "one lookup for the group"
    assert len(layer.trainable_variables) == len(names)
    weights = {w.name.split("/")[1]: w for w in reference.trainable_variables}
    for name in names:
        table = mine[name].table()
        assert table.table_name == f"group/{mine[name].name}"
        table.assign(weights[theirs[name].name])
    np.testing.assert_allclose(layer(FEATURES), expected, atol=1e-6)
    slope = tf.constant(RNG.normal(size=expected.shape), tf.float32)
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_sum(each(FEATURES) * slope) for each in (layer, reference)]
    for name in names:
        sources = mine[name].table(), weights[theirs[name].name]
        one, other = (tf.convert_to_tensor(tape.gradient(*each)) for each in zip(losses, sources, strict=True))
        np.testing.assert_allclose(one, other, atol=1e-6, err_msg=name)
    columns = [*(mine[n] for n in names), *plain]
    np.testing.assert_allclose(sok.input_layer(FEATURES, columns), expected, atol=1e-6)
    np.testing.assert_allclose(tf.function(lambda: sok.input_layer(FEATURES, columns))(), expected, atol=1e-6)


def test_words_outside_the_vocabulary_equal_tensorflows_own():
    theirs, mine = (made(make)[0]["no_oov"] for make in (fc.embedding_column, sok.embedding_column))
    reference = tf_keras.layers.DenseFeatures([theirs])
    expected = reference(FEATURES)
    mine.table().assign(reference.trainable_variables[0])
    np.testing.assert_allclose(sok.input_layer(FEATURES, [mine]), expected, atol=1e-6)


def test_columns_in_a_graph(device):
    if device == "gpu":
        pytest.skip("a session of its own places what it likes")
    runtime.shutdown()
    results = []
    rows = [RNG.normal(size=(n, d)).astype(np.float32) for n, d in ((8, 2), (5, 3))]
    for scope in (None, sok.group_embedding_column_scope()):
        with tf.Graph().as_default():
            features = {
                "id": tf.constant([[3], [1], [7]], tf.int64),
                "tags": tf.SparseTensor([[0, 0], [0, 1], [2, 1]], ["a", "b", "zz"], [3, 2]),
            }
            if scope is not None:
                scope.__enter__()
            columns = [
                fc.embedding_column(fc.categorical_column_with_identity("id", 8), 2),
                fc.embedding_column(fc.categorical_column_with_hash_bucket("tags", 5), 3, combiner="sum"),
            ]
            if scope is not None:
                scope.__exit__(None, None, None)
            output = tf.compat.v1.feature_column.input_layer(features, columns)
            variables = sorted(tf.compat.v1.trainable_variables(), key=lambda v: v.shape[1])
            assert len(variables) == 2
            loads = [
                tf.raw_ops.AssignVariableOp(resource=v.handle, value=r) for v, r in zip(variables, rows, strict=True)
            ]
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(loads)
                results.append(session.run(output))
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)


def test_initial_rows_and_training_of_columns():
    column = sok.embedding_column(fc.categorical_column_with_identity("id", 8), 4, initializer=tf.ones_initializer())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.input_layer(FEATURES, column))
    np.testing.assert_array_equal(column.table(), np.ones((8, 4)))
    gradient = tape.gradient(loss, column.table())
    assert gradient.indices.numpy().tolist() == [1, 3, 7]
    other = sok.embedding_column(fc.categorical_column_with_identity("id", 8), 4)
    assert other != column and abs(other.table().numpy()).max() <= 1.0 and abs(other.table().numpy()).max() > 0.05


def test_columns_refuse():
    identity = fc.categorical_column_with_identity("id", 8)
    with sok.group_embedding_column_scope():
        with pytest.raises(NotImplementedError, match="max_norm"):
            fc.embedding_column(identity, 2, max_norm=1.0)
        with pytest.raises(NotImplementedError, match="ckpt_to_load_from"):
            fc.embedding_column(identity, 2, ckpt_to_load_from="a", tensor_name_in_ckpt="b")
        sequence = fc.embedding_column(fc.sequence_categorical_column_with_identity("id", 8), 2)
        with pytest.raises(NotImplementedError, match="sequence"):
            sequence.get_sequence_dense_tensor(None, None)
    with pytest.raises(TypeError, match=r"sok\.embedding_column"):
        sok.input_layer(FEATURES, [fc.embedding_column(identity, 2)])
    with pytest.raises(ZeroDivisionError), sok.group_embedding_column_scope():
        divmod(1, 0)
    assert not isinstance(fc.embedding_column(identity, 2), feature_columns.EmbeddingColumn)


# --- embedding variables ---------------------------------------------------------------------------------------------


def test_embedding_variable():
    table = sok.get_embedding_variable("users", 4, initializer="ones")
    assert sok.get_embedding_variable("users", 4) is table
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    for differs, given in (
        ("embedding_dim 4", (5,)),
        ("key_dtype int64", (4, tf.int32)),
        ("value_dtype float32", (4, tf.int64, tf.float16)),
        ("initializer 'ones'", (4, tf.int64, None, "zeros")),
        ("trainable True", (4, tf.int64, None, None, False)),
    ):
        with pytest.raises(ValueError, match=f"'users' has the {differs} already"):
            sok.get_embedding_variable("users", *given)
    with pytest.raises(ValueError, match=r"'users' has the ev_option .* already, got .*'admission_threshold': 2"):
        sok.get_embedding_variable("users", 4, ev_option=option)
    with pytest.raises(TypeError, match="partitioner"):
        sok.get_embedding_variable("items", 4, partitioner=tf.compat.v1.fixed_size_partitioner(2))
    output = sok.group_embedding_lookup_sparse(table, sparse_of([[2**40, -7]]), ["sum"])
    np.testing.assert_array_equal(output[0], np.full((1, 4), 2.0))
    assert table.total_count().numpy().tolist() == [2, 4]
    other = sok.get_embedding_variable("small", 2, key_dtype=tf.int32, value_dtype=tf.float16)
    assert other.key_type == tf.int32 and other.dtype == tf.float16


def test_options_of_embedding_variables(tmp_path):
    def table(name, **options):
        return sok.get_embedding_variable(name, 2, ev_option=sok.EmbeddingVariableOption(**options))

    admitted = table("admitted", filter_option=sok.CounterFilter(filter_freq=3))
    for lookups in range(4):
        assert admitted.size == int(lookups >= 3)
        sok.group_embedding_lookup(admitted, tf.constant([5], tf.int64))
    assert admitted.size == 1
    assert table("sketched", filter_option=sok.CBFFilter(2, 100)).size == 0
    weak = table("weak", evict_option=sok.L2WeightEvict(1.5), init_option=sok.InitializerOption("ones"))
    sok.assign(weak, [1, 2], [[0.1, 0.1], [3.0, 3.0]])
    assert weak.evict().tolist() == [1] and weak.size == 1
    old = table("old", evict_option=sok.GlobalStepEvict(2))
    for key in (1, 2, 3, 4):
        sok.group_embedding_lookup(old, tf.constant([key], tf.int64))
    assert 1 in old.evict() and old.size < 4
    # A dump gives them up first, as DeepRec did; what it wrote are the rows that are left.
    for key, rows in ((5, [0.1, 0.1]), (6, [2.0, 2.0])):
        sok.assign(weak, [key], [rows])
    sok.dump(tmp_path / "dump", [weak, old, admitted], sok.OptimizerWrapper(tf_keras.optimizers.legacy.Adam()))
    assert sorted(weak.indices.numpy()) == [2, 6]
    for key in (6, 7, 8):
        sok.group_embedding_lookup(old, tf.constant([key], tf.int64))
    with open_dump(tmp_path / "dump") as written:
        assert written.tables["weak_0"].rows == 2
    sok.dump(tmp_path / "dump", old)
    assert set(old.indices.numpy()) <= {6, 7, 8}
    assert table("host", storage_option=sok.StorageOption(sok.StorageType.HBM_DRAM)).backend_type == "hybrid"
    with pytest.raises(NotImplementedError, match="SSDHASH"):
        table("disk", storage_option=sok.StorageOption(sok.StorageType.SSDHASH))


def test_columns_of_any_ids():
    column = sok.categorical_column_with_embedding("tags")
    with sok.group_embedding_column_scope("open"):
        embedded = [fc.embedding_column(column, 3, combiner="sum", initializer=tf.ones_initializer())]
    output = sok.input_layer(FEATURES, embedded)
    np.testing.assert_array_equal(output, [[2] * 3, [0] * 3, [1] * 3])
    assert embedded[0].table().size == 3
    one, other, third = (
        sok.embedding_column(sok.categorical_column_with_embedding("tags", ev_option=option), 3)
        for option in (sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2)), None, None)
    )
    assert one.table() is one.table()
    with pytest.raises(ValueError, match="'tags_embedding' has the ev_option"):
        other.table()
    with pytest.raises(ValueError, match="'tags_embedding' has the ev_option"):
        sok.input_layer(FEATURES, [third])
    with pytest.raises(NotImplementedError, match=r"sok\.embedding_column"):
        _ = column.num_buckets


def test_install():
    before = {name for name in dir(tf) if not name.startswith("_")}
    sok.deeprec.install()
    assert tf.nn.group_embedding_lookup_sparse is sok.group_embedding_lookup_sparse
    assert tf.compat.v1.feature_column.group_embedding_column_scope is sok.group_embedding_column_scope
    assert tf.config.experimental.enable_distributed_strategy is sok.enable_distributed_strategy
    assert tf.get_embedding_variable is sok.get_embedding_variable
    assert "get_embedding_variable" not in before
