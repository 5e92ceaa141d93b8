# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's profiler shows the stages of a training step, each by the name of its function in the core."""

import pathlib

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import sparse_operation_kit.tensorflow as sok


def ranges(folder):
    """The names of what the traces of a folder have seen on the host."""
    found = set()
    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        found.update(event.name for plane in space.planes for event in plane.event_metadata.values())
    return found


def test_stages(tmp_path):
    table, optimizer = sok.Variable(shape=(8, 2), name="items"), sok.OptimizerWrapper(sok.SGD(0.1))
    ids = tf.RaggedTensor.from_row_splits(tf.constant([1, 2, 3], tf.int64), [0, 2, 3])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids))
        gradient = tape.gradient(loss, table)
        optimizer.apply_gradients([(gradient, table)])
        return gradient.values

    step()
    tf.profiler.experimental.start(str(tmp_path))
    step()
    tf.profiler.experimental.stop()
    assert {"sok_gather_combine", "sok_reduce", "sok_apply"} <= ranges(tmp_path)
