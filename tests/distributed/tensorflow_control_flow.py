# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: lookups in a branch and in a loop, beside the same in eager mode; constants."""

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

import sparse_operation_kit.tensorflow as sok


def control_flow():
    """All ranks take the same branch, each with its own batch."""
    rows = np.arange(22, dtype=np.float32).reshape(11, 2)
    tables = [sok.Variable(rows, name="dealt"), sok.Variable(rows, name="whole", mode="localized:0")]
    keys = tf.constant([(3 * sok.rank() + i) % 11 for i in range(4)], tf.int64)
    ids = tf.RaggedTensor.from_row_splits(keys, [0, 1, 1, 4])

    def look():
        return tf.add_n(sok.lookup_sparse(tables, [ids, ids], combiners="sum"))

    def nothing():
        return tf.zeros([3, 2])

    def body(i, total):
        return i + 1, total + tf.cond(i > 0, look, nothing)

    def loss_and_gradients(yes):
        with tf.GradientTape() as tape:
            branch = tf.cond(yes, look, nothing)
            _, total = tf.while_loop(lambda i, _: i < 3, body, (0, nothing()), parallel_iterations=1)
            loss = tf.reduce_sum(branch * 3.0 + total * [[1.0, 2.0]])
        return loss, [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, tables)]

    compiled = tf.function(loss_and_gradients)
    for yes in (True, False, True):
        loss, gradients = compiled(tf.constant(yes))
        expected, expected_gradients = loss_and_gradients(tf.constant(yes))
        np.testing.assert_allclose(loss, expected)
        for gradient, wanted in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(gradient, wanted)


def constants():
    """What follows from constants TensorFlow computes while it makes a graph, on a rank alone: never an exchange."""
    ranks = sok.num_ranks()
    ones = tf.ones([ranks], tf.int32)
    for name, exchange, wanted in (
        ("alltoall", lambda of: sok.communication.alltoall(of, ones), 1),
        ("even_alltoall", sok.communication.alltoall, 1),
        ("allgather", sok.communication.allgather, 1),
        ("allreduce", sok.communication.allreduce, ranks),
        ("broadcast", sok.communication.broadcast, 1),
    ):
        slices = tf.function(lambda exchange=exchange: tf.zeros([9])[: exchange(tf.ones([ranks], tf.int32))[0]])
        shape = slices.get_concrete_function().structured_outputs.shape
        assert ranks == 1 or shape.as_list() == [None], f"{name} ran while the graph was made"
        assert slices().shape == [wanted]
    table = sok.Variable(np.ones((9, 2), np.float32), name="constants")
    look = tf.function(lambda: sok.all2all_dense_embedding(table, tf.constant([1, 8])))
    np.testing.assert_array_equal(look(), np.ones((2, 2)))
    # On a GPU a string that is a constant has no kernel, and keys that the CPU has put in order may come in another.
    assert ranks == 1 or "SokRoute" in operations(look.get_concrete_function())


def operations(function):
    """Those that are left of a concrete function when TensorFlow has optimised its graph."""
    graph = tf.compat.v1.train.export_meta_graph(graph_def=function.graph.as_graph_def(), graph=function.graph)
    graph.collection_def["train_op"].node_list.value.extend([output.name for output in function.outputs])
    # A cluster of this process's devices would start a session of TensorFlow's, which finds a GPU taken already.
    cpu = device_properties_pb2.NamedDevice(name="/job:localhost/replica:0/task:0/device:CPU:0")
    cpu.properties.type = "CPU"
    here = cluster.Cluster(devices=[cpu])
    return {node.op for node in tf_optimizer.OptimizeGraph(tf.compat.v1.ConfigProto(), graph, cluster=here).node}
