# SPDX-License-Identifier: Apache-2.0
"""The state machine of dynamic_model.py in TensorFlow."""

import dynamic_model
import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime


class Machine(dynamic_model.Machine):
    sok = sok
    no_room = tf.errors.ResourceExhaustedError

    def start(self):
        runtime.shutdown()
        sok.init()

    def make_table(self, **options):
        return sok.DynamicVariable(2, "normal", name="t", **options)

    def make_optimizer(self, table):
        rule = sok.RowWiseAdagrad(dynamic_model.RATE, dynamic_model.START, dynamic_model.EPSILON)
        return sok.OptimizerWrapper(rule)

    def look_up(self, keys, combiner):
        ids = tf.RaggedTensor.from_row_splits(tf.constant(keys, tf.int64), [0, len(keys)])
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse(self.table, ids, combiners=combiner)
        sok.check_errors()  # a GPU finds later that the table is full
        self.gradient = tape.gradient(output, self.table)
        return output[0].numpy()

    def step(self):
        self.optimizer.apply_gradients([(self.gradient, self.table)])

    def read(self, table, keys):
        ids = tf.RaggedTensor.from_uniform_row_length(tf.constant(keys, tf.int64), 1)
        return sok.lookup_sparse(table, ids, combiners="sum", training=False).numpy()

    def exported(self):
        keys, rows = sok.export(self.table)
        return keys.numpy(), rows.numpy().astype(np.float32)

    def sums(self, keys):
        states = self.optimizer.slots(self.table)
        slots = self.table.held_among(0, self.table.num_slots())[1]
        return tf.gather(states["accumulator"], slots).numpy() if states else None


def test_machine():
    dynamic_model.check(Machine)
