# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: what leaves the tables of several ranks, and comes back."""

import shutil
import tempfile

import following
import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow_support import restart

import sparse_operation_kit.tensorflow as sok


def shared_folder():
    """The path of a new folder, the same on all ranks."""
    return hvd.broadcast_object(tempfile.mkdtemp() if sok.rank() == 0 else None, 0)


def incremental():
    """Changed rows of all ranks reach a copy on as many."""
    import keras

    restart()

    def make_step(tables):
        optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())

        @tf.function
        def compiled(*keys):
            ids = [tf.RaggedTensor.from_row_splits(k, [0, tf.size(k)]) for k in keys]
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(output**2) for output in sok.lookup_sparse(tables, ids)])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

        return lambda keys: compiled(*map(tf.constant, keys))

    folder = shared_folder()
    following.follow(sok, make_step, lambda table: table.numpy(), f"{folder}/delta")
    sok.communication.allreduce(1.0, name="saved")
    if sok.rank() == 0:
        shutil.rmtree(folder)
