# SPDX-License-Identifier: Apache-2.0
"""The state machine of dynamic_model.py in TensorFlow."""

import copy
import tempfile

import dynamic_model
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.stateful import rule

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime


class Machine(dynamic_model.Machine):
    sok = sok
    no_room = tf.errors.ResourceExhaustedError
    refused = tf.errors.FailedPreconditionError

    def start(self):
        runtime.shutdown()
        sok.init()

    def on_gpu(self):
        return "GPU" in tf.zeros([]).device

    def make_table(self, **options):
        return sok.DynamicVariable(2, "normal", name="t", **options)

    def make_optimizer(self, table):
        rule = sok.RowWiseAdagrad(dynamic_model.RATE, dynamic_model.START, dynamic_model.EPSILON)
        return sok.OptimizerWrapper(rule)

    def look_up(self, keys, combiner, trains):
        ids = tf.RaggedTensor.from_row_splits(tf.constant(keys, tf.int64), [0, len(keys)])
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse(self.table, ids, combiners=combiner)
        sok.check_errors()  # a GPU finds later that the table is full
        if trains:
            self.gradient = tape.gradient(output, self.table)
        return output[0].numpy()

    def step(self):
        self.optimizer.apply_gradients([(self.gradient, self.table)])
        sok.check_errors()

    def read(self, table, keys):
        ids = tf.RaggedTensor.from_uniform_row_length(tf.constant(keys, tf.int64), 1)
        return sok.lookup_sparse(table, ids, combiners="sum", training=False).numpy()

    def held(self):
        keys, slots = self.table.held_among(0, self.table.num_slots())
        return dict(zip(keys.numpy().tolist(), slots.numpy().tolist(), strict=True))

    def sums(self, slots):
        states = self.optimizer.slots(self.table)
        return tf.gather(states["accumulator"], slots).numpy() if states else None

    def generation(self):
        return int(self.table.generations(0.0)[0])

    @rule(how=st.sampled_from(["checkpoint", "copy"]))
    def copy(self, how):
        if how == "copy":
            table = copy.deepcopy(self.table)
            return self.goes_on(table, self.make_optimizer(table), compact=True, has_sums=False)
        table, optimizer = self.another()
        with tempfile.TemporaryDirectory() as folder:
            tf.train.Checkpoint(table=self.table, optimizer=self.optimizer).write(f"{folder}/c")
            tf.train.Checkpoint(table=table, optimizer=optimizer).read(f"{folder}/c")
            self.goes_on(table, optimizer, compact=True)
            # TensorFlow restores states when a step makes them; what is saved before that has none.
            return self.train([next(iter(self.rows.rows), 0)], "sum", None)


def test_machine():
    dynamic_model.check(Machine, steps=10)
