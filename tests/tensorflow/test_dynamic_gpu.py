# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of dynamic tables: where they are, errors that come later, memory that TensorFlow has taken.

Everything else runs on both by the fixture `device`.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["gpu"], indirect=True)]

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "rowwise": lambda: sok.RowWiseAdagrad(0.1, 0.25),
    "by rows": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
}


def step_of(table, optimizer):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys):
        ids = tf.RaggedTensor.from_uniform_row_length(keys, 3)
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse(table, ids, combiners="mean")
            loss = tf.reduce_sum(output**2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return output

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_a_static_table_does(name):
    """Over many growths, in functions that are not traced again; int64 keys stay on the GPU."""
    static = sok.Variable(shape=(5000, 16), initializer="normal", name="t")
    dynamic = sok.DynamicVariable(16, "normal", name="t", var_type="hbm", init_capacity=64)
    steps = [step_of(table, sok.OptimizerWrapper(OPTIMIZERS[name]())) for table in (static, dynamic)]
    generator, traced = np.random.default_rng(1), []
    for _ in range(12):
        keys = tf.constant(generator.integers(0, 5000, 3000))
        np.testing.assert_array_equal(*(step(keys) for step in steps))
        traced.append([step.experimental_get_tracing_count() for step in steps])
    keys, rows = sok.export(dynamic)
    # An optimizer of Keras makes its variables in the first call, for which TensorFlow traces twice.
    assert len(keys) == dynamic.size > 4000 and traced[0] == traced[-1]
    assert traced[0][0] == traced[0][1] <= (1 if name == "rowwise" else 2)
    np.testing.assert_array_equal(tf.gather(static, keys), rows)


def test_everything_is_on_the_gpu():
    table = sok.DynamicVariable(4, name="t")
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    step_of(table, optimizer)(tf.constant([1, -2, 2**40]))
    assert "GPU" in table.handle.device and all("GPU" in state.handle.device for state in optimizer.table_variables)
    assert "GPU" in sok.all2all_dense_embedding(table, tf.constant([1])).device
    assert all("GPU" not in tensor.device for tensor in (*sok.export(table), table.indices))
    assert table.capacity == 2**26 and sok.DynamicVariable(4, var_type="hbm").capacity > 2**28
    rows, _, _ = sok.sparse_read_and_evict(table, tf.constant([5, 1]))
    assert "GPU" in rows.device and table.size == 4


def test_keys_that_are_there_grow_no_state():
    """The host counts each key of a call as new until it hears otherwise; rows and states have as many slots."""
    table = sok.DynamicVariable(8, name="t", var_type="hbm", max_capacity=1 << 20)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    step = step_of(table, optimizer)
    for _ in range(40):
        step(tf.range(30_000, dtype=tf.int64))
        assert {len(state.numpy()) for state in optimizer.table_variables} == {len(table.numpy())}
    assert table.size == 30_000


def test_a_full_table_is_found_later():
    """By the next call that uses tables; nothing changes in between."""
    table = sok.DynamicVariable(2, "zeros", name="small", max_capacity=4, evict_strategy=None)
    other = sok.Variable(np.zeros((9, 2), np.float32))
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))
    sok.assign(table, [1, 2, 3], tf.ones([3, 2]))
    ids = tf.ragged.constant([[3, 7, 8]], dtype=tf.int64)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="'small'"):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sum(sok.lookup_sparse([table, other], [ids, ids], combiners=["sum", "sum"])))
        gradients = tape.gradient(loss, [table, other])
        optimizer.apply_gradients(zip(gradients, [table, other], strict=True))
        sok.check_errors()
    assert sorted(table.indices.numpy().tolist()) == [1, 2, 3] and not other.numpy().any()
    sok.lookup_sparse(table, ids[:, :2])
    assert table.size == 4


def test_no_memory_says_who_has_it():
    with pytest.raises(tf.errors.ResourceExhaustedError, match="set_memory_growth"):
        sok.DynamicVariable(1 << 20, name="huge", var_type="hbm", init_capacity=1 << 20)


def test_a_full_table_evicts():
    table = sok.DynamicVariable(2, "zeros", max_capacity=3)
    for keys in ([1, 2, 3], [1], [4]):
        sok.all2all_dense_embedding(table, tf.constant(keys))
        table.end_step()
    assert sorted(table.indices.numpy().tolist()) == [1, 3, 4]  # of 2 and 3, used as long ago, the lower slot


def test_memory_is_given_back_when_all_work_is_done():
    """A table that is gone while its last step is still to run."""
    for _ in range(20):
        table = sok.DynamicVariable(64, name="t")
        step_of(table, sok.OptimizerWrapper(keras.optimizers.Adam(0.1)))(tf.range(30_000, dtype=tf.int64))
        del table
    sok.check_errors()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_prefetched_rows_are_on_the_gpu(compiled):
    """A step finds in the GPU's memory what was prefetched, and does what it does where all rows are there."""
    near = sok.DynamicVariable(16, "normal", name="t", max_capacity=30_000)
    far = sok.DynamicVariable(16, "normal", name="t", max_capacity=30_000, max_hbm_for_vectors=3000 * 64e-9)
    steps = [step_of(table, sok.OptimizerWrapper(sok.SGD(0.1))) for table in (near, far)]
    ahead = lambda keys: sok.prefetch(far, tf.RaggedTensor.from_uniform_row_length(keys, 3))  # noqa: E731
    ahead = tf.function(ahead) if compiled else ahead
    generator = np.random.default_rng(4)
    for first in range(0, 30_000, 1500):
        for step in steps:
            step(tf.range(first, first + 1500, dtype=tf.int64))
    batches = [tf.constant(generator.integers(0, 30_000, 900)) for _ in range(9)]
    ahead(batches[0])
    before = far.statistics()
    for keys, following in itertools.pairwise(batches):
        np.testing.assert_array_equal(*(step(keys) for step in steps))
        ahead(following)
    after = far.statistics()
    sok.check_errors()
    assert after.lookups - before.lookups == after.device_hits - before.device_hits == 8 * 900
    assert after.host_hits == before.host_hits and after.moves - before.moves > 4000
    every = sorted(sok.export(far)[0].numpy().tolist())
    np.testing.assert_array_equal(*(sok.lookup_sparse(table, tf.ragged.constant([every])) for table in (near, far)))
