# SPDX-License-Identifier: Apache-2.0
"""SparseOperationKit 1.x's Init and layers, in both Kerases. Several ranks: tests/distributed/tensorflow_legacy.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.legacy import layers

KERASES = pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])

EXTREMES = [0, -1, 1, 2**62, -(2**63), 2**63 - 1, 2**32, -(2**31)]


def dense(library=keras, rows=8, dimension=4, **options):
    return layers.classes(library).All2AllDenseEmbedding(rows, dimension, 2, 2, **options)


def sparse(library=keras, combiner="mean", rows=8, **options):
    return layers.classes(library).DistributedEmbedding(combiner, rows, 4, 2, 3, **options)


def keys_of(*values):
    return tf.constant(np.reshape(values, (-1, 2, 2)), tf.int64)


def rows_of(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))


# --- Init ------------------------------------------------------------------------------------------------------------


def test_init():
    runtime.shutdown()
    assert sok.Init(global_batch_size=3).numpy() == b"OK"
    assert sok.Init(global_batch_size=3).numpy() == b"OK"
    with pytest.raises(ValueError, match="multiple of the 1 ranks"):
        sok.Init(global_batch_size=0)
    with pytest.raises(TypeError):
        sok.Init(batch=3)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope(), pytest.raises(RuntimeError, match="OneDeviceStrategy"):
        sok.Init()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert session.run(sok.Init(global_batch_size=3)) == b"OK"
    runtime.shutdown()
    sok.Init(seed=5)
    assert runtime.get().arguments.seed == 5
    sok.Init()
    with pytest.raises(ValueError, match="called before"):
        sok.Init(seed=6)


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_pooled_layers_in_graphs_of_v1(use_hashtable):
    runtime.shutdown()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(sok.Init(global_batch_size=1))
        layer = sparse(tf_keras, rows=8, use_hashtable=use_hashtable)
        ids = tf.compat.v1.sparse_placeholder(tf.int64, [None, 3])
        result = layer(ids, training=False)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        given = {rows: ([[0, 0], [1, 0]], [1, 2], [rows, 3]) for rows in (3, 4)}
        assert session.run(result, {ids: given[4]}).shape == (2, 2, 4)
        with pytest.raises(tf.errors.InvalidArgumentError, match="a multiple of 2 rows, slot_num"):
            session.run(result, {ids: given[3]})
    runtime.shutdown()


def test_init_keeps_what_sok_init_was_told():
    runtime.shutdown()
    sok.init(gradient="mean", exchange="engine", seed=4)
    told = runtime.session.state.arguments
    sok.Init(global_batch_size=3)
    assert runtime.session.state.arguments == told and told.gradient == "mean"
    runtime.shutdown()


# --- layers ----------------------------------------------------------------------------------------------------------


@KERASES
def test_any_value_is_a_key(library):
    layer = dense(library)
    ids = keys_of(*EXTREMES)
    first = layer(ids)
    assert layer.embedding_variable.size == 8
    np.testing.assert_array_equal(layer(tf.reverse(ids, [0])), tf.reverse(first, [0]))
    assert len({tuple(row) for row in first.numpy().reshape(-1, 4).tolist()}) == 8


@KERASES
def test_a_table_is_filled_to_the_last_row_and_refuses_one_more(library):
    layer = dense(library, table_name="users")
    layer(keys_of(*range(8)))
    before = rows_of(layer.embedding_variable)
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        layer(keys_of(0, 1, 2, 100))
    for said in ("'users'", "at most 8 keys", "nothing was inserted"):
        assert said in str(error.value)
    assert rows_of(layer.embedding_variable) == before
    layer(keys_of(*range(8)))
    evicting = dense(library, evict_strategy="lru")
    evicting(keys_of(*range(8)))
    evicting(keys_of(100, 101, 102, 103))
    assert set(rows_of(evicting.embedding_variable)) >= {100, 101, 102, 103}


@KERASES
def test_unseen_keys_read_their_initial_rows_in_evaluation(library):
    layer, other = dense(library, table_name="users"), dense(library, table_name="users")
    seen = layer(keys_of(0, 1, 2, 3), False)
    assert layer.var.size == 0
    np.testing.assert_array_equal(seen, other(keys_of(0, 1, 2, 3)))
    with pytest.raises(tf.errors.ResourceExhaustedError):
        layer(keys_of(*range(12)))
    layer(keys_of(*range(12)), training=False)
    if not tf.config.list_logical_devices("GPU"):
        step = tf.function(lambda ids, training: layer(ids, training=training), reduce_retracing=True)
        with pytest.raises(TypeError, match="training must be True or False"):
            step(keys_of(0, 1, 2, 3), tf.constant(True))


@KERASES
@pytest.mark.parametrize("combiner", ["Mean", "SUM", "sqrtn"])
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_sparse_layer(library, combiner, use_hashtable):
    layer = sparse(library, combiner, use_hashtable=use_hashtable, embedding_initializer="ones")
    ids = tf.SparseTensor([[0, 0], [0, 2], [2, 1], [3, 0]], tf.constant([1, 2, 3, 3], tf.int64), [4, 3])
    pooled = {"Mean": 1.0, "SUM": 2.0, "sqrtn": 2**0.5}[combiner]
    expected = np.array([[pooled, 0], [1, 1]], np.float32)
    for given in (ids, tf.ragged.constant([[1, 2], [], [3], [3]], dtype=tf.int64)):
        output = layer(given)
        assert output.shape == (2, 2, 4) and output.dtype == tf.float32
        np.testing.assert_allclose(output[:, :, 0], expected, rtol=1e-6)
    assert layer(tf.ragged.constant([], dtype=tf.int64, ragged_rank=1)).shape == (0, 2, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="multiple of 2 rows"):
        layer(tf.ragged.constant([[1], [2], [3]], dtype=tf.int64))
    with pytest.raises(TypeError, match=r"SparseTensor or a tf\.RaggedTensor"):
        layer(tf.constant([[1]], tf.int64))
    with pytest.raises(TypeError, match="inputs are int32, and the layer's key_dtype is int64"):
        layer(tf.ragged.constant([[1], [2]], dtype=tf.int32))


@KERASES
def test_keys_of_each_dtype(library):
    for dtype, values in (("uint32", [0, 2**32 - 1, 5, 7]), (tf.int32, [-1, 2**31 - 1, 5, 7])):
        layer = dense(library, key_dtype=dtype)
        ids = tf.reshape(tf.constant(values, tf.as_dtype(dtype)), (1, 2, 2))
        layer(ids)
        assert sorted(rows_of(layer.var)) == sorted(values)
        for wrong in (tf.cast(ids, tf.int64), np.asarray(ids, np.int64), np.asarray(ids, np.float32)):
            name = tf.as_dtype(wrong.dtype).name
            with pytest.raises(TypeError, match=f"inputs are {name}"):
                layer(wrong)
        layer(np.asarray(ids))
        assert sorted(rows_of(layer.var)) == sorted(values)
    with pytest.raises(TypeError, match="key_dtype must be"):
        dense(library, key_dtype="float32")


@KERASES
def test_wrong_arguments(library):
    for options, message in (
        ({"rows": 0}, "max_vocabulary_size_per_gpu"),
        ({"combiner": "max"}, "combiner must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse(library, **options)
    make = layers.classes(library).DistributedEmbedding
    for arguments in ((0, 1), (3, 7), (3, 0)):
        with pytest.raises(ValueError, match="max_feature_num"):
            make("sum", 8, 4, 2, *arguments)
    layer = dense(library)
    for ids in (tf.zeros([1, 2, 3], tf.int64), tf.zeros([4], tf.int64)):
        with pytest.raises(ValueError, match="inputs must be"):
            layer(ids)
    with pytest.raises(TypeError, match="rows of a hash table are drawn when keys come"):
        dense(library, embedding_initializer=lambda shape, dtype=None: np.ones(shape))


@KERASES
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_layers_of_one_shape_made_in_a_row_have_tables_of_their_own(library, use_hashtable):
    first, second = (dense(library, use_hashtable=use_hashtable) for _ in range(2))
    assert first.var.m_var_name != second.var.m_var_name
    assert first.var.values == (first.var,)
    sok.assign(first.var, [1], np.ones((1, 4)))
    assert second.var.size == 0 if use_hashtable else not np.any(rows_of(second.var)[1] == 1.0)
    ids = keys_of(0, 1, 2, 3)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(first(ids)) + 2 * tf.reduce_sum(second(ids))
    one, two = tape.gradient(loss, [first.var, second.var])
    # Of four rows; on a GPU the first table, where a key was assigned, may have memory for one more.
    np.testing.assert_array_equal(2 * tf.convert_to_tensor(one)[:4], tf.convert_to_tensor(two)[:4])


@KERASES
def test_dynamic_input_and_dtypes(library):
    layer = dense(library, dynamic_input=True, dtype="float16", table_dtype=tf.bfloat16)
    assert layer(tf.constant([1, 2, 1], tf.int64)).dtype == tf.float16
    assert layer.var.dtype == tf.bfloat16 and layer(tf.constant([], tf.int64)).shape == (0, 4)
    mixed = dense(
        library, dtype=library.mixed_precision.Policy("mixed_bfloat16") if library is tf_keras else "mixed_bfloat16"
    )
    assert mixed(keys_of(1, 2, 3, 4)).dtype == tf.bfloat16 and mixed.var.dtype == tf.float32
    unknown = dense(tf_keras, dtype=tf_keras.mixed_precision.Policy("_infer"))  # tf_keras's without TF 2's behaviour
    assert unknown(keys_of(1, 2, 3, 4)).dtype == tf.float32


@KERASES
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_models_of_the_layers_are_saved_and_loaded(library, use_hashtable, tmp_path):
    layer = dense(library, use_hashtable=use_hashtable, embedding_initializer=library.initializers.RandomNormal(seed=3))
    inputs = library.Input(shape=(2, 2), dtype="int64")
    outputs = library.layers.Dense(1)(library.layers.Flatten()(layer(inputs)))
    model = library.Model(inputs, outputs)
    assert len(model.trainable_variables) == 3
    tables, others = sok.split_embedding_variable_from_others(model.trainable_variables)
    assert len(tables) == 1 and len(others) == 2
    ids = keys_of(*range(8))
    expected = model(ids, training=True)
    model.save(tmp_path / "model.keras")
    loaded = library.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(ids), expected)
    layer_again = next(each for each in loaded.layers if hasattr(each, "embedding_variable"))
    assert layer_again.get_config() == layer.get_config() | {"name": layer_again.name}
    assert rows_of(layer_again.var) == rows_of(layer.var)


@KERASES
def test_tf_distributed_embedding(library):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    layer = layers.classes(library).TFDistributedEmbedding(4, 3, rows)
    np.testing.assert_array_equal(layer(tf.constant([[1, 2], [3, 3]])), rows[[[1, 2], [3, 3]]])
    assert layer.embedding_weights.global_shape == (4, 3) and len(layer.trainable_variables) == 1
    assert layers.classes(library).TFDistributedEmbedding(4, 3)(inputs=tf.constant([1])).shape == (1, 3)
    with pytest.raises(ValueError, match="must be"):
        layers.classes(library).TFDistributedEmbedding(4, 3, rows.T)
    runtime.shutdown()  # 1.x's took no Init, nor do its demos without other layers call it
    assert layers.classes(library).TFDistributedEmbedding(4, 3, rows)(tf.constant([1])).shape == (1, 3)


@KERASES
def test_any_optimizer_steps_the_table_of_a_tf_distributed_embedding(library, monkeypatch):
    """It was an ordinary variable, which scripts know by its name; in a strategy, without a scope."""
    monkeypatch.setattr(tf, "keras", library)
    runtime.shutdown()
    rows, keys = np.ones((4, 3), np.float32), [1, 1, 2]
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope(), tf.device("CPU:0"):
        layer = layers.classes(library).TFDistributedEmbedding(4, 3, rows)
        optimizer = library.optimizers.Adam(0.1)
    assert "EmbeddingWeights" in layer.trainable_variables[0].name

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(keys)))
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, [layer.embedding_weights]), variables, strict=True))

    plain, other = tf.Variable(rows), tf_keras.optimizers.Adam(0.1)
    for _ in range(3):
        strategy.run(step)
        gradient = np.bincount(keys, minlength=4)[:, None].repeat(3, 1).astype(np.float32)
        other.apply_gradients([(tf.constant(gradient), plain)])
    np.testing.assert_allclose(layer.embedding_weights, plain, rtol=1e-5)


def test_in_tensorflow2():
    from sparse_operation_kit import kit_lib

    assert kit_lib.in_tensorflow2()
    with tf.Graph().as_default():
        assert not kit_lib.in_tensorflow2()


def test_get_embedding():
    options = {"max_vocabulary_size_per_gpu": 2, "embedding_vec_size": 2, "slot_num": 1, "nnz_per_slot": 1}
    layer = sok.get_embedding("mine", sok.All2AllDenseEmbedding, **options)
    assert sok.get_embedding("mine") is layer
    with pytest.raises(ValueError, match="'yours'"):
        sok.get_embedding("yours")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="'mine'"):
        sok.get_embedding("mine")
