# SPDX-License-Identifier: Apache-2.0
"""Run by test_placement.py: tables and ids on two devices, for which two logical CPUs stand, so it runs anywhere."""

import itertools
import sys

import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
tf.config.set_visible_devices([], "GPU")

import keras  # noqa: E402

import sparse_operation_kit.tensorflow as sok  # noqa: E402

V1 = tf.compat.v1
START = np.arange(40, dtype=np.float32).reshape(10, 4)
OPTIMIZERS = {
    "fused": lambda: keras.optimizers.Adam(0.5),
    "by rows": lambda: keras.optimizers.Nadam(0.5),
    "own": lambda: sok.RowWiseAdagrad(0.5),
}


def is_on(variable, device):
    return variable.handle.device.endswith(f"device:{device}")


def train(table_device, ids_device, kind, compiled, optimizer):
    """Two steps; what came out of them."""
    with tf.device(table_device):
        tables = [sok.Variable(START, name="a"), sok.Variable(shape=(9, 2), initializer="uniform", name="b")]
    assert all(is_on(table, table_device) for table in tables)
    with tf.device(ids_device):
        ids = tf.ragged.constant([[1, 2], [3], []], dtype=tf.int64)
        weights = tf.ragged.constant([[1.0, 2.0], [3.0], []])
        if kind == "sparse":
            ids, weights = ids.to_sparse(), weights.to_sparse()
    wrapper = sok.OptimizerWrapper(OPTIMIZERS[optimizer]())

    def step():
        with tf.GradientTape() as tape:
            tape.watch(weights.values)
            outputs = sok.lookup_sparse(tables, [ids, ids], [weights, None], ["sum", "mean"])
            loss = tf.add_n([tf.reduce_sum(tf.square(output)) for output in outputs])
        gradients = tape.gradient(loss, [*tables, weights.values])
        wrapper.apply_gradients(zip(gradients[:2], tables, strict=True))
        return [*outputs, gradients[2]]

    run = tf.function(step) if compiled else step
    run()
    results = run()
    if not compiled:
        assert results[0].device.endswith(table_device)
    assert wrapper.table_variables and all(is_on(state, table_device) for state in wrapper.table_variables)
    sok.assign(tables[0], tf.constant([7]), tf.ones([1, 4]))
    keys, rows = sok.export(tables[0])
    assert keys.device.endswith("CPU:0") and rows.device.endswith("CPU:0")
    dense = sok.all2all_dense_embedding(tables[0], [[7], [1]])
    return [np.asarray(value) for value in (*results, rows, dense, *(table.numpy() for table in tables))]


def train_in_a_graph(table_device, optimizer):
    with tf.Graph().as_default():
        with tf.device(table_device):
            table = sok.Variable(START, name="table")
        ids = V1.sparse_placeholder(tf.int64, [None, None])
        loss = tf.reduce_sum(tf.square(sok.lookup_sparse(table, ids, combiners="sum")))
        step = sok.OptimizerWrapper(optimizer).minimize(loss, var_list=[table])
        rows = sok.export(table)[1]
        with V1.Session() as session:  # no soft placement: each op has to be where it can be
            session.run(V1.global_variables_initializer())
            for key in (3, 5):
                session.run(step, {ids: V1.SparseTensorValue([[0, 0]], [key], [1, 1])})
            return session.run(rows)


def main():
    sok.init()
    for kind, compiled, optimizer in itertools.product(("ragged", "sparse"), (False, True), OPTIMIZERS):
        if optimizer != "fused" and kind == "sparse":
            continue
        expected = train("CPU:0", "CPU:0", kind, compiled, optimizer)
        for places in (("CPU:1", "CPU:0"), ("CPU:0", "CPU:1"), ("CPU:1", "CPU:1")):
            actual = train(*places, kind, compiled, optimizer)
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"{places} {kind} {compiled} {optimizer}")
    for make in (lambda: V1.train.AdamOptimizer(0.5), lambda: V1.train.AdagradOptimizer(0.5)):
        np.testing.assert_array_equal(train_in_a_graph("CPU:1", make()), train_in_a_graph("CPU:0", make()))
    with tf.device("CPU:0"):
        here = sok.Variable(START, name="here")
    with tf.device("CPU:1"):
        there = sok.Variable(START, name="there")
    ids = tf.ragged.constant([[1]], dtype=tf.int64)
    try:
        sok.lookup_sparse([here, there], [ids, ids])
    except ValueError as error:
        assert "'here' is on" in str(error) and "'there' on" in str(error) and "CPU:1" in str(error), error
    else:
        raise AssertionError("tables on two devices were looked up in one call")
    print("PLACED")


if __name__ == "__main__":
    sys.exit(main())
