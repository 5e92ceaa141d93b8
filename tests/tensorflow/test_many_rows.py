# SPDX-License-Identifier: Apache-2.0
"""More than 2^31 rows in one table on a GPU, where some of TensorFlow's own operations keep slots in 32 bits."""

import time

import keras
import many_rows
import numpy as np
import pytest
import tensorflow as tf
from many_rows import BATCH, MEMORY, ROWS, keys_of

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit import core
from sparse_operation_kit.tensorflow import stamps

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["gpu"], indirect=True)]


@pytest.fixture(autouse=True)
def large_gpu(device):
    if core.device_properties(0).total_memory < MEMORY:
        pytest.skip("needs a GPU with 120 GiB")


def values_of(numbers):
    """[n, 1] float32."""
    return tf.cast(many_rows.values_of(numbers), tf.float32)[:, tf.newaxis]


def read(table, numbers, training=False):
    ids = tf.RaggedTensor.from_uniform_row_length(keys_of(numbers), 1)
    return sok.lookup_sparse(table, ids, combiners="sum", training=training)


def test_rows_states_and_stamps():
    table = sok.DynamicVariable(1, "zeros", name="t", var_type="hbm")
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.5))
    for first in range(0, ROWS, BATCH):
        numbers = tf.range(first, min(first + BATCH, ROWS), dtype=tf.int64)
        sok.assign(table, keys_of(numbers), values_of(numbers))
    assert table.size == int(table.num_slots()) == ROWS
    last = tf.range(ROWS - 1000, ROWS, dtype=tf.int64)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(read(table, last, training=True))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step()
    np.testing.assert_allclose(read(table, last), values_of(last) - 0.5, rtol=1e-6)
    slots = table.find(keys_of(last))
    np.testing.assert_array_equal(slots, last)

    # As `load` writes rows and states.
    held = table.held()
    held.rows.write(slots.numpy(), np.full([1000, 1], 7, np.float32))
    np.testing.assert_array_equal(read(table, last), np.full([1000, 1], 7))
    for state in held.state_columns():
        state.column.write(slots.numpy(), np.full([1000, 1], 3, np.float32))
        np.testing.assert_array_equal(state.column.read(slots.numpy()), np.full([1000, 1], 3))
        np.testing.assert_array_equal(state.column.read(np.arange(1000)), np.zeros([1000, 1]))

    # Every row counts as changed when tracking begins; then those that a step and an assignment change.
    held.track()
    since = time.time_ns()
    piece = np.int64(ROWS - ROWS % stamps.SLOTS_OF_CALL)
    for first in (np.int64(0), np.int64(1 << 30), piece - stamps.SLOTS_OF_CALL):
        assert len(stamps.changed(table, np.int64(1), first)) == stamps.SLOTS_OF_CALL
        assert len(stamps.changed(table, np.int64(since), first)) == 0
    # The host counts keys of a call as new until it has heard which were.
    assert len(stamps.changed(table, np.int64(1), piece)) in range(ROWS - piece, ROWS - piece + 1001)
    step()
    np.testing.assert_array_equal(stamps.changed(table, np.int64(since), piece), last)
    first = tf.range(10, dtype=tf.int64)
    sok.assign(table, keys_of(first), values_of(first) + 1)
    np.testing.assert_array_equal(held.changed(since), [*range(10), *last.numpy()])
