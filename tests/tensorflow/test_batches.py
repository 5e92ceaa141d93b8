# SPDX-License-Identifier: Apache-2.0
"""Batches that are copied beside the steps before them."""

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import batches


@pytest.fixture
def where(device):
    return f"{device.upper()}:0"


def test_a_copy(where):
    """Of each dtype and shape; what it was copied from may change."""
    for dtype in (np.float32, np.int64, np.int32, np.bool_, np.float16):
        for shape in ((), (0, 3), (7,), (3, 5)):
            array = np.ones(shape, dtype)
            copied = sok.copy_to_gpu(array, where)
            array[...] = 0
            assert copied.dtype == dtype and copied.device.endswith(where)
            np.testing.assert_array_equal(copied.numpy(), np.ones(shape, dtype))
    with pytest.raises(tf.errors.InvalidArgumentError):
        sok.copy_to_gpu(np.array(["text"]), where)


def test_a_copy_of_any_array(where):
    """Of arrays that lie anywhere, in any order of bytes and elements; of lists and tensors."""
    whole = np.arange(60, dtype=np.int64)
    read_only = whole.copy()
    read_only.flags.writeable = False
    for array in (whole[1:], whole[::-1], whole.reshape(6, 10).T, whole.astype(">i8"), read_only):
        np.testing.assert_array_equal(sok.copy_to_gpu(array, where).numpy(), array.astype(np.int64))
    for other in ([1.5, 2.5], tf.constant([1.5, 2.5])):
        assert sok.copy_to_gpu(other, where).numpy().tolist() == [1.5, 2.5]


@pytest.mark.parametrize("first", (0, 1, 8))
def test_arrays_are_copied_once(first):
    """From where they are, page-locked memory as it may be, and not by TensorFlow to memory of its own before."""
    array = np.zeros(100, np.float32)[first:]
    on_host = batches._on_host(array)
    array[:] = 5
    assert sok.copy_to_gpu(on_host, "CPU:0").numpy().tolist() == [5] * len(array)


def test_batches_while_steps_run(where):
    """Each step sees its own batch, however far ahead batches are copied, by several threads."""
    with tf.device(where):
        total = tf.Variable(tf.zeros([256, 256]))
        ones = tf.ones([256, 256]) / 256  # exact, in TF32 too

    @tf.function
    def step(batch):
        result = batch
        for _ in range(50):
            result = tf.matmul(result, ones)  # keeps what all rows have in common
        total.assign_add(result)
        return batch[0, 0]

    def make(number):
        return sok.copy_to_gpu(np.full((256, 256), number, np.float32), where)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        seen = [step(batch) for batch in threads.map(make, range(60))]
    assert [float(each) for each in seen] == list(range(60))
    np.testing.assert_allclose(total.numpy(), np.full((256, 256), sum(range(60))), rtol=1e-6)
