# SPDX-License-Identifier: Apache-2.0
"""Where dynamic tables end: capacity, eviction, wrong lookups beside them, columns of optimizers that are gone."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_harness import finished

import sparse_operation_kit.tensorflow as sok

ROWS, DIMENSION = 200, 6


def pair(**options):
    """A dynamic table and a static one of the same name."""
    dynamic = sok.DynamicVariable(DIMENSION, "normal", name="items", **options)
    return dynamic, sok.Variable(shape=(ROWS, DIMENSION), initializer="normal", name="items")


def ragged(rows):
    return tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)


def held(table):
    """{key: row} of a table."""
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), rows.numpy(), strict=True))


@pytest.mark.parametrize("way", ["lookup", "dense", "assign"])
def test_capacity(way):
    """What does not fit is an error, and leaves all as it was."""
    table = sok.DynamicVariable(2, "uniform", name="small", max_capacity=4, evict_strategy=None)
    sok.all2all_dense_embedding(table, tf.constant([1, 2, 3]))
    before = held(table)
    calls = {
        "lookup": lambda keys: sok.lookup_sparse(table, ragged([keys])),
        "dense": lambda keys: sok.all2all_dense_embedding(table, tf.constant(keys)),
        "assign": lambda keys: sok.assign(table, keys, tf.ones([len(keys), 2])),
    }
    with pytest.raises(tf.errors.ResourceExhaustedError, match="'small'"):
        finished(calls[way], [3, 10, 11])
    after = held(table)
    assert before.keys() == after.keys()
    np.testing.assert_array_equal(list(before.values()), list(after.values()))
    calls[way]([3, 10])
    assert table.size == 4


@pytest.mark.parametrize("wrong", ["key", "bags", "descend", "end early", "begin late"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_wrong_lookup_beside_it_inserts_nothing(wrong, compiled):
    table, static = pair()
    splits = {"descend": [0, 4, 3], "end early": [0, 1, 2], "begin late": [1, 2, 3]}.get(wrong, [0, 2, 3])
    other = {"key": ([5, ROWS, 7], [0, 2, 3]), "bags": ([5, 6, 7], [0, 3])}.get(wrong, ([5, 6, 7], [0, 2, 3]))

    def call(keys, splits, other_keys, other_splits):
        ids = [
            tf.RaggedTensor.from_row_splits(k, s, validate=False)
            for k, s in ((keys, splits), (other_keys, other_splits))
        ]
        return sok.lookup_sparse([table, static], ids, concat=wrong == "bags")

    arguments = [tf.constant(array, tf.int64) for array in ([1, 2, 3], splits, *other)]
    if compiled:
        call = tf.function(call, input_signature=[tf.TensorSpec([None], tf.int64)] * 4)
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match=r"key 200 is outside|as many bags|row.splits"
    ):
        finished(call, *arguments)
    assert table.size == 0


def test_columns_are_used_again(device):
    """An optimizer that is gone leaves no memory behind; a column that is used again has its initial values."""

    def addresses():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))

    rows = 1 << 22
    table = sok.DynamicVariable(64, "ones", name="t", max_capacity=rows)
    for number in range(6):
        optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5))
        ids = ragged([[100 + number], [2]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        sums = optimizer.slots(table)["accumulator"]
        found = sorted(
            set(tf.reshape(tf.gather(sums, table.held_among(0, table.num_slots())[1]), [-1]).numpy().tolist())
        )
        assert found == ([0.5, 1.5] if number else [1.5])
        del optimizer, sums, tape, loss
        gc.collect()
        if number == 0:
            before = addresses()
    if device == "cpu":
        assert addresses() - before < 2 * rows * 64 * 4


def test_full_tables_evict():
    table, static = pair(max_capacity=4)
    for keys in ([1, 2, 3], [1], [4], [2], [9]):
        np.testing.assert_array_equal(
            sok.lookup_sparse(table, ragged([keys]), combiners="sum"),
            sok.lookup_sparse(static, ragged([keys]), combiners="sum"),
        )
        sok.OptimizerWrapper(sok.SGD(0.0)).apply_gradients(  # ends the step
            [(tf.IndexedSlices(tf.zeros([1, DIMENSION]), tf.constant([0])), table)]
        )
    assert sorted(table.indices.numpy().tolist()) == [1, 2, 4, 9]


@pytest.mark.parametrize("way", ["apply", "reduce", "function"])
def test_a_gradient_of_an_evicted_row_is_refused(way):
    """It must not reach the key that has the row now."""
    table = sok.DynamicVariable(2, "zeros", name="small", max_capacity=2)
    other = sok.Variable(np.zeros((2, 2), np.float32))
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                sok.lookup_sparse([table, other], [ragged([[7]]), ragged([[1]])], combiners=["sum"] * 2)
            )
        gradients = tape.gradient(loss, [table, other])
        sok.all2all_dense_embedding(table, tf.constant([8, 9], tf.int64))
        if way == "reduce":
            return gradients[0].values
        return optimizer.apply_gradients(zip(gradients, [table, other], strict=True))

    with pytest.raises(tf.errors.FailedPreconditionError, match="'small'"):
        finished(tf.function(step) if way == "function" else step)
    assert sorted(table.indices.numpy().tolist()) == [8, 9]
    np.testing.assert_array_equal(table, np.zeros((2, 2)))
    np.testing.assert_array_equal(other, np.zeros((2, 2)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_gradient_of_weights_is_refused_with_its_row(compiled):
    """It reads the row again, which another key may have by then."""
    table = sok.DynamicVariable(2, "normal", name="small")

    def gradient(weight, erased):
        with tf.GradientTape() as tape:
            tape.watch(weight)
            weights = ragged([[7, 8]]).with_values(weight)
            loss = tf.reduce_sum(sok.lookup_sparse(table, ragged([[7, 8]]), weights, "sum"))
        if erased:
            table.erase([8])
            sok.assign(table, [9], tf.ones([1, 2]))
        return tape.gradient(loss, weight)

    call = tf.function(gradient) if compiled else gradient
    rows = tf.reduce_sum(sok.lookup_sparse(table, ragged([[7], [8]]), training=False), axis=1)
    np.testing.assert_allclose(call(tf.ones([2]), False), rows, rtol=1e-5)
    with pytest.raises(tf.errors.FailedPreconditionError, match="'small'"):
        finished(call, tf.ones([2]), True)
