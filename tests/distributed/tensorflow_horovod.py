# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: Horovod's own functions refuse tables, whose rows they would mix, and on one rank,
where there is nothing to mix, take them.
"""

import contextlib
import sys

import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

IDS = [[0, 1, 2, 3], [8, 7, 6, 5, 4, 3]]  # some of them on each rank
REDUCED = r"table '\w+': each rank has other rows .* allreduce would add .* sok\.DistributedGradientTape"
WRITTEN = r"table '\w+': each rank has other rows .* broadcast would write .* sok\.broadcast_variables"


def _refused(message):
    """What is refused where there are several ranks."""
    import pytest

    return pytest.raises(TypeError, match=message) if sok.num_ranks() > 1 else contextlib.nullcontext()


def _tables():
    static = sok.Variable(np.arange(18.0).reshape(9, 2), name="shared")
    dynamic = sok.DynamicVariable(dimension=2, initializer=0.5, name="shared_keys")
    sok.lookup_sparse([static, dynamic], [tf.ragged.constant(IDS, tf.int64)] * 2)  # both hold rows on every rank
    return [static, dynamic]


def _rows(table):
    return sok.export(table)[1].numpy()


def _loss(table, weight):
    vectors = sok.lookup_sparse(table, tf.ragged.constant(IDS, tf.int64))
    return tf.reduce_sum(vectors * weight) * (sok.rank() + 1.0)


def _tape(table, weight):
    with tf.GradientTape() as tape:
        loss = _loss(table, weight)
    return tape, loss


def reductions_of_horovod():
    hvd = sys.modules["horovod.tensorflow"]
    weight = tf.Variable([2.0, 3.0])
    for table in _tables():
        before = _rows(table)
        for options in ({}, {"sparse_as_dense": True}, {"num_groups": 1}, {"op": hvd.Sum}):

            def gradients(table=table, options=options):
                tape, loss = _tape(table, weight)
                return hvd.DistributedGradientTape(tape, **options).gradient(loss, [table, weight])

            if table.has_index and "sparse_as_dense" in options:
                continue  # dense, a dynamic table's gradient has no shape
            for run in (gradients, tf.function(gradients)):
                with _refused(REDUCED):
                    run()
        tape, loss = _tape(table, weight)
        gradient = tape.gradient(loss, table)
        for reduce in (hvd.allreduce, lambda gradient: hvd.grouped_allreduce([gradient])):
            with _refused(REDUCED):
                reduce(gradient)

        # What Horovod is told to leave to each rank it may have, and what it gets without tables.
        tape, loss = _tape(table, weight)
        own = tape.gradient(loss, table) if sok.num_ranks() == 1 else None
        tape, loss = _tape(table, weight)
        distributed = hvd.DistributedGradientTape(tape)
        distributed.register_local_source(table)
        left, averaged = distributed.gradient(loss, [table, weight])
        assert left.values.shape[0] == left.indices.shape[0] > 0
        if own is not None:
            np.testing.assert_allclose(left.values, own.values)
        assert np.ptp(sok.communication.allgather(averaged[tf.newaxis]), axis=0).max() == 0

        sok.OptimizerWrapper(sok.SGD(0.5)).apply_gradients([(left, table)])
        after = _rows(table)
        assert (before != after).any()


def broadcasts_of_horovod():
    hvd = sys.modules["horovod.tensorflow"]
    dense = tf.Variable([float(sok.rank())])
    for table in _tables():
        if table.has_index and sok.num_ranks() == 1:
            continue  # nothing is written to slots of a dynamic table, on one rank neither
        before = _rows(table)
        for options in ({}, {"inplace": True}):
            with _refused(WRITTEN):
                hvd.broadcast_variables([table, dense], root_rank=0, **options)
        with _refused(WRITTEN):
            hvd.broadcast_([table], root_rank=0)
        after = _rows(table)
        np.testing.assert_array_equal(after, before)
        assert table.name == f"{table.table_name}:0"
        hvd.broadcast(tf.convert_to_tensor(sok.rank()), 0)  # Horovod is well after a refusal
    sok.broadcast_variables([table, dense])
    hvd.broadcast_variables([dense], root_rank=sok.num_ranks() - 1)
    assert dense.numpy() == 0


def horovod_in_a_graph():
    hvd = sys.modules["horovod.tensorflow"]
    with tf.Graph().as_default():
        table = sok.Variable(np.arange(18.0).reshape(9, 2), name="shared_in_a_graph")
        weight = tf.compat.v1.get_variable("weight", initializer=[2.0, 3.0], use_resource=True)
        loss = _loss(table, weight)
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        with _refused(REDUCED):
            optimizer.compute_gradients(loss, [table, weight])
        assert len(optimizer.compute_gradients(loss, [weight])) == 1
        with _refused(WRITTEN):
            hvd.broadcast_global_variables(0)
