# SPDX-License-Identifier: Apache-2.0
"""dist_model_parallel in one process: the layers of both Kerases, embedding_lookup, IntegerLookup, errors."""

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow_harness import finished

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp
from sparse_operation_kit.tensorflow.dist_model_parallel.inputs import within

TABLE = np.array([[0.0, 3.0], [1.0, 5.0], [7.0, 2.0]], np.float32)


@pytest.fixture(params=[keras, tf_keras], ids=["keras", "tf_keras"])
def kit(request):
    """(the Keras, the layers of it)"""
    return request.param, dmp.layers_of(request.param)


def embedding(layers, combiner=None, **options):
    layer = layers.Embedding(3, 2, combiner=combiner, **options)
    layer.set_weights([TABLE])
    return layer


# --- Embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float32"])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3), (2, 2, 3)])
def test_dense_ids(kit, shape, dtype):
    ids = np.arange(np.prod(shape)).reshape(shape) % 3
    given = tf.constant(ids, dtype)
    np.testing.assert_array_equal(embedding(kit[1])(given), TABLE[ids])
    if len(shape) > 1:
        np.testing.assert_allclose(embedding(kit[1], "sum")(given), TABLE[ids].sum(-2))
        np.testing.assert_allclose(embedding(kit[1], "mean")(given), TABLE[ids].mean(-2))


def test_ragged_and_sparse_ids(kit):
    """As many ids as rows, an empty row among them: bags stay bags."""
    ragged = tf.ragged.constant([[1, 2], [], [0]], dtype=tf.int32)  # row splits are int64
    for ids in (ragged, ragged.to_sparse(), ragged.with_values(tf.cast(ragged.values, tf.int64))):
        np.testing.assert_array_equal(embedding(kit[1], "sum")(ids), [[8, 7], [0, 0], [0, 3]])
        np.testing.assert_array_equal(embedding(kit[1], "mean")(ids), [[4, 3.5], [0, 0], [0, 3]])
    output = embedding(kit[1])(ragged)
    assert output.to_list() == [[[1, 5], [7, 2]], [], [[0, 3]]]
    with pytest.raises(ValueError, match="sparse ids take a combiner"):
        embedding(kit[1])(ragged.to_sparse())
    with pytest.raises(ValueError, match="Ragged input should be 2D"):
        embedding(kit[1], "sum")(tf.ragged.constant([[[1], [2]], []], dtype=tf.int64))


def test_what_an_embedding_refuses(kit):
    for sizes in ((0, 2), (3, -1)):
        with pytest.raises(ValueError, match="should be positive"):
            kit[1].Embedding(*sizes)
    for combiner in ("sqrtn", "max"):
        with pytest.raises(ValueError, match="combiner must be"):
            kit[1].Embedding(3, 2, combiner=combiner)
    with pytest.raises(ValueError, match="1D input with combiner is ambiguous"):
        embedding(kit[1], "sum")(tf.constant([1]))
    for ids in (tf.constant([3]), tf.constant([[-1]], tf.int64), tf.ragged.constant([[1], [3]])):
        with pytest.raises(tf.errors.InvalidArgumentError):
            finished(embedding(kit[1]), ids)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_the_core_looks_at_ids_where_there_is_a_gpu(kit, compiled, monkeypatch):
    """What it does there, here too: TensorFlow would give zeros for an id outside."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["one"])
    layer = embedding(kit[1], "sum")
    call = tf.function(lambda ids: layer(ids), reduce_retracing=True) if compiled else layer
    ragged = tf.ragged.constant([[1, 2], [], [0]], dtype=tf.int32)
    for ids in (ragged, ragged.to_sparse(), tf.constant([[1, 2], [0, 0]], tf.int64), tf.zeros([2, 0], tf.int64)):
        wanted = [TABLE[bag].sum(0) for bag in (ragged.to_list() if ids.shape[0] == 3 else ids.numpy().tolist())]
        np.testing.assert_array_equal(finished(call, ids), wanted)
    for ids in (tf.constant([[1, 3]]), tf.constant([[-1]], tf.int64), tf.ragged.constant([[1], [3]])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"key (3|-1) is outside \[0, 3\)"):
            finished(call, ids)


def test_configs(kit):
    keras_module, layers = kit
    layer = layers.Embedding(3, 2, "ones", combiner="sum", weights=[TABLE], name="mine")
    config = layer.get_config()
    assert {k: config[k] for k in ("input_dim", "output_dim", "combiner", "use_custom_kernel", "name")} == {
        "input_dim": 3,
        "output_dim": 2,
        "combiner": "sum",
        "use_custom_kernel": True,
        "name": "mine",
    }
    layer.build()
    np.testing.assert_array_equal(np.asarray(layer.get_weights()[0]), TABLE)
    copy = layers.Embedding.from_config(config)
    copy.build(None)
    np.testing.assert_array_equal(np.asarray(copy.get_weights()[0]), np.ones((3, 2)))
    with pytest.warns(UserWarning, match="mask_zero"):
        layers.Embedding.from_config(keras_module.layers.Embedding(3, 2, mask_zero=True).get_config())
    for other in (keras, tf_keras):  # of the other Keras too
        made = layers.Embedding.from_config(other.layers.Embedding(3, 2, embeddings_initializer="ones").get_config())
        made.build()
        assert (np.asarray(made.get_weights()[0]) == 1).all()


def test_models(kit, tmp_path):
    keras_module, layers = kit
    inputs = keras_module.Input((2,), dtype="int64")
    output = layers.Embedding(3, 2, combiner="mean", weights=[TABLE])(inputs)
    assert tuple(output.shape) == (None, 2)
    model = keras_module.Model(inputs, output)
    np.testing.assert_array_equal(model.predict(np.array([[1, 2]]), verbose=0), [[4, 3.5]])
    model.save(tmp_path / "model.keras")
    loaded = keras_module.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(np.array([[0, 2]]), verbose=0), [[3.5, 2.5]])


def test_concat_one_hot(kit):
    layer = kit[1].ConcatOneHotEmbedding([3, 5, 7], 4)
    table = np.arange(60, dtype=np.float32).reshape(15, 4)
    layer.set_weights([table])
    for dtype in ("int32", "int64"):
        np.testing.assert_array_equal(
            layer(tf.constant([[1, 2, 3], [2, 4, 6]], dtype)), table[[[1, 5, 11], [2, 7, 14]]]
        )
    with pytest.raises(ValueError, match=r"\[n, 3\]"):
        layer(tf.constant([[1, 2]]))


# --- embedding_lookup -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_embedding_lookup(combiner):
    rng = np.random.default_rng(0)
    table = tf.Variable(rng.normal(size=(9, 3)).astype(np.float32))
    ragged = tf.ragged.constant([[3, 1, 3], [], [8], [1, 0]], dtype=tf.int64)
    upstream = rng.normal(size=(4, 3))
    wanted, gradient = np.zeros((4, 3)), np.zeros((9, 3))
    for i, bag in enumerate(ragged.to_list()):
        for key in bag:
            factor = 1 / len(bag) if combiner == "mean" else 1
            wanted[i] += factor * table.numpy()[key]
            gradient[key] += factor * upstream[i]
    unsorted = ragged.to_sparse()
    unsorted = tf.SparseTensor(unsorted.indices[::-1], unsorted.values[::-1], unsorted.dense_shape)
    for ids in (ragged, unsorted):
        with tf.GradientTape() as tape:
            output = dmp.embedding_lookup(table, ids, combiner)
            loss = tf.reduce_sum(output * upstream.astype(np.float32))
        found = tape.gradient(loss, table)
        np.testing.assert_allclose(output, wanted, rtol=1e-5)
        assert isinstance(found, tf.IndexedSlices)
        np.testing.assert_array_equal(found.indices, [0, 1, 3, 8])
        np.testing.assert_allclose(tf.convert_to_tensor(found), gradient, rtol=1e-5, atol=1e-6)
    dense = rng.integers(0, 9, (5, 207))
    pool = tf.reduce_sum if combiner == "sum" else tf.reduce_mean
    np.testing.assert_array_equal(
        dmp.embedding_lookup(table, dense, combiner), pool(tf.nn.embedding_lookup(table, dense), 1)
    )
    assert (dmp.embedding_lookup(table, np.zeros((2, 0), np.int64), combiner).numpy() == 0).all()


@pytest.mark.parametrize("num_bags", [0, 2])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_embedding_lookup_of_no_ids(combiner, num_bags):
    """Bags that are all empty, and no bags."""
    table = tf.Variable(tf.ones([9, 3]))
    ragged = tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), tf.zeros([num_bags], tf.int64))

    def step(ids):
        with tf.GradientTape() as tape:
            output = dmp.embedding_lookup(table, ids, combiner)
        return output, tape.gradient(output, table)

    for ids in (ragged, ragged.to_sparse()):
        for run in (step, tf.function(step)):
            output, gradient = run(ids)
            np.testing.assert_array_equal(output, np.zeros((num_bags, 3)))
            assert gradient.values.shape == (0, 3)


def test_embedding_lookup_refuses():
    with pytest.raises(TypeError, match="param must be Tensor"):
        dmp.embedding_lookup(TABLE, [[1]])
    for ids in (tf.constant([1]), tf.constant([[[1]]])):
        with pytest.raises(ValueError, match="Only support 2D input"):
            dmp.embedding_lookup(tf.constant(TABLE), ids)


# --- IntegerLookup ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_gpu", [True, False])
def test_integer_lookup_numbers_keys_as_they_come(kit, use_gpu):
    layer = kit[1].IntegerLookup(4, use_gpu=use_gpu)
    keys = [-1, 2**63 - 1, -(2**63), -1, 0]
    assert layer(tf.constant(keys, tf.int64)).numpy().tolist() == [1, 2, 3, 1, 4]
    assert layer(tf.constant([[7, 0], [-1, 8]])).numpy().tolist() == [[0, 4], [1, 0]]
    assert layer.get_vocabulary() == [-1, -1, 2**63 - 1, -(2**63), 0]
    assert np.asarray(layer.count).tolist() == [2, 3, 1, 1, 2]


def test_integer_lookup_in_functions(kit):
    """Traced twice, it is still full when it is full; evaluation learns nothing."""
    layer = kit[1].IntegerLookup(3)
    call = tf.function(lambda keys, training: layer(keys, training=training))
    assert call(tf.constant([[5, 6]], tf.int64), False).numpy().tolist() == [[0, 0]]
    assert call(tf.constant([[5, 6]], tf.int64), True).numpy().tolist() == [[1, 2]]
    assert call(tf.constant([9, 8, 5], tf.int64), True).numpy().tolist() == [3, 0, 1]
    assert call(tf.constant([8, 9], tf.int32), tf.constant(True)).numpy().tolist() == [0, 3]
    assert layer.get_vocabulary() == [-1, 5, 6, 9]


def test_integer_lookup_is_saved(kit, tmp_path):
    rng = np.random.default_rng(1)
    layer, copy = kit[1].IntegerLookup(50), kit[1].IntegerLookup(50)
    keys = rng.integers(-1000, 1000, (6, 20))
    numbers: dict[int, int] = {}
    for batch in keys:
        wanted = [numbers.setdefault(key, len(numbers) + 1 if len(numbers) < 50 else 0) for key in batch.tolist()]
        numbers = {key: number for key, number in numbers.items() if number}
        assert layer(tf.constant(batch)).numpy().tolist() == wanted
    copy.set_weights(layer.get_weights())
    assert copy(tf.constant(keys)).numpy().tolist() == layer(tf.constant(keys)).numpy().tolist()
    with pytest.raises(ValueError, match="positive"):
        kit[1].IntegerLookup(0)
    with pytest.raises(TypeError, match="integers"):
        layer(tf.constant([1.0]))


# --- DistributedEmbedding ---------------------------------------------------------------------------------------------


def test_distributed_embedding_alone(kit):
    layers = kit[1]
    shapes = [(20, 4), (15, 4), (10, 6), (5, 10), (10, 4)]
    layer = layers.DistributedEmbedding(
        [other.layers.Embedding(*s) for s, other in zip(shapes, [keras, tf_keras] * 3, strict=False)], name="alone"
    )
    assert not layer.built and (layer.world_size, layer.rank) == (1, 0)
    outputs = layer([tf.constant([1, 2, 3])] * 5)
    assert [tuple(output.shape) for output in outputs] == [(3, width) for _, width in shapes]
    assert all(hasattr(weight, "de_local") for weight in layer.weights)
    for output, table in zip(outputs, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(output, table[1:4])
    names = [weight.name for weight in layer.weights]
    assert len(set(names)) == len(names)


def test_ids_are_checked_in_graphs_of_v1():
    Own = own_class(tf_keras)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ids = tf.compat.v1.placeholder(tf.int64)  # of any rank
        held, message = within(ids, 5, "alike")
        layer = dmp.DistributedEmbedding([Own(5, 2), Own(6, 2), tf_keras.layers.Embedding(7, 2)])
        rows = layer([tf.constant([1, 4])] * 3)
        session.run(tf.compat.v1.global_variables_initializer())
        assert [each.shape for each in session.run(rows)] == [(2, 2)] * 3
        assert session.run([tf.reduce_max(held), message], {ids: [[4], [0]]}) == [4, b""]
        told = session.run([tf.reduce_max(held), message], {ids: [[4], [5]]})
        assert told == [4, b"table 'alike': key 5 is outside [0, 5)"]


def test_an_id_outside_a_table_of_a_variable(kit):
    """It is an error that names the table, also where the row would be another table's."""
    layer = kit[1].DistributedEmbedding([kit[1].Embedding(4, 2, combiner="sum") for _ in range(3)], name="alike")
    layer.build()
    assert [tuple(weight.shape) for weight in layer.weights] == [(12, 2)]
    for call in (layer, tf.function(lambda inputs: layer(inputs))):
        for key in (4, 7, -1, -4):
            given = [tf.constant([[1]]), tf.constant([[key]]), tf.constant([[1]])]
            with pytest.raises(tf.errors.InvalidArgumentError, match=rf"'alike/1': key {key} is outside \[0, 4\)"):
                finished(call, given)


def test_functional_models(kit):
    keras_module, layers = kit
    inputs = [keras_module.Input((2,), dtype="int64"), keras_module.Input((), dtype="int32")]
    layer = layers.DistributedEmbedding([layers.Embedding(9, 4, combiner="sum"), keras_module.layers.Embedding(7, 3)])
    output = keras_module.layers.Concatenate()(layer(inputs))
    model = keras_module.Model(inputs, output)
    assert tuple(model.output.shape) == (None, 7)
    model.compile(dmp.DistributedOptimizer(keras_module.optimizers.Adagrad(0.1)), "mse")
    data = [np.array([[1, 2]] * 4), np.array([3] * 4)]
    before = layer.get_weights()
    model.fit(data, np.ones((4, 7)), verbose=0)
    changed = [(old != new).any(1) for old, new in zip(before, layer.get_weights(), strict=True)]
    assert [np.flatnonzero(each).tolist() for each in changed] == [[1, 2], [3]]
    copy = layers.DistributedEmbedding.from_config(layer.get_config())
    copy.build()
    copy.set_weights(layer.get_weights())
    for one, other in zip(copy(data), layer(data), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_config_has_of_embeddings_stays(kit, monkeypatch):
    """Keras's files tell objects apart by id(): one that is freed leaves its number to the next."""
    keras_module, layers = kit
    layer = layers.DistributedEmbedding([layers.Embedding(8, width) for width in (2, 3)])
    serialized = []
    serialize = keras_module.layers.serialize
    monkeypatch.setattr(
        keras_module.layers, "serialize", lambda each: serialized.append(weakref.ref(each)) or serialize(each)
    )
    configs = [layer.get_config() for _ in range(2)]
    gc.collect()
    assert len(serialized) == 4 and all(each() is not None for each in serialized)
    assert configs[0] == configs[1]


def test_a_frozen_zero_or_regularized_table_stays_its_own(kit):
    layers = kit[1]
    tables = [
        layers.Embedding(4, 2, "ones", combiner="sum"),
        layers.Embedding(4, 2, "zeros", combiner="sum"),
        layers.Embedding(4, 2, combiner="sum", trainable=False),
        layers.Embedding(4, 2, "ones", combiner="sum", embeddings_regularizer="l2"),
        layers.Embedding(4, 2, combiner="sum", dtype="float16"),
    ]
    layer = layers.DistributedEmbedding(tables)
    layer([tf.constant([[0]])] * 5)
    assert [tuple(w.shape) for w in layer.weights].count((8, 2)) == 1
    assert len(layer.trainable_weights) == 3 and len(layer.weights) == 4
    ones, zeros, _, _, half = layer.get_weights()
    assert (ones == 1).all() and (zeros == 0).all() and half.dtype == np.float16
    assert [float(loss) for loss in layer.losses] == [pytest.approx(0.01 * 8)]


def test_distributed_embedding_refuses(kit):
    layers = kit[1]
    tables = [layers.Embedding(4, 2, combiner="sum")] * 2
    with pytest.raises(ValueError, match="Unsupported shard strategy best"):
        layers.DistributedEmbedding(tables, strategy="best")
    with pytest.raises(ValueError, match=r"tables \[1\] have an embeddings_constraint"):
        layers.DistributedEmbedding([tables[0], layers.Embedding(4, 2, embeddings_constraint="non_neg")])
    layer = layers.DistributedEmbedding(tables)
    with pytest.raises(ValueError, match=r"expecting 0 weights.*build\(\)"):
        layer.set_weights([np.zeros((4, 2))] * 2)
    with pytest.raises(ValueError, match="list of inputs"):
        layer(tf.constant([[1]]))
    with pytest.raises(ValueError, match="Expect"):
        layer([tf.constant([[1]])])
    with pytest.raises(ValueError, match="same batchsize"):
        layer([tf.constant([[1]]), tf.constant([[1], [2]])])
    with pytest.raises(ValueError, match="at least 1"):
        layer.set_weights([np.zeros((4, 2))] * 2, chunk=0)


def test_names():
    assert sok.dist_model_parallel is dmp
    assert all(getattr(dmp, name) is not None for name in dmp.__all__)


def test_initialises_itself():
    from sparse_operation_kit.tensorflow import runtime

    runtime.shutdown()
    dmp.layers_of(tf_keras).DistributedEmbedding([tf_keras.layers.Embedding(4, 2)])
    assert sok.num_ranks() == 1


def test_training_helpers_refuse():
    with pytest.raises(TypeError, match="sparse_as_dense"):
        dmp.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=True)
    with pytest.raises(TypeError, match="optimizers of Keras"):
        dmp.DistributedOptimizer(3)
    optimizer = tf_keras.optimizers.Adam(0.1)
    made = dmp.DistributedOptimizer(optimizer)
    config = made.get_config()
    again = type(made).from_config(config)
    assert type(again) is type(made) and again.get_config() == config
    assert config.pop("sok_distributed")["divide_tables"] is True
    assert made is not optimizer and config == optimizer.get_config()


def own_class(library):
    base: Any = library.layers.Layer

    class Own(base):
        def __init__(self, input_dim, output_dim, **options):
            super().__init__(**options)
            self.input_dim, self.output_dim = input_dim, output_dim

        def build(self, shape):
            self.table = self.add_weight(name="table", shape=(self.input_dim, self.output_dim), initializer="ones")

        def call(self, ids):
            return tf.gather(self.table, ids)

        def get_config(self):
            return {**super().get_config(), "input_dim": self.input_dim, "output_dim": self.output_dim}

    return Own


def test_ids_of_a_class_that_looks_up_by_itself_stay_in_their_table():
    Own = own_class(tf.keras)
    layer = dmp.DistributedEmbedding([Own(5, 2), Own(6, 2)])  # one layer, of 11 rows
    good = tf.constant([0, 4])
    assert [output.shape.as_list() for output in layer([good, good])] == [[2, 2], [2, 2]]
    for step in (lambda a, b: layer([a, b]), tf.function(lambda a, b: layer([a, b]))):
        for bad in ([0, 5], [-1, 0]):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"/0': key (5|-1) is outside \[0, 5\)"):
                step(tf.constant(bad), good)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"/1': key -1 is outside \[0, 6\)"):
            step(good, tf.constant([-1, 0]))
