# SPDX-License-Identifier: Apache-2.0
"""Bad input is the framework's own error with names and ranges, eagerly and in a function, and changes nothing."""

import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_harness import finished

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime

GOOD = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)


def sparse(values, dtype=tf.int64, rank=2):
    indices = [[i] + [0] * (rank - 1) for i in range(len(values))]
    return tf.SparseTensor(indices, tf.constant(values, dtype), [len(values)] + [1] * (rank - 1))


def ragged(rows, dtype=tf.int64):
    return tf.ragged.constant(rows, dtype=dtype)


WEIGHTS = tf.ragged.constant([[1.0, 2.0], [3.0]])
INVALID = tf.errors.InvalidArgumentError

# ids, weights, combiners, error, message
REFUSED = {
    "key out of range": (ragged([[1, 10]]), None, None, INVALID, r"'items': key 10 is outside \[0, 10\)"),
    "negative key": (ragged([[-1]]), None, None, INVALID, r"'items': key -1 is outside \[0, 10\)"),
    "negative int32 key": (ragged([[-5]], tf.int32), None, None, INVALID, r"key -5 is outside \[0, 10\)"),
    "key beyond int32": (ragged([[2**32 + 1]]), None, None, INVALID, r"key 4294967297 is outside \[0, 10\)"),
    "key out of range, sparse": (sparse([3, 10]), None, None, INVALID, r"key 10 is outside \[0, 10\)"),
    "float ids": (ragged([[1.0]], tf.float32), None, None, TypeError, "sp_ids must be int32 or int64, got float32"),
    "float ids, sparse": (sparse([1], tf.float32), None, None, TypeError, "sp_ids must be int32 or int64, got float32"),
    "string ids": (tf.ragged.constant([["a"]]), None, None, TypeError, "int32 or int64, got string"),
    "1-D ids": (sparse([1, 2], rank=1), None, None, ValueError, "two dimensions"),
    "3-D ids": (sparse([1, 2], rank=3), None, None, ValueError, "two dimensions"),
    "3-D ragged ids": (tf.ragged.constant([[[1]]]), None, None, ValueError, "two dimensions"),
    "dense ids": (tf.constant([[1, 2]]), None, None, TypeError, "SparseTensor or tf.RaggedTensor"),
    "a list as ids": ([1, 2], None, None, ValueError, "sp_ids has 2 entries, but params has 1"),
    "fewer weights": (GOOD, tf.ragged.constant([[1.0], [3.0]]), None, ValueError, r"sp_weights must have the shape"),
    "other bags": (GOOD, tf.ragged.constant([[1.0], [3.0, 2.0]]), None, INVALID, "row splits of sp_ids"),
    "int weights": (GOOD, ragged([[1, 2], [3]]), None, TypeError, "sp_weights must be floating, got int64"),
    "weights of another kind": (GOOD, sparse([1, 2, 3], tf.float32), None, TypeError, "must be a tf.RaggedTensor"),
    "ragged weights of sparse ids": (sparse([1]), WEIGHTS, None, TypeError, "must be a tf.SparseTensor"),
    "fewer sparse weights": (sparse([1, 2]), sparse([1], tf.float32), None, ValueError, "shape and indices of sp_ids"),
    "other coordinates": (
        tf.SparseTensor([[0, 0], [1, 0]], [1, 2], [2, 2]),
        tf.SparseTensor([[0, 0], [1, 1]], [1.0, 2.0], [2, 2]),
        None,
        INVALID,
        "indices of sp_ids",
    ),
    "row outside the batch": (tf.SparseTensor([[5, 0]], [1], [2, 2]), None, None, INVALID, "items"),
    "batch without end": (tf.SparseTensor([[0, 0]], [1], [2**63 - 1, 2]), None, None, INVALID, "items"),
    "unknown combiner": (GOOD, None, "max", ValueError, 'unknown combiner \'max\': it must be one of "sum", "mean"'),
    "combiner of another type": (GOOD, None, 3, TypeError, "combiner must be a string"),
    "combiners for others": (GOOD, None, ["sum", "sum"], ValueError, "combiners has 2 entries, but params has 1"),
}


def sok_dense(table):
    return sok.all2all_dense_embedding(table, [1, 3])


def make_table():
    return sok.Variable(np.arange(40, dtype=np.float32).reshape(10, 4), name="items")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(case, compiled):
    ids, weights, combiners, error, message = REFUSED[case]
    table = make_table()
    optimizer = sok.OptimizerWrapper(sok.SGD(1.0))

    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, weights, combiners))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    with pytest.raises(error, match=message):
        finished(tf.function(train) if compiled else train)
    np.testing.assert_array_equal(table.numpy(), np.arange(40).reshape(10, 4))
    # And the table still works.
    np.testing.assert_array_equal(sok.lookup_sparse(table, GOOD, WEIGHTS, "sum")[1], 3 * np.arange(12, 16))


@pytest.mark.parametrize("lookup", [lambda table: sok.lookup_sparse(table, GOOD), sok_dense], ids=["sparse", "dense"])
def test_xla_is_refused_where_it_is_asked_for(lookup):
    table = make_table()
    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        tf.function(lambda: lookup(table), jit_compile=True)()
    outer = tf.function(lambda: tf.function(lambda: lookup(table))(), jit_compile=True)
    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        outer()
    np.testing.assert_array_equal(tf.function(lambda: lookup(table), jit_compile=False)()[-1], np.arange(12, 16))


def test_several_tables_name_the_one():
    tables = [sok.Variable(np.ones((5, 2), np.float32), name=name) for name in ("users", "shops")]
    with pytest.raises(INVALID, match=r"'shops': key 5 is outside \[0, 5\)"):
        finished(sok.lookup_sparse, tables, [ragged([[4]]), ragged([[5]])])
    with pytest.raises(TypeError, match=r"lookup 1 \(table 'shops'\): sp_ids"):
        sok.lookup_sparse(tables, [ragged([[4]]), ragged([[1.0]], tf.float32)])


LISTS = [
    (2, 1, None, None, ValueError, "sp_ids has 1 entries, but params has 2"),
    (2, 2, 1, None, ValueError, "sp_weights has 1 entries, but params has 2"),
    (2, 2, None, 3, ValueError, "combiners has 3 entries, but params has 2"),
    (0, 0, None, None, ValueError, "empty list"),
]


@pytest.mark.parametrize("params, ids, weights, combiners, error, message", LISTS)
def test_list_lengths(params, ids, weights, combiners, error, message):
    with pytest.raises(error, match=message):
        sok.lookup_sparse(
            [make_table()] * params,
            [GOOD] * ids,
            None if weights is None else [WEIGHTS] * weights,
            None if combiners is None else ["sum"] * combiners,
        )


def test_not_a_table():
    for value in (tf.Variable([[1.0]]), np.ones((2, 2)), None, "table"):
        with pytest.raises(TypeError, match=r"params must be tables \(sok.Variable or sok.DynamicVariable\)"):
            sok.lookup_sparse(value, GOOD)
        with pytest.raises(TypeError, match=r"params must be tables"):
            sok.all2all_dense_embedding(value, [1])


def test_dense_embedding_refuses():
    table = make_table()
    with pytest.raises(INVALID, match=r"'items': key 10 is outside \[0, 10\)"):
        finished(sok.all2all_dense_embedding, table, [[1], [10]])
    with pytest.raises(TypeError, match="must be int32 or int64, got float32"):
        sok.all2all_dense_embedding(table, [1.0])
    with pytest.raises(TypeError, match="must be a dense tensor"):
        sok.all2all_dense_embedding(table, GOOD)


def test_lookup_before_init():
    table = make_table()
    runtime.shutdown()
    for call in (lambda: sok.lookup_sparse(table, GOOD), lambda: sok.all2all_dense_embedding(table, [1])):
        with pytest.raises(RuntimeError, match=r"not initialised: call sok.init\(\)"):
            call()


def test_init():
    sok.init()
    sok.init("horovod")
    sok.init(comm_tool="Horovod", use_legacy_optimizer=False)
    with pytest.raises(ValueError, match="called before"):
        sok.init(gradient="mean")
    runtime.shutdown()
    for options, error, message in (
        (
            {"comm_tool": "mpi"},
            ValueError,
            'unknown comm_tool \'mpi\': this frontend has "horovod", "tensorflow", "single"',
        ),
        ({"comm_tool": "torch"}, ValueError, "unknown comm_tool 'torch'"),
        ({"gradient": "max"}, ValueError, "unknown gradient 'max'"),
        ({"exchange": "pigeon"}, ValueError, "unknown exchange 'pigeon'"),
        ({"seed": -1}, ValueError, "seed must be in"),
        ({"seed": "a"}, TypeError, "seed must be an integer"),
    ):
        with pytest.raises(error, match=message):
            sok.init(**options)
    sok.init(gradient="mean", seed=2**62)
    assert (sok.rank(), sok.num_ranks(), sok.local_rank(), sok.num_gpus(), sok.global_gpu_id()) == (0, 1, 0, 1, 0)


def test_assign_refuses_and_writes_nothing():
    table = make_table()
    before = table.numpy()
    row = np.ones((1, 4), np.float32)
    for keys, values, error, message in (
        ([10], row, INVALID, "10"),
        ([-1], row, INVALID, "-1"),
        ([1, 11], np.ones((2, 4), np.float32), INVALID, "11"),
        ([1, 2], row, INVALID, "values"),
        ([1], np.ones((1, 3), np.float32), INVALID, "values"),
        ([1.0], row, TypeError, "indices must be int32 or int64"),
        ([1], np.ones((1, 4), np.int32), TypeError, "values must be floating"),
    ):
        with pytest.raises(error, match=message):
            sok.assign(table, keys, values)
    np.testing.assert_array_equal(table.numpy(), before)
    with pytest.raises(TypeError, match="tables"):
        sok.assign(tf.Variable(before), [1], row)
    with pytest.raises(TypeError, match="tables"):
        sok.export(tf.Variable(before))


def test_optimizers_refuse():
    with pytest.raises(TypeError, match="OptimizerWrapper wraps optimizers"):
        sok.OptimizerWrapper("adam")
    with pytest.raises(TypeError, match="DistributedOptimizer takes optimizers"):
        sok.DistributedOptimizer(3)
    table = make_table()
    bad = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([1, 10]), tf.constant([10, 4]))
    with pytest.raises(INVALID, match="10"):
        finished(sok.OptimizerWrapper(sok.SGD(1.0)).apply_gradients, [(bad, table)])
    np.testing.assert_array_equal(table.numpy(), np.arange(40).reshape(10, 4))


def test_gpus_of_other_workers_are_their_own_affair(monkeypatch):
    """Of a cluster TensorFlow lists those of all workers."""
    there = types.SimpleNamespace(name="/job:worker/replica:0/task:1/device:GPU:0")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [there] if kind == "GPU" else [])
    sok.check_errors()
