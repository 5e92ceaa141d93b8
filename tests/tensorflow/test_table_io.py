# SPDX-License-Identifier: Apache-2.0
"""assign, export, filter_variables and the collectives of one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import keras_compat


def test_assign_and_export():
    table = sok.Variable(np.zeros((6, 2), np.float32))
    assert sok.assign(table, [4, 1, 4], [[1.0, 1], [2, 2], [3, 3]]) is table
    keys, values = sok.export(table)
    np.testing.assert_array_equal(keys, np.arange(6))
    assert keys.dtype == tf.int64 and values.dtype == tf.float32
    np.testing.assert_array_equal(values[:, 0], [0, 2, 0, 0, 3, 0])
    # What was exported stays when the table changes.
    sok.assign(table, np.array([0], np.int32), np.full((1, 2), 9, np.float32))
    np.testing.assert_array_equal(values[:, 0], [0, 2, 0, 0, 3, 0])
    sok.assign(table, np.zeros(0, np.int64), np.zeros((0, 2), np.float32))
    np.testing.assert_array_equal(table.numpy()[:, 0], [9, 2, 0, 0, 3, 0])


def test_assign_in_a_function():
    table = sok.Variable(np.zeros((6, 2), np.float32))

    @tf.function
    def run(key):
        sok.assign(table, key[None], tf.ones([1, 2]))
        return sok.lookup_sparse(table, tf.RaggedTensor.from_row_splits(key[None], [0, 1]))

    np.testing.assert_array_equal(run(tf.constant(3)), [[1, 1]])
    np.testing.assert_array_equal(table.numpy()[:, 0], [0, 0, 0, 1, 0, 0])


def test_filter_variables():
    table, other = sok.Variable(shape=(3, 2)), tf.Variable([1.0])
    wrapped, plain = keras_compat.keras_variable(sok.Variable(shape=(3, 2))), keras.Variable([1.0])
    tables, others = sok.filter_variables([table, other, wrapped, plain])
    assert [id(v) for v in tables] == [id(table), id(wrapped)]
    assert [id(v) for v in others] == [id(other), id(plain)]
    assert sok.filter_variables([]) == ([], [])


def test_collectives_of_one_process():
    value = tf.constant([1.0, 2.0])
    for result in (
        sok.communication.allreduce(value),
        sok.communication.allreduce(value, op="average"),
        sok.communication.allgather(value),
        sok.communication.broadcast(value),
        sok.communication.alltoall(value),
    ):
        np.testing.assert_array_equal(result, value)
    slices = tf.IndexedSlices(value, tf.constant([3, 4]), tf.constant([9]))
    np.testing.assert_array_equal(sok.communication.allreduce(slices, "average").indices, [3, 4])
    with pytest.raises(ValueError, match="unknown op"):
        sok.communication.allreduce(value, "product")
    with pytest.raises(ValueError, match="IndexedSlices"):
        sok.communication.allreduce(slices, "max")
    with pytest.raises(ValueError, match=r"root_rank 1 is not in \[0, 1\)"):
        sok.communication.broadcast(value, 1)
    sok.broadcast_variables([tf.Variable([1.0]), sok.Variable(shape=(3, 2))])
