# SPDX-License-Identifier: Apache-2.0
"""The policies of dynamic tables (../dynamic_policies.py) in TensorFlow."""

import copy
import pickle
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from dict_store import DictStore
from dynamic_policies import Calls, Expiry, Follow, Policies
from kept_tables import Kept
from stored_tables import CAPACITY, KEYS, Stored

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import saving


class TensorFlow(Calls):
    sok = sok

    def static(self, rows):
        return sok.Variable(rows, name="static")

    def optimizer(self, kind, tables, rate):
        made = {
            "sgd": lambda: keras.optimizers.SGD(rate),
            "adam": lambda: keras.optimizers.Adam(rate),
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
    def test_lookups_of_a_table_that_nothing_trains(self):
        """Keys that get no rows keep no slots."""
        table = self.make(admission_threshold=100, trainable=False)

        def look(keys):
            return sok.lookup_sparse(table, tf.RaggedTensor.from_row_lengths(keys, [1] * 50), combiners="sum")

        calls = look, tf.function(look), lambda keys: tf.nn.embedding_lookup(table, keys)
        for number in range(60):
            keys = tf.range(50, dtype=tf.int64) + 50 * number
            np.testing.assert_array_equal(calls[number % 3](keys), self.initial(keys.numpy().tolist()))
        assert table.size == 0 and table.num_slots() <= 200
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = self.make(admission_threshold=100, trainable=False)
            keys = tf.compat.v1.placeholder(tf.int64, [50])
            outputs, slots = look(keys), table.num_slots()
            session.run(table.initializer)
            for number in range(40):
                session.run(outputs, {keys: np.arange(50) + 50 * number})
            assert session.run(slots) <= 200

    def test_gradients_without_a_generation(self):
        """Those that were changed or scaled are of now, also after generations were numbered anew."""
        table = self.make(evict_strategy="lru", max_capacity=2)
        self.sok.checkpoint._frontend.held(table).set_use_times(np.array([[2**31 - 4, time.time_ns()]]))
        optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
        for key in range(5):
            with tf.GradientTape() as tape:
                ids = tf.RaggedTensor.from_row_lengths(tf.constant([key], tf.int64), [1])
                loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
            (clipped,), _ = tf.clip_by_global_norm([tape.gradient(loss, table)], 1e6)
            optimizer.apply_gradients([(clipped, table)])
            found = sok.lookup_sparse(table, ids, combiners="sum", training=False)
            np.testing.assert_allclose(found, self.initial([key]) - 1.0, rtol=1e-5)

    @pytest.mark.parametrize("how", [lambda function: function, tf.function])
    def test_weights_of_a_table_that_nothing_trains(self, how):
        """Their gradient reads rows again, also those of keys that get none."""
        table = self.make(admission_threshold=100, trainable=False)
        weights = tf.Variable([1.0, 2.0, 3.0])

        def look(keys, **options):
            return sok.lookup_sparse(table, tf.RaggedTensor.from_row_lengths(keys, [1] * 3), combiners="sum", **options)

        @how
        def gradient():
            with tf.GradientTape() as tape:
                weighted = tf.RaggedTensor.from_row_lengths(weights * 1.0, [1] * 3)
                loss = tf.reduce_sum(look(tf.constant([1, 2, 3], tf.int64), sp_weights=weighted))
                loss += tf.reduce_sum(look(tf.constant([4, 5, 6], tf.int64)))
            return tape.gradient(loss, weights)

        np.testing.assert_allclose(gradient(), self.initial([1, 2, 3]).sum(1), rtol=1e-6)


class TestExpiry(TensorFlow, Expiry):
    pass


class TestKept(TensorFlow, Kept):
    def copies(self, tmp_path):
        def saved(table, options):
            path = tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
            other = self.another(options)
            tf.train.Checkpoint(table=other).read(path).assert_consumed()
            return other

        def from_all(table, options):
            path = tf.train.Checkpoint(table=table).write(str(tmp_path / "c"))
            other = self.another(options)
            with saving.from_all_ranks():
                tf.train.Checkpoint(table=other).read(path)
            return other

        return {"copy": lambda table, options: copy.deepcopy(table), "checkpoint": saved, "all ranks": from_all}


class TestFollow(TensorFlow, Follow):
    pass


class TestStored(TensorFlow, Stored):
    def options(self, options):
        return {key: tf.float16 if value == "float16" else value for key, value in options.items()}

    def ids(self, keys):
        return tf.RaggedTensor.from_row_lengths(tf.constant(keys, tf.int64), [1] * len(keys))

    def lookups(self, table, batches):
        optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
        with tf.GradientTape() as tape:
            total = 0.0
            for number, keys in enumerate(batches):
                total += tf.reduce_sum(sok.lookup_sparse(table, self.ids(keys), combiners="sum") ** 2)
                sok.prefetch(table, self.ids(batches[number - 1]))
        optimizer.apply_gradients([(tape.gradient(total, table), table)])

    def copies(self, table):
        return (
            lambda: tf.train.Checkpoint(t=table).write("never"),
            lambda: copy.deepcopy(table),
            lambda: pickle.dumps(table),
            table.config,
        )

    def test_in_functions(self):
        """Steps, evaluation and prefetches in one graph, in the program's order; and what runs outside of graphs."""
        rng = self.rng()
        store = DictStore()
        tables = self.pair(store)
        optimizers = [self.optimizer("adam", [table], 0.1) for table in tables]
        steps = [self.compiled(*each) for each in zip(tables, optimizers, strict=True)]
        lookups = self.lookups_of(tables[0])[2:]
        for _ in range(15):
            batches = [tf.constant(rng.choice(KEYS, 15, replace=False), tf.int64) for _ in range(3)]
            store.fails = ("read", 0)
            for look_up in lookups:
                with pytest.raises(tf.errors.UnknownError, match="the store is away"):
                    look_up(range(3))
            store.fails = None
            for ours, wanted in zip(*(step(*batches) for step in steps), strict=True):
                np.testing.assert_array_equal(ours, wanted)
        assert self.content(tables[0]) == self.content(tables[1]) and tables[0].stored > CAPACITY
        for call in (lambda: tables[0].erase(tf.constant([1])), tables[0].clear, lambda: sok.export(tables[0])):
            with pytest.raises(RuntimeError, match=r"runs outside of tf\.function"):
                tf.function(call, autograph=False)()

    def test_python_within_functions(self):
        """What uses the table by itself there takes its turn where it stands."""
        table = self.pair(DictStore())[0]
        optimizer = sok.OptimizerWrapper(keras.optimizers.Lion(1.0))
        erased = []

        @tf.function
        def step(keys):
            with tf.GradientTape() as tape:
                before = tf.py_function(lambda: float(table.erase(tf.constant([1]))), [], tf.float32)
                total = tf.reduce_sum(sok.all2all_dense_embedding(table, keys))
                held = tf.py_function(lambda: (time.sleep(0.1), float(len(table.indices)))[1], [], tf.float32)
                total *= tf.reshape(held, [])
            optimizer.apply_gradients([(tape.gradient(total, table), table)])
            return before, held

        def run():
            for _ in range(3):
                erased.append([float(each) for each in step(tf.constant([1, 2], tf.int64))])

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(60)
        assert erased == [[0, 2], [1, 2], [1, 2]]

    def lookups_of(self, table):
        looked_up = tf.function(lambda ids: sok.lookup_sparse(table, ids, combiners="sum"))
        read = tf.function(lambda ids: sok.lookup_sparse(table, ids, combiners="sum", training=False))
        return [*super().lookups_of(table), lambda keys: looked_up(self.ids(keys)), lambda keys: read(self.ids(keys))]

    def compiled(self, table, optimizer):
        @tf.function
        def run(first, second, third):
            before = sok.lookup_sparse(
                table, tf.RaggedTensor.from_row_lengths(first, tf.ones_like(first)), training=False
            )
            with tf.GradientTape() as tape:
                rows = sok.all2all_dense_embedding(table, first), tf.gather(table, second)
                total = tf.reduce_sum(rows[0] ** 2) + tf.reduce_sum(rows[1] * rows[0])
            gradient = tape.gradient(total, table)
            sok.prefetch(table, tf.RaggedTensor.from_row_lengths(third, tf.ones_like(third)))
            optimizer.apply_gradients([(gradient, table)])
            sok.assign(table, third[:5], tf.ones([5, 3]))
            after = sok.lookup_sparse(
                table, tf.RaggedTensor.from_row_lengths(first, tf.ones_like(first)), training=False
            )
            return before, *rows, after

        return run
