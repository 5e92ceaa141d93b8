# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: dynamic tables on several ranks, beside static ones of the same names."""

import re
from typing import Any

import faults
import keras
import numpy as np
import tensorflow as tf
from dict_store import DictStore

import sparse_operation_kit.tensorflow as sok

ROWS, DIMENSION = 60, 4


def _pairs():
    """(dynamic, static) tables of the same name, distributed and localized."""
    for mode in (None, f"localized:{sok.num_ranks() - 1}"):
        name = f"pair_{mode or 'distributed'}"
        yield (
            sok.DynamicVariable(DIMENSION, "normal", name=name, mode=mode),
            sok.Variable(shape=(ROWS, DIMENSION), initializer="normal", name=name, mode=mode),
        )


def _batch(step):
    """Ragged ids and weights of this rank: of its own size, on one rank none at all."""
    generator = np.random.default_rng(100 * step + sok.rank())
    most = 3 + sok.rank() if sok.num_ranks() > 1 else 12
    bags = 0 if step % 3 == 1 and sok.rank() == 0 else most
    splits = np.concatenate([[0], np.cumsum(generator.integers(0, 6, bags))])
    keys, weights = generator.integers(0, ROWS, splits[-1]), generator.random(splits[-1], np.float32)
    return [tf.RaggedTensor.from_row_splits(tf.constant(values), splits) for values in (keys, weights)]


def _check_same(dynamic, static):
    keys, rows = sok.export(dynamic)
    assert dynamic.size == len(keys) == len(set(keys.numpy().tolist()))
    assert dynamic.placement.mine(keys.numpy()).all()
    np.testing.assert_allclose(rows, tf.gather(static, static.key_map(keys)), rtol=1e-5, atol=1e-7)


def dynamic_training():
    """Static and dynamic tables in one call, in training and evaluation, eagerly and compiled."""
    for compiled in (False, True):
        pairs = list(_pairs())
        tables = [table for pair in pairs for table in pair]
        optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))

        def step(ids, weights, training, tables=tables, optimizer=optimizer):
            with tf.GradientTape() as tape:
                tape.watch(weights.values)
                outputs = sok.lookup_sparse(
                    [*tables, *tables],
                    [ids] * 8,
                    [weights] * 4 + [None] * 4,
                    ["mean"] * 4 + ["sum"] * 4,
                    training=training,
                )
                losses = [tf.reduce_sum(tf.square(output - 1)) for output in outputs]
                loss = tf.add_n(losses)
            gradients = tape.gradient(loss, [*tables, weights.values])
            if training:
                optimizer.apply_gradients(zip(gradients[:4], tables, strict=True))
            return outputs, gradients[4], [gradient is None for gradient in gradients[:4]]

        run = tf.function(step, reduce_retracing=True) if compiled else step
        for number in range(6):
            training = number % 3 != 2
            before = [table.size for table, _ in pairs]
            ids, weights = _batch(number)
            outputs, of_weights, without = run(ids, weights, training)
            for dynamic, static in zip(outputs[::2], outputs[1::2], strict=True):
                np.testing.assert_allclose(dynamic, static, rtol=1e-5, atol=1e-6)
            assert of_weights.shape == ids.values.shape
            assert [bool(each) for each in without] == [not training, False] * 2
            if not training:
                assert before == [table.size for table, _ in pairs]
        for pair in pairs:
            _check_same(*pair)
        held = sum(sok.communication.allgather(np.array([table.size]), name="held").numpy().sum() for table, _ in pairs)
        assert held > ROWS


def dynamic_keys():
    """Any integers; their rows, assign and export are those of the owner; a key of another rank is refused."""
    table = sok.DynamicVariable(2, "uniform", name="any")
    keys = np.array([-(2**63), -7, -2, -1, 0, 3, 2**40, 2**63 - 1])
    rows = sok.all2all_dense_embedding(table, tf.constant(keys))
    mine = keys % sok.num_ranks() == sok.rank()
    exported, values = sok.export(table)
    assert sorted(exported.numpy().tolist()) == keys[mine].tolist()
    found = dict(zip(exported.numpy().tolist(), values.numpy(), strict=True))
    np.testing.assert_array_equal([found[key] for key in keys[mine].tolist()], rows.numpy()[mine])
    sok.assign(table, keys[mine], np.repeat(keys[mine][:, None], 2, axis=1).astype(np.float32))
    sok.communication.allgather(np.zeros(1), name="assigned")
    ids = tf.RaggedTensor.from_uniform_row_length(tf.constant([*keys, 99]), 1)
    read = sok.lookup_sparse(table, ids, combiners="sum", training=False)
    np.testing.assert_array_equal(read[:-1, 0], keys.astype(np.float32))
    assert np.abs(read[-1]).max() <= 0.05 and table.size == mine.sum()
    if sok.num_ranks() > 1:
        before = table.size
        try:
            sok.assign(table, [1 + sok.rank()], np.ones((1, 2), np.float32))
        except tf.errors.InvalidArgumentError as error:
            assert "'any'" in str(error), error
        else:
            raise AssertionError("no error")
        assert table.size == before


def dynamic_policies():
    """Of keys that all ranks look up each counts once a call, whoever asks; rows go on call where they are."""
    ranks, rank = sok.num_ranks(), sok.rank()
    options: dict[str, Any] = {"admission_threshold": 2, "filter_ratio": 0.0, "evict_strategy": "lfu"}
    for compiled in (False, True):
        late = sok.DynamicVariable(DIMENSION, "normal", name="late", **options)
        static = sok.Variable(shape=(ROWS, DIMENSION), initializer="normal", name="late")
        optimizer = sok.OptimizerWrapper(sok.SGD(1.0))

        def step(keys, filtered, tables=(late, static), optimizer=optimizer):
            ids = tf.RaggedTensor.from_uniform_row_length(keys, 1)
            with tf.GradientTape() as tape:
                outputs = sok.lookup_sparse(
                    list(tables), [ids, ids], combiners=["sum", "sum"], use_low_frequency_filter=filtered
                )
                loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
            return outputs

        run = tf.function(step) if compiled else step
        keys = tf.constant([*range(8), 8 + rank], tf.int64)
        each = tf.RaggedTensor.from_uniform_row_length(keys, 1)
        untouched = sok.DynamicVariable(DIMENSION, "normal", name="late")
        initial = sok.lookup_sparse(untouched, each, training=False)
        for number in range(3):
            seen, _ = run(keys, filtered=number == 1)
            np.testing.assert_array_equal(seen, initial)  # what the steps before made of it is lost
            held = sorted(late.indices.numpy().tolist())
            everyone = [*range(8), *range(8, 8 + ranks)]
            assert held == ([key for key in everyone if key % ranks == rank] if number == 2 else []), (number, held)
        times = np.array([ranks] * 8 + [1], np.float32)[:, None]
        trained = sok.lookup_sparse(late, each, training=False)
        np.testing.assert_allclose(trained, initial - times, rtol=1e-5, atol=1e-6)
        assert late.statistics().refusals == 2 * len(held)
        gone = sok.expire(late, predicate=lambda keys, rows, scores: (keys < 4) & (scores == 1))
        assert sorted(gone.tolist()) == [key for key in range(4) if key % ranks == rank]
        assert late.size == len(held) - len(gone)
        sok.communication.allgather(np.zeros(1), name="expired")


class Full:
    """A step on a table that holds few rows, one that holds many, and a static one."""

    def __init__(self, compiled):
        other, static = next(_pairs())
        self.small = sok.DynamicVariable(DIMENSION, name="small", max_capacity=faults.CAPACITY, evict_strategy=None)
        self.tables = [other, self.small, static]
        self.optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
        self._train = tf.function(self._step, reduce_retracing=True) if compiled else self._step

    def _step(self, keys):
        ids = tf.RaggedTensor.from_uniform_row_length(keys, 1)
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(self.tables, [ids, ids, ids % ROWS], combiners=["sum"] * 3)
            loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs])
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.tables), self.tables, strict=True))

    def step(self, keys):
        self._train(tf.constant(keys, tf.int64))
        sok.check_errors()  # a GPU finds it later

    def held(self):
        """What the dynamic tables hold."""
        return [array.numpy().tolist() for table in self.tables[:2] for array in sok.export(table)]


def dynamic_full():
    """A table that is full on one rank: all ranks raise, and no table has changed."""
    for compiled in (False, True):
        job = Full(compiled)
        job.step([0, 1, 2 + sok.rank()])
        for culprit in range(sok.num_ranks()):
            before, rows = job.held(), job.tables[2].numpy()
            error = faults.error_of(job.step, faults.too_many_keys(culprit, sok.num_ranks(), sok.rank()))
            assert isinstance(error, tf.errors.OpError), repr(error)
            own = rf"'small' holds \d+ of at most {faults.CAPACITY} keys"
            if sok.num_ranks() > 1:
                own += f".*This is rank {culprit} of {sok.num_ranks()}"
            assert re.search(own if culprit == sok.rank() else f"rank {culprit}", str(error)), error
            if not tf.config.list_logical_devices("GPU"):  # there the others keep what they inserted, untrained
                assert job.held() == before
            np.testing.assert_array_equal(job.tables[2], rows)
            job.small.clear()
            job.step([0, 1])


def _fail_together(table, store, is_this_rank):
    right = tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)
    ids = tf.cast(right, tf.float32) if is_this_rank else right
    given = [table] * 2, [right, ids]
    for call, *arguments in (
        (sok.lookup_sparse, *given),
        (sok.prefetch, *given),
        (sok.all2all_dense_embedding, table, ids.values),
    ):
        error = faults.error_of(call, *arguments)
        assert isinstance(error, TypeError if is_this_rank else tf.errors.AbortedError), repr(error)
    store.fails = ("read", 0) if is_this_rank else None
    error = faults.error_of(sok.all2all_dense_embedding, table, np.arange(100, 108))
    store.fails = None
    assert isinstance(error, ConnectionError if is_this_rank else tf.errors.OpError), repr(error)


def dynamic_store():
    """Each rank's rows go to a store of its own and come back, as of a table without a bound, eagerly and compiled.
    What one rank refuses, or its store cannot do, is an error on all.
    """
    for compiled in (False, True):
        store = DictStore()
        tables = [
            sok.DynamicVariable(DIMENSION, "normal", name="stored", max_capacity=14, store=store),
            sok.DynamicVariable(DIMENSION, "normal", name="stored", var_type="hbm"),
        ]
        found = []
        for table in tables:
            optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))

            def step(keys, following, table=table, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    rows = sok.all2all_dense_embedding(table, keys)
                    loss = tf.reduce_sum(rows**2)
                sok.prefetch(table, tf.RaggedTensor.from_row_lengths(following, tf.ones_like(following)))
                optimizer.apply_gradients([(tape.gradient(loss, table), table)])
                ids = tf.RaggedTensor.from_row_lengths(following, tf.ones_like(following))
                return rows, sok.lookup_sparse(table, ids, training=False)

            signature = [tf.TensorSpec([None], tf.int64)] * 2
            run = tf.function(step, input_signature=signature, autograph=False) if compiled else step
            if table is tables[0]:
                for culprit in range(sok.num_ranks()):
                    _fail_together(table, store, sok.rank() == culprit)
            generator = np.random.default_rng(sok.rank())
            batches = [[generator.integers(-100, 100, size) for size in (number % 7, 5)] for number in range(16)]
            found.append([each.numpy() for batch in batches for each in run(*map(tf.constant, batch))])
            if not compiled:  # each rank has ids of a dtype of its own
                size, dtype = (9, tf.int32) if sok.rank() == 0 else (0, tf.int64)
                mixed = (tf.range(first, first + size, dtype=dtype) for first in (-100, 50))
                found[-1] += [each.numpy() for each in run(*mixed)]
        for ours, wanted in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, wanted)
        keys = [np.sort(sok.export(table)[0]) for table in tables]
        np.testing.assert_array_equal(keys[0], keys[1])
        assert store.size() > 0 and tables[0].placement.mine(keys[0]).all()
