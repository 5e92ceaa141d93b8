# SPDX-License-Identifier: Apache-2.0
"""The policies of dynamic tables (../dynamic_policies.py) in TensorFlow."""

import copy

import keras
import tensorflow as tf
from dynamic_policies import Calls, Expiry, Follow, Kept, Policies

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import saving


class TensorFlow(Calls):
    sok = sok

    def static(self, rows):
        return sok.Variable(rows, name="static")

    def optimizer(self, kind, tables, rate):
        made = {
            "sgd": lambda: keras.optimizers.SGD(rate),
            "adagrad": lambda: keras.optimizers.Adagrad(rate, initial_accumulator_value=0.0, epsilon=1e-10),
        }
        return sok.OptimizerWrapper(made[kind]())

    def step(self, tables, keys, splits, weights, combiners, optimizer=None, **options):
        ids = tf.RaggedTensor.from_row_splits(tf.constant(keys, tf.int64), tf.constant(list(splits), tf.int64))
        given = None if weights is None else tf.constant(weights)
        with tf.GradientTape() as tape:
            weighted: list = [None] * len(tables)
            if given is not None:
                tape.watch(given)
                weighted[0] = ids.with_values(given)
            outputs = sok.lookup_sparse(tables, [ids] * len(tables), weighted, combiners=combiners, **options)
            total = tf.add_n([tf.reduce_sum(output) for output in outputs])
        if optimizer is None:
            return [output.numpy() for output in outputs], None
        gradients, of_weights = tape.gradient(total, (tables, [] if given is None else [given]))
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return [output.numpy() for output in outputs], of_weights[0].numpy() if of_weights else None

    def read(self, table, keys):
        ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys, tf.int64), [1] * len(keys))
        return sok.lookup_sparse(table, ids, combiners="sum", training=False).numpy()


class TestPolicies(TensorFlow, Policies):
    pass


class TestExpiry(TensorFlow, Expiry):
    pass


class TestKept(TensorFlow, Kept):
    def copies(self, tmp_path):
        def saved(table, options):
            path = tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
            other = self.make(**options)
            tf.train.Checkpoint(table=other).read(path).assert_consumed()
            return other

        def from_all(table, options):
            path = tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
            other = self.make(**options)
            with saving.from_all_ranks():
                tf.train.Checkpoint(table=other).read(path)
            return other

        return {"copy": lambda table, options: copy.deepcopy(table), "checkpoint": saved, "all ranks": from_all}


class TestFollow(TensorFlow, Follow):
    pass
