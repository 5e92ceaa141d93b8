# SPDX-License-Identifier: Apache-2.0
"""SparseOperationKit 1.x's names: layers, optimizers and files, in both Kerases. Scripts of 1.x that run with them, and
several ranks, are elsewhere (tests/docs/test_migrating.py, tests/distributed/tensorflow_legacy.py).
"""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.checkpoint import CheckpointError, sok1
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.legacy import layers, optimizers

KERASES = pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
v1 = tf.compat.v1.train

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
    for said in ("'users'", "8 rows", "max_vocabulary_size_per_gpu", "1 ranks"):
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
    for given in (
        ids,
        tf.RaggedTensor.from_sparse(ids)
        if combiner == ""
        else tf.ragged.constant([[1, 2], [], [3], [3]], dtype=tf.int64),
    ):
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
        with pytest.raises(TypeError, match="inputs are int64"):
            layer(tf.cast(ids, tf.int64))
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
def test_layers_of_one_shape_made_in_a_row_have_tables_of_their_own(library):
    first, second = (dense(library, use_hashtable=False) for _ in range(2))
    assert first.var.m_var_name != second.var.m_var_name
    assert first.var.values == (first.var,)
    sok.assign(first.var, [1], np.ones((1, 4)))
    assert not np.any(rows_of(second.var)[1] == 1.0)
    ids = keys_of(0, 1, 2, 3)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(first(ids)) + 2 * tf.reduce_sum(second(ids))
    one, two = tape.gradient(loss, [first.var, second.var])
    np.testing.assert_array_equal(2 * tf.convert_to_tensor(one), tf.convert_to_tensor(two))


@KERASES
def test_dynamic_input_and_dtypes(library):
    layer = dense(library, dynamic_input=True, dtype="float16", table_dtype=tf.bfloat16)
    assert layer(tf.constant([1, 2, 1], tf.int64)).dtype == tf.float16
    assert layer.var.dtype == tf.bfloat16 and layer(tf.constant([], tf.int64)).shape == (0, 4)
    mixed = dense(
        library, dtype=library.mixed_precision.Policy("mixed_bfloat16") if library is tf_keras else "mixed_bfloat16"
    )
    assert mixed(keys_of(1, 2, 3, 4)).dtype == tf.bfloat16 and mixed.var.dtype == tf.float32


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


def test_get_embedding():
    options = {"max_vocabulary_size_per_gpu": 2, "embedding_vec_size": 2, "slot_num": 1, "nnz_per_slot": 1}
    layer = sok.get_embedding("mine", sok.All2AllDenseEmbedding, **options)
    assert sok.get_embedding("mine") is layer
    with pytest.raises(ValueError, match="'yours'"):
        sok.get_embedding("yours")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="'mine'"):
        sok.get_embedding("mine")


# --- optimizers ------------------------------------------------------------------------------------------------------


def optimizers_of_frameworks():
    for family, module in (
        ("keras", keras.optimizers),
        ("tf_keras", tf_keras.optimizers),
        ("legacy", tf_keras.optimizers.legacy),
    ):
        for name in ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adadelta", "Adagrad"):
            cls = getattr(module, name, None)
            if cls is None or (family, name) == ("legacy", "Nadam"):
                continue
            yield pytest.param(lambda cls=cls: cls(learning_rate=0.1), id=f"{family}-{name}")
            if name in ("SGD", "RMSprop"):
                yield pytest.param(lambda cls=cls: cls(learning_rate=0.1, momentum=0.9), id=f"{family}-{name}-momentum")
    for name in ("GradientDescent", "Adam", "RMSProp", "Adadelta", "Adagrad", "Ftrl"):
        yield pytest.param(lambda cls=getattr(v1, f"{name}Optimizer"): cls(0.1), id=f"v1-{name}")
    yield pytest.param(lambda: v1.MomentumOptimizer(0.1, 0.9), id="v1-Momentum")


def gradient_of(keys, values):
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(keys, tf.int64), tf.constant([6, 2], tf.int64))


STEPS = ([0, 1, 2], [3], [2, 1], [0])


@pytest.mark.parametrize("make", list(optimizers_of_frameworks()))
def test_scope_steps_a_table_as_an_ordinary_variable(make):
    """Rows that a step does not name included, and a dense variable of the same call."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(6, 2)).astype(np.float32)
    one, other = make(), make()
    in_keras = type(one).__module__.startswith("keras.")
    table, again, weight = sok.Variable(rows), sok.Variable(rows), tf.Variable([1.0, 2.0])
    plain, plain_weight = (keras.Variable if in_keras else tf.Variable)(rows), tf.Variable([1.0, 2.0])
    if in_keras:
        weight, plain_weight = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    options = {} if isinstance(one, v1.Optimizer) else {"experimental_aggregate_gradients": False}
    third = make()

    @tf.function(reduce_retracing=True)
    def step(keys, values):
        with sok.OptimizerScope([again]):
            third.apply_gradients([(tf.IndexedSlices(values, keys, tf.constant([6, 2], tf.int64)), again)], **options)

    for keys in STEPS:
        values = rng.normal(size=(len(keys), 2)).astype(np.float32)
        slope = tf.constant(values.sum(0))
        # The row of a key that comes twice is summed first.
        twice = gradient_of([*keys, keys[0]], [*values[:1] / 2, *values[1:], values[0] / 2])
        with sok.OptimizerScope([table]):
            one.apply_gradients([(twice, table), (slope, weight)], **options)
        other.apply_gradients([(gradient_of(keys, values), plain), (slope, plain_weight)])
        expected = tf.convert_to_tensor(plain)
        np.testing.assert_allclose(table, expected, rtol=1e-5, atol=3e-6)
        if isinstance(third, tf_keras.optimizers.Nadam):
            continue  # in a tf.function tables do not step as Keras has it, by OptimizerWrapper neither
        step(tf.constant(keys, tf.int64), tf.constant(values))
        np.testing.assert_allclose(again, expected, rtol=1e-5, atol=3e-6)
        np.testing.assert_allclose(tf.convert_to_tensor(weight), tf.convert_to_tensor(plain_weight), rtol=1e-6)


def test_touched_rows_alone_where_asked_for():
    rows = np.ones((6, 2), np.float32)
    for make in (
        lambda: (keras.optimizers.Adam(0.1), lambda t: sok.OptimizerScope([t], update="touched")),
        lambda: (optimizers.PluginAdam(0.1, update="touched"), None),
        lambda: (optimizers.LazyAdamOptimizer(0.1), None),
    ):
        table = sok.Variable(rows)
        optimizer, scope = make()
        for keys in ([0], [1]):
            before = table.numpy()
            if scope is None:
                optimizer.apply_gradients([(gradient_of(keys, [[1.0, 1.0]]), table)])
            else:
                with scope(table):
                    optimizer.apply_gradients([(gradient_of(keys, [[1.0, 1.0]]), table)])
            assert np.flatnonzero((table.numpy() != before).any(1)).tolist() == keys
    with pytest.raises(ValueError, match="update must be"):
        sok.OptimizerScope([], update="some")


def test_lazy_adam_of_an_ordinary_variable():
    variable, table = tf.Variable(np.ones((6, 2), np.float32)), sok.Variable(np.ones((6, 2), np.float32))
    one, other = optimizers.LazyAdamOptimizer(0.1), optimizers.LazyAdamOptimizer(0.1)
    for keys in STEPS:
        gradient = gradient_of(keys, np.full((len(keys), 2), 0.5))
        one.apply_gradients([(gradient, variable)])
        other.apply_gradients([(gradient, table)])
        np.testing.assert_allclose(variable, table, rtol=1e-5)


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("name", ["Adam", "PluginAdam"])
def test_adam_moves_every_row(name, use_hashtable, tmp_path):
    layer = dense(rows=8, dimension=2, use_hashtable=use_hashtable)
    rows = np.random.default_rng(2).normal(size=(8, 2)).astype(np.float32)
    sok.assign(layer.var, np.arange(8), rows)
    plain, weight, plain_weight = keras.Variable(rows), keras.Variable([1.0]), keras.Variable([1.0])
    one, other = getattr(optimizers, name)(learning_rate=0.1), keras.optimizers.Adam(0.1)
    assert isinstance(one, keras.optimizers.Adam)
    for keys in ([0, 1, 2, 3], [0, 0, 1, 1], [4, 5, 6, 7]):
        ids = keys_of(*keys)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        gradient = tape.gradient(loss, layer.var)
        one.apply_gradients(
            [(gradient, layer.trainable_variables[0]), (tf.constant([1.0]), weight)],
            experimental_aggregate_gradients=False,
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(plain.value, ids) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, plain.value))
        other.apply_gradients([(gradient, plain), (tf.constant([1.0]), plain_weight)])
    keys, moved = sok.export(layer.var)
    np.testing.assert_allclose(moved, plain.numpy()[keys.numpy()], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight.numpy(), plain_weight.numpy(), rtol=1e-6)
    sok.dump(tmp_path / "dump", layer.var, one)
    moments = one.sok_slots(layer.var)["m"].numpy()
    again = getattr(optimizers, name)(learning_rate=0.1)
    sok.load(tmp_path / "dump", layer.var, again)
    np.testing.assert_array_equal(again.sok_slots(layer.var)["m"], moments)
    assert int(again.iterations) == 3


def test_arguments_of_adam():
    assert float(optimizers.PluginAdam(0.1, 0.8, 0.9, 1e-3, "mine").beta_1) == pytest.approx(0.8)
    assert float(optimizers.PluginAdam(lr=0.25).learning_rate) == 0.25
    assert optimizers.PluginAdam().name == "Plugin_Adam"
    copy = optimizers.Adam.from_config(optimizers.Adam(0.5, update="touched").get_config())
    assert copy.get_config()["update"] == "touched"


@KERASES
def test_loss_scaling(library, monkeypatch):
    """Steps with a gradient that is not finite are skipped, by tables too."""
    monkeypatch.setattr(tf, "keras", library)
    for inner in (optimizers.PluginAdam, library.optimizers.Adam):
        table, weight = (
            sok.Variable(np.ones((6, 2), np.float32)),
            library.Variable([1.0]) if library is keras else tf.Variable([1.0]),
        )
        plain = sok.Variable(np.ones((6, 2), np.float32))
        scaled, unscaled = optimizers.LossScaleOptimizer(inner(0.1)), optimizers.PluginAdam(0.1)
        factor = 2.0**15 if library is keras else 1.0  # Keras 3 divides by its scale itself
        for value in (0.5, float("inf"), 2.0):
            pairs = [
                (gradient_of([0, 2], np.full((2, 2), value * factor)), table),
                (tf.constant([value * factor]), weight),
            ]
            with sok.OptimizerScope([table] if inner is library.optimizers.Adam else []):
                scaled.apply_gradients(pairs, experimental_aggregate_gradients=False)
            if np.isfinite(value):
                unscaled.apply_gradients([(gradient_of([0, 2], np.full((2, 2), value)), plain)])
            elif library is keras:
                factor /= 2
            else:
                unscaled.iterations.assign_add(1)
        np.testing.assert_allclose(table, plain, rtol=1e-5)


def test_scope_leaves_nothing_behind():
    table, other = sok.Variable(np.ones((6, 2), np.float32)), sok.Variable(np.ones((6, 2), np.float32))
    optimizer = keras.optimizers.SGD(1.0)
    with pytest.raises(ZeroDivisionError), sok.OptimizerScope([table]):
        raise ZeroDivisionError
    from sparse_operation_kit.tensorflow.legacy import scope

    assert scope._open == {}
    with pytest.raises(TypeError):
        optimizer.apply_gradients([(tf.ones([2]), keras.Variable([1.0, 1.0]))], experimental_aggregate_gradients=False)
    with sok.OptimizerScope([table]):
        with sok.OptimizerScope((table, other)):
            pass
        with pytest.raises(ValueError, match="shape"):
            optimizer.apply_gradients([(tf.ones([2, 2]), table)])
        optimizer.apply_gradients([(gradient_of([1, 1], np.ones((2, 2))), table)])
    assert scope._open == {} and table.numpy()[:3].tolist() == [[1, 1], [-1, -1], [1, 1]]
    with pytest.raises(RuntimeError, match="list or tuple"):
        sok.OptimizerScope(iter([table]))
    with pytest.raises(ValueError, match="list or tuple"):
        sok.split_embedding_variable_from_others({1})


def test_scopes_of_threads():
    tables = [sok.Variable(np.zeros((6, 2), np.float32)) for _ in range(4)]
    optimizers_ = [keras.optimizers.SGD(1.0) for _ in tables]

    def run(table, optimizer):
        for _ in range(20):
            with sok.OptimizerScope([table]):
                optimizer.apply_gradients([(gradient_of([1], [[1.0, 1.0]]), table)])

    threads = [threading.Thread(target=run, args=pair) for pair in zip(tables, optimizers_, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for table in tables:
        assert table.numpy()[1].tolist() == [-20, -20]


@pytest.mark.parametrize("scaling", [False, True])
def test_mirrored_strategy_of_one_replica(scaling, monkeypatch):
    monkeypatch.setattr(tf, "keras", tf_keras)
    runtime.shutdown()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope(), tf.device("CPU:0"):
        sok.Init(global_batch_size=1)
        layer = dense(tf_keras, dimension=2, use_hashtable=False)
        optimizer = tf_keras.optimizers.Adam(0.1)
        if scaling:
            optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
    rows = np.ones((8, 2), np.float32)
    sok.assign(layer.var, np.arange(8), rows)
    plain, other = tf.Variable(rows), tf_keras.optimizers.Adam(0.1)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        (gradient,) = tape.gradient(loss, [layer.var])
        with sok.OptimizerScope([layer.var]):
            optimizer.apply_gradients([(gradient, layer.var)], experimental_aggregate_gradients=False)

    for keys in ([0, 1, 2, 3], [0, 0, 1, 1]):
        strategy.run(step, args=(keys_of(*keys),))
        gradient = np.bincount(keys, minlength=8)[:, None].repeat(2, 1).astype(np.float32)
        other.apply_gradients([(tf.constant(gradient), plain)])
    np.testing.assert_allclose(layer.var, plain, rtol=1e-5)


# --- Saver -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_dtype", ["int64", "uint32", "int32"])
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_files(use_hashtable, key_dtype, tmp_path):
    layer = dense(use_hashtable=use_hashtable, key_dtype=key_dtype, table_name="users")
    rows = np.random.default_rng(3).normal(size=(8, 4)).astype(np.float32)
    saver = sok.Saver()
    assert saver.load_embedding_values(layer.var, [rows[:3], rows[3:5]]).numpy() == b"OK"
    held = rows_of(layer.var)
    assert len(held) == (5 if use_hashtable else 8)
    np.testing.assert_array_equal([held[key] for key in range(5)], rows[:5])
    assert saver.dump_to_file(layer.var, tmp_path).numpy() == b"OK"
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
        assert saver.restore_from_file(again.var, str(tmp_path)).numpy() == b"OK"
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
    saver = sok.Saver()

    def refuses(message):
        with pytest.raises(CheckpointError, match=message):
            saver.restore_from_file(layer.var, tmp_path)
        assert rows_of(layer.var) == before

    refuses("is missing")
    for keys, values, message in (
        (np.zeros(0, np.int64), [], "is empty"),
        (np.arange(3), np.ones(13), "8 .int64. or 4"),
        (np.arange(3, dtype=np.int16), np.ones(12), "8 .int64. or 4"),
        (np.array([1, 2, 1]), np.ones(12), "a key twice"),
        *([] if use_hashtable else [(np.array([1, 2, 8]), np.ones(12), "keys from 1 to 8")]),
        *([(np.arange(3, 9), np.ones(24), "would hold 9 keys")] if use_hashtable else []),
    ):
        files(tmp_path, keys, values)
        refuses(message)
    with pytest.raises(CheckpointError, match="cannot write"):
        saver.dump_to_file(layer.var, tmp_path / "missing")
    with pytest.raises(ValueError, match="has 8 rows"):
        saver.load_embedding_values(layer.var, np.ones((9, 4)))
    with pytest.raises(ValueError, match="rows of 4"):
        saver.load_embedding_values(layer.var, np.ones((2, 3)))
    with pytest.raises(TypeError, match="must be that of"):
        saver.dump_to_file(sok.Variable(shape=(2, 2)), tmp_path)


def test_files_of_many_pieces(tmp_path, monkeypatch):
    from sparse_operation_kit.tensorflow.legacy import saver

    monkeypatch.setattr(saver, "_ROWS_AT_A_TIME", 3)
    layer, again = (
        dense(rows=17, use_hashtable=False, table_name="users", embedding_initializer=i) for i in ("normal", "zeros")
    )
    sok.Saver().dump_to_file(layer.var, tmp_path)
    sok.Saver().restore_from_file(again.var, tmp_path)
    np.testing.assert_array_equal(again.var, layer.var)


def test_guessed_dimension(tmp_path):
    files(tmp_path, np.arange(4), np.ones(12))
    assert sok1.names(str(tmp_path)) == ["users"]
    found = sok1.Files(str(tmp_path), "users")
    assert (found.key_dtype, found.dimension, found.rows) == ("int64", 3, 4)
    files(tmp_path, np.array([2**40 + 7, -5]), np.ones(8))  # four uint32 keys of 2 elements, or two int64 keys of 4
    with pytest.raises(CheckpointError, match="a dimension, 2 or 4"):
        sok1.Files(str(tmp_path), "users")
    assert sok1.Files(str(tmp_path), "users", 2).key_dtype == "uint32"


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
            with pytest.raises(tf.errors.InvalidArgumentError, match="8 .int64."):
                session.run(restore)
