# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow side of test_checkpoint.py; see checkpoint_matrix.py."""

import os

import checkpoint_matrix as matrix
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

RATE, ADAMS = matrix.LEARNING_RATE, matrix.ADAMS
K = tf.keras.optimizers
MAKE = {
    "SGD": lambda: K.SGD(RATE, momentum=0.5),
    "Adagrad": lambda: K.Adagrad(RATE, initial_accumulator_value=0.125, epsilon=1e-12),
    "RowWiseAdagrad": lambda: sok.RowWiseAdagrad(RATE, 0.125),
    "Adam": lambda: K.Adam(RATE, epsilon=1e-12, **ADAMS),
    "AdamW": lambda: K.AdamW(RATE, epsilon=1e-12, weight_decay=0.125, **ADAMS),
    "Adamax": lambda: K.Adamax(RATE, epsilon=1e-12, **ADAMS),
    "Adadelta": lambda: K.Adadelta(RATE, rho=0.75, epsilon=1e-6),
    "RMSprop": lambda: K.RMSprop(RATE, rho=0.75, epsilon=1e-12, momentum=0.5, centered=True),
    "Ftrl": lambda: K.Ftrl(RATE, l1_regularization_strength=0.125),
    "amsgrad": lambda: K.Adam(RATE, epsilon=1e-12, amsgrad=True, **ADAMS),
}


class Frontend:
    name = "tensorflow"
    sok = sok

    def __init__(self):
        self.rank, self.num_ranks = sok.rank(), sok.num_ranks()

    def table(self, name, shape, mode):
        return sok.Variable(shape=shape, mode=mode, name=name)

    def dynamic(self, name, dimension, mode, **options):
        return sok.DynamicVariable(dimension, mode=mode, name=name, **options)

    def dense(self):
        return tf.Variable([0.0])

    def optimizer(self, name, variables):
        return sok.OptimizerWrapper(MAKE[name]())

    def touch(self, variables, optimizer):
        ids = [tf.RaggedTensor.from_row_splits(tf.constant([0], tf.int64), [0, 1]) for _ in variables]
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(variables, ids, combiners=["sum"] * len(ids))
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def step(self, variables, optimizer, batches):
        ids = [tf.RaggedTensor.from_row_splits(keys, splits) for keys, splits, _ in batches]
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(variables, ids, combiners=["mean", "sum"][: len(ids)])
            loss = tf.add_n([tf.reduce_sum((o - b[2]) ** 2) for o, b in zip(outputs, batches, strict=True)])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return float(sok.communication.allreduce(tf.cast(loss, tf.float64), name="loss"))

    def put(self, variable, array):
        variable.assign(array)

    def get(self, variable):
        return variable.numpy()

    def put_state(self, optimizer, variable, name, slot, array):
        optimizer.slots(variable)[slot].assign(array)

    def get_state(self, optimizer, variable, name, slot):
        return optimizer.slots(variable)[slot].numpy()

    def count(self, optimizer, variable):
        return int(optimizer.iterations)


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if "TF_CONFIG" in os.environ:
        tf.distribute.MultiWorkerMirroredStrategy()
    else:
        import horovod.tensorflow as hvd

        hvd.init()
    sok.init()
    matrix.main(Frontend())
