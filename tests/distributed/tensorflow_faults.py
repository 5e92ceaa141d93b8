# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py, and of a process alone, about faults.FAULTS on each rank: eagerly, in a function."""

import contextlib

import faults
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import stamps

NOT_HERE = {"no row splits", "ids overwritten"}
"""What TensorFlow itself refuses or does not allow."""
DATA = ("key ", "row splits ", "gradient of a row")
"""What the names of faults begin with that a function meets when it runs; others are found while it is traced, when no
rank can tell another."""


class Job:
    """Tables and their optimizer, and what a step of a batch is."""

    def __init__(self, compiled):
        self.tables = [
            sok.Variable(
                shape=(rows, dimension), initializer="uniform", mode=faults.mode(t, sok.num_ranks()), name=name
            )
            for t, (rows, dimension, name) in enumerate(zip(faults.ROWS, faults.DIMENSIONS, faults.NAMES, strict=True))
        ]
        for table in self.tables:
            stamps.start(table)
        self.optimizer = sok.OptimizerWrapper(sok.RowWiseAdagrad(0.1, 0.1))
        self.optimizer.build(self.tables)
        self._run = tf.function(self._train, reduce_retracing=True) if compiled else self._train

    def _train(self, ids, weights, fault=None):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse([self.tables[t] for t in faults.TABLES], ids, weights, faults.COMBINERS)
            loss = tf.add_n([tf.reduce_sum(output * output) for output in outputs])
        gradients = tape.gradient(loss, self.tables)
        if fault is not None and fault.startswith("gradient"):
            of_row = tf.ones([1, faults.DIMENSIONS[0] + (fault == "gradient that does not fit")])
            gradients[0] = tf.IndexedSlices(of_row, tf.constant([99]), self.tables[0].shape)
        self.optimizer.apply_gradients(zip(gradients, self.tables, strict=True))

    def step(self, batches, fault=None):
        """fault: the name of one of the step."""
        ragged = tf.RaggedTensor.from_row_splits
        ids = [None if x.keys is None else ragged(x.keys, x.row_splits, validate=False) for x in batches]
        weights = [None if x.weights is None else ragged(x.weights, x.row_splits, validate=False) for x in batches]
        with self.spoiled(fault):
            self._run(ids, weights, *([] if fault is None else [fault]))
        sok.check_errors()

    @contextlib.contextmanager
    def spoiled(self, fault):
        wrapped, states = self.optimizer.optimizer, self.optimizer._tables.states._states
        of_first = states[self.tables[0]._unique_id]
        (name,) = of_first
        before = wrapped.learning_rate, of_first[name]
        if fault == "state of another shape":
            of_first[name] = tf.Variable(tf.zeros([3, 2]))
        if fault == "learning rate that is none":
            wrapped.learning_rate = "fast"
        try:
            yield
        finally:
            wrapped.learning_rate, of_first[name] = before

    def values(self):
        """Rows and states."""
        return [x.numpy() for x in (*self.tables, *self.optimizer.table_variables)]

    def everything(self):
        """With stamps, bit for bit."""
        return [x.tobytes() for x in (*self.values(), *(stamps.variable(table).numpy() for table in self.tables))]


def run(compiled):
    """See faults.on_each_rank."""

    def left_out(fault):
        return fault.name in NOT_HERE or (compiled and not fault.name.startswith(DATA))

    def is_right(error, own):
        return own or isinstance(error, tf.errors.OpError)

    faults.on_each_rank(lambda: Job(compiled), sok.rank(), sok.num_ranks(), left_out, is_right)


def faults_on_each_rank():
    run(compiled=False)


def faults_in_a_function():
    run(compiled=True)
