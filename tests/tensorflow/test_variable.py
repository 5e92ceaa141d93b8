# SPDX-License-Identifier: Apache-2.0
"""Tables: their shards, initial rows, placement, and what they refuse. Several ranks are pretended here."""

import copy
import dataclasses
import pickle
from typing import Any

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
import tf_keras
from hypothesis import given
from hypothesis import strategies as st

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process pretend to be a rank of several, for everything but lookups."""

    def pretend(rank, num_ranks):
        state = dataclasses.replace(runtime.get(), rank=rank, num_ranks=num_ranks)
        monkeypatch.setattr(runtime.session, "state", state)

    return pretend


def test_is_a_variable():
    table = sok.Variable(np.ones((3, 2), np.float32), name="mine")
    assert isinstance(table, tf.Variable)
    assert table.shape == (3, 2) and table.dtype == tf.float32 and table.trainable
    assert table.name == "mine:0" and table.table_name == "mine"
    assert table.global_shape == (3, 2)
    assert (table.mode, table.target_gpu, table.num_gpus) == ("distributed", -1, 1)
    assert table.key_map(2) == 2
    table.assign_add(np.ones((3, 2), np.float32))
    np.testing.assert_array_equal(table + 1, np.full((3, 2), 3))
    frozen = sok.Variable(shape=(3, 2), trainable=False, mode="localized:0")
    assert not frozen.trainable and frozen.mode == "localized:0" and frozen.target_gpu == 0


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(3, 2),
        tf.reshape(tf.range(6.0), [3, 2]),
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
        lambda: tf.reshape(tf.range(6.0), [3, 2]),
        tf.Variable(np.arange(6, dtype=np.float32).reshape(3, 2)),
    ],
    ids=["array", "tensor", "list", "function", "variable"],
)
def test_initial_value(value):
    np.testing.assert_array_equal(sok.Variable(value).numpy(), np.arange(6).reshape(3, 2))


def test_initial_value_is_converted_when_asked():
    table = sok.Variable(np.ones((3, 2)), dtype=tf.float32)
    assert table.dtype == tf.float32


@given(rows=st.integers(1, 20), num_ranks=st.integers(1, 5), owner=st.integers(-1, 4))
def test_shards(rows, num_ranks, owner):
    owner = owner % num_ranks if owner >= 0 else -1
    whole = np.random.default_rng(rows).random((rows, 3)).astype(np.float32)
    mode = "distributed" if owner < 0 else f"localized:{owner}"
    place = reference.Placement(rows, 3, owner, num_ranks)
    original = runtime.get()
    try:
        for rank in range(num_ranks):
            runtime.session.state = dataclasses.replace(original, rank=rank, num_ranks=num_ranks)
            mine = place.keys_of(rank)
            table = sok.Variable(whole, mode=mode, name="shard")
            np.testing.assert_array_equal(table.numpy(), whole[mine])
            assert table.shape == (len(mine), 3) and table.global_shape == (rows, 3)
            keys, values = sok.export(table)
            np.testing.assert_array_equal(keys, mine)
            np.testing.assert_array_equal(values, whole[mine])
            np.testing.assert_array_equal(table.key_map(mine), [place.slot_of(key) for key in mine])
    finally:
        runtime.session.state = original


@pytest.mark.parametrize("initializer", ["normal", "uniform", "truncated_normal", "glorot_uniform", None])
def test_rows_do_not_depend_on_the_ranks(as_rank, initializer):
    whole = sok.Variable(shape=(10, 5), initializer=initializer, name="same").numpy()
    assert len(np.unique(whole)) == whole.size
    for rank in range(3):
        as_rank(rank, 3)
        shard = sok.Variable(shape=(10, 5), initializer=initializer, name="same")
        np.testing.assert_array_equal(shard.numpy(), whole[rank::3])
    other = sok.Variable(shape=(10, 5), initializer=initializer, name="other")
    assert (other.numpy() != whole[2::3]).any()


def test_seed_of_init_and_names():
    first = sok.Variable(shape=(10, 5), name="t").numpy()
    np.testing.assert_array_equal(sok.Variable(shape=(10, 5), name="t").numpy(), first)
    unnamed = [sok.Variable(shape=(10, 5)) for _ in range(2)]
    assert unnamed[0].table_name != unnamed[1].table_name
    assert (unnamed[0].numpy() != unnamed[1].numpy()).all()
    runtime.shutdown()
    sok.init(seed=1)
    assert (sok.Variable(shape=(10, 5), name="t").numpy() != first).all()


def test_named_distributions():
    rows = sok.Variable(shape=(4000, 16), initializer="normal", name="n").numpy()
    assert abs(rows.mean()) < 1e-3 and abs(rows.std() - 0.05) < 1e-3
    rows = sok.Variable(shape=(4000, 16), initializer="uniform", name="u").numpy()
    assert rows.min() >= -0.05 and rows.max() < 0.05 and abs(rows.std() - 0.1 / 12**0.5) < 1e-3
    for initializer, value in (("ones", 1), ("zeros", 0), (0.25, 0.25), ("0.5", 0.5), (3, 3)):
        np.testing.assert_array_equal(sok.Variable(shape=(3, 2), initializer=initializer), np.full((3, 2), value))


@pytest.mark.parametrize(
    "make, low, high, std",
    [
        (lambda lib: lib.initializers.RandomUniform(-1.0, 3.0), -1, 3, 4 / 12**0.5),
        (lambda lib: lib.initializers.RandomNormal(2.0, 0.5), -2, 6, 0.5),
        (lambda lib: lib.initializers.TruncatedNormal(0.0, 1.0), -2, 2, 0.8796),
        (lambda lib: lib.initializers.GlorotUniform(), -((6 / 2016) ** 0.5), (6 / 2016) ** 0.5, (2 / 2016) ** 0.5),
        (lambda lib: lib.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"), -3, 3, 0.125**0.5),
        (lambda lib: lib.initializers.HeNormal(), -1, 1, (2 / 2000) ** 0.5),
        (lambda lib: lib.initializers.Constant(0.75), 0.75, 0.75, 0),
        (lambda lib: lib.initializers.Zeros(), 0, 0, 0),
        (lambda lib: lib.initializers.Ones(), 1, 1, 0),
    ],
    ids=["uniform", "normal", "truncated", "glorot", "scaling", "he", "constant", "zeros", "ones"],
)
@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_initializer_objects(as_rank, library, make, low, high, std):
    initializer = make(library)
    whole = sok.Variable(shape=(2000, 16), initializer=initializer, name="object").numpy()
    assert whole.min() >= low and whole.max() <= high
    assert abs(whole.std() - std) <= 0.02 * std
    as_rank(1, 2)
    shard = sok.Variable(shape=(2000, 16), initializer=initializer, name="object").numpy()
    np.testing.assert_array_equal(shard, whole[1::2])


def test_initializers_of_compat_v1_and_others(as_rank):
    table = sok.Variable(shape=(30, 4), initializer=tf.compat.v1.random_uniform_initializer(5, 6, seed=3), name="v1")
    assert table.numpy().min() >= 5 and table.numpy().max() < 6
    orthogonal = keras.initializers.Orthogonal(seed=1)
    whole = np.asarray(orthogonal((8, 4)))
    np.testing.assert_array_equal(sok.Variable(shape=(8, 4), initializer=orthogonal), whole)
    as_rank(1, 2)
    np.testing.assert_array_equal(sok.Variable(shape=(8, 4), initializer=orthogonal), whole[1::2])


def test_a_seeded_object_has_rows_of_its_own_seed():
    rows = [
        sok.Variable(shape=(8, 4), initializer=keras.initializers.RandomNormal(seed=seed), name="s").numpy()
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).any()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_copies_are_tables(clone, dtype):
    table = sok.Variable(np.arange(12.0).reshape(4, 3), name="items", dtype=dtype, trainable=False)
    copied = clone(table)
    assert type(copied) is type(table) is sok.DistributedVariable and copied.dtype == dtype and not copied.trainable
    assert copied.table_name == "items" and copied.placement == table.placement
    np.testing.assert_array_equal(copied, table)
    table.assign(tf.zeros_like(table))
    np.testing.assert_array_equal(sok.all2all_dense_embedding(copied, [3])[0], [9, 10, 11])


def test_copies_with_what_holds_them():
    layer = sok.EmbeddingBagCollection({"a": (4, 2)}, features={"x": "a", "y": "a"})
    copied = copy.deepcopy({"one": layer.tables["a"], "two": layer.tables["a"]})
    assert copied["one"] is copied["two"] is not layer.tables["a"]


def test_a_pickle_of_another_rank(as_rank):
    as_rank(1, 2)
    pickled = pickle.dumps(sok.Variable(np.ones((5, 2), np.float32), name="items"))
    as_rank(0, 1)
    with pytest.raises(ValueError, match=r"'items' was pickled on rank 1 of 2, and this is rank 0 of 1"):
        pickle.loads(pickled)


REFUSED = [
    ({}, ValueError, "initial_value or shape"),
    ({"initial_value": np.ones((2, 2), np.float32), "shape": (2, 2)}, ValueError, "initial_value or shape"),
    ({"initial_value": np.ones((2, 2), np.float32), "initializer": "ones"}, ValueError, "initializer goes with shape"),
    ({"shape": (0, 4)}, ValueError, "no rows"),
    ({"initial_value": np.ones((0, 4), np.float32)}, ValueError, "no rows"),
    ({"shape": (4, 0)}, ValueError, "no elements"),
    ({"shape": (2**40, 2**30)}, ValueError, r"2\^63 bytes"),
    ({"shape": (2**62, 8)}, ValueError, r"2\^63 bytes"),
    ({"shape": (2**64, 1)}, ValueError, r"2\^63 bytes"),
    ({"shape": (4,)}, ValueError, "two dimensions"),
    ({"shape": (4, 2, 2)}, ValueError, "two dimensions"),
    ({"shape": (4, None)}, TypeError, "two integers"),
    ({"shape": "ab"}, TypeError, "two integers"),
    ({"initial_value": np.ones((2, 2), np.float64), "dtype": tf.float64}, TypeError, "bfloat16, got float64"),
    ({"initial_value": np.ones((2, 2), np.complex64)}, TypeError, "bfloat16, got complex64"),
    ({"initial_value": np.ones((2, 2), np.float32), "dtype": tf.int32}, TypeError, "bfloat16, got int32"),
    ({"shape": (2, 2), "dtype": "float64"}, TypeError, "float32 or float16 or bfloat16, got float64"),
    ({"shape": (2, 2), "mode": "localized:7"}, ValueError, r"rank 7, but there are 1 ranks: it must be in \[0, 1\)"),
    ({"shape": (2, 2), "mode": "localized:1"}, ValueError, r"\[0, 1\)"),
    ({"shape": (2, 2), "mode": "localized:-1"}, ValueError, "unknown mode"),
    ({"shape": (2, 2), "mode": "scattered"}, ValueError, "unknown mode 'scattered'"),
    ({"shape": (2, 2), "mode": 3}, TypeError, "mode must be a string"),
    ({"shape": (2, 2), "name": 5}, TypeError, "name of a table must be a string, got 5"),
    ({"shape": (2, 2), "name": "a\udcff"}, ValueError, "valid Unicode"),
    ({"shape": (2, 2), "initializer": "gauss"}, ValueError, "unknown initializer 'gauss'"),
    ({"shape": (2, 2), "initializer": [1, 2]}, TypeError, "initializer must be"),
]


@pytest.mark.parametrize("arguments, error, message", REFUSED)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        sok.Variable(**arguments)


def test_refused_before_init():
    runtime.shutdown()
    with pytest.raises(RuntimeError, match=r"sok.init\(\)"):
        sok.Variable(shape=(2, 2))
    with pytest.raises(RuntimeError, match=r"sok.init\(\)"):
        sok.rank()


def box(rows):
    return tf.clip_by_value(rows, -0.5, 0.5)


def gradient_of(table):
    with tf.GradientTape() as tape:
        ids = tf.RaggedTensor.from_row_lengths(tf.constant([0, 1], tf.int64), [1, 1])
        loss = -tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
    return tape.gradient(loss, table)


def plain(optimizer):
    return optimizer


# Fused and on rows; within OptimizerScope where nothing wraps it.
STEPPING = [
    pytest.param(wrap, make, id=f"{library.__name__}-{make.__name__}-{wrap.__name__}")
    for library in (keras, tf_keras)
    for make in (library.optimizers.SGD, library.optimizers.Lion)
    for wrap in (sok.OptimizerWrapper, sok.DistributedOptimizer, plain)
]


@pytest.mark.parametrize("wrap, make", [*STEPPING, pytest.param(plain, sok.SGD, id="own")])
def test_a_constraint_is_refused_by_steps_that_do_not_apply_it(wrap, make):
    start = np.full((2, 1), 0.4, np.float32)
    tables = [sok.Variable(start, name="free"), sok.Variable(start, name="boxed", constraint=box)]
    weight = tf.Variable([1.0])
    optimizer = wrap(make(1.0))
    pairs = [*((gradient_of(table), table) for table in tables), (tf.ones([1]), weight)]
    with sok.OptimizerScope(tables if wrap is plain and make is not sok.SGD else []):
        with pytest.raises(NotImplementedError, match=r"table 'boxed' has a constraint.*make the table without"):
            optimizer.apply_gradients(pairs)
        assert [each.numpy().ravel().tolist() for each in (*tables, weight)] == [[np.float32(0.4)] * 2] * 2 + [[1]]
        optimizer.apply_gradients(pairs[::2])
    np.testing.assert_allclose(tables[0], np.full((2, 1), 1.4), rtol=1e-6)


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("fit", [False, True], ids=["apply_gradients", "fit"])
def test_a_plain_optimizer_of_keras_applies_a_constraint(fit, library):
    table = sok.Variable(np.full((2, 1), 0.4, np.float32), constraint=box)
    optimizer = library.optimizers.SGD(1.0)
    if fit:
        base: Any = library.Model

        class Model(base):
            def __init__(self):
                super().__init__()
                self.table = table

            def call(self, ids):
                bags = tf.RaggedTensor.from_row_lengths(tf.cast(ids[:, 0], tf.int64), [1, 1])
                return sok.lookup_sparse(self.table, bags, combiners="sum")

        model = Model()
        model.compile(optimizer, lambda _, rows: -tf.reduce_sum(rows), jit_compile=False)
        model.fit(np.array([[0], [1]]), np.zeros((2, 1)), batch_size=2, verbose=0)
    else:
        optimizer.apply_gradients([(gradient_of(table), table)])
    np.testing.assert_array_equal(table, np.full((2, 1), 0.5))
