# SPDX-License-Identifier: Apache-2.0
"""The checks of tensorflow_hybrid.py that are about files of Keras and tf.train.Checkpoint, increments, and what
one rank alone is called with wrongly.
"""

import copy
import functools
from typing import Any

import following
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from hybrid_model import TABLES

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp
from sparse_operation_kit.tensorflow.group import Group


def changes():
    """What changes reaches layers of other placements."""

    def make(**options):
        tables = [dmp.Embedding(*shape, combiner="sum") for shape in TABLES]
        layer = dmp.DistributedEmbedding(tables, name="layer", **options)
        layer.build()
        return layer

    def step(layer, ids):
        variables = layer.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.concat(layer([tf.constant(each) for each in ids]), 1))
        gradients = dmp.DistributedGradientTape(tape).gradient(loss, variables)
        sok.OptimizerWrapper(sok.SGD(0.5)).apply_gradients(zip(gradients, variables, strict=True))

    def first_of(layer):
        return next(iter(sok.filter_variables(layer.weights)[0]), None)

    with following.shared_folder(Group()) as folder:
        following.follow_layer(sok, make, step, first_of, f"{folder}/one")


def keras_files():
    """Each rank's files give back tables and states where the placement is the same, and no others take them, also
    where tables are of one size.
    """
    rows, ranks = 6, hvd.size()
    start = [np.random.default_rng(t).normal(size=(rows, 4)).astype(np.float32) for t in range(4 * ranks)]
    data = [np.arange(3)[:, None]] * len(start), np.ones((3, 1))

    def make(weights, **options):
        inputs = [tf.keras.Input((1,), dtype="int64") for _ in start]
        layer = dmp.DistributedEmbedding([dmp.Embedding(rows, 4, combiner="sum") for _ in start], name="l", **options)
        outputs = tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(layer(inputs)))
        model = tf.keras.Model(inputs, outputs)
        model.compile(dmp.DistributedOptimizer(tf.keras.optimizers.Adagrad(0.5)), "mse")
        layer.set_weights(weights)
        return model, layer

    def refused(call):
        try:
            call()
        except ValueError as error:
            assert "sok.dump and sok.load" in str(error), error
            return
        raise AssertionError("no error")

    def read(model, path):
        status = tf.train.Checkpoint(model).read(f"{path}-checkpoint")
        try:
            status.assert_existing_objects_matched()
        except AssertionError:  # Keras 3's variables have their names there
            status.expect_partial()
            raise ValueError("use sok.dump and sok.load") from None

    saved, first = make(start)
    copied = copy.deepcopy(first._own_tables[0])
    assert copied.placement.contents == first._own_tables[0].placement.contents != 0
    saved.fit(*data, verbose=0)
    wanted = first.get_weights(True)
    zeros = [np.zeros_like(table) for table in start]
    with following.shared_folder(Group()) as folder:
        mine, others = (f"{folder}/{r}" for r in (hvd.rank(), (hvd.rank() + 1) % ranks))
        saved.save_weights(f"{mine}.weights.h5")
        saved.save(f"{mine}.keras")
        tf.train.Checkpoint(saved).write(f"{mine}-checkpoint")
        same, layer = make(zeros)
        same.load_weights(f"{mine}.weights.h5")
        np.testing.assert_array_equal(layer.get_weights(True), wanted)
        loaded = tf.keras.models.load_model(f"{mine}.keras")
        for model in (saved, loaded):
            model.fit(*data, verbose=0)
        for one, other in zip(loaded.trainable_variables, saved.trainable_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
        layer.set_weights(zeros)
        read(same, mine)
        np.testing.assert_array_equal(layer.get_weights(True), wanted)
        following.meet(sok)
        if ranks > 1:
            moved, moved_layer = make(zeros, strategy="memory_balanced")
            layer.set_weights(zeros)
            for model, path in ((same, others), (moved, mine)):
                refused(functools.partial(model.load_weights, f"{path}.weights.h5"))
                refused(functools.partial(read, model, path))
            for each in (layer, moved_layer):
                assert not np.any(each.get_weights(True))
            refused(lambda: tf.keras.models.load_model(f"{others}.keras"))


def wrong_inputs():
    """What a layer refuses on one rank, before it looks anything up, is an error of all. The first table is replicated,
    where there are several ranks.
    """
    rank, last = hvd.rank(), hvd.size() - 1
    shapes = [(4, 2), *[(20, 4)] * (2 * hvd.size())]
    for dp_input in (True, False):
        tables = [dmp.Embedding(*shape, combiner="sum") for shape in shapes]
        layer = dmp.DistributedEmbedding(tables, dp_input=dp_input, data_parallel_threshold=8)
        layer.build()
        own = list(range(len(shapes))) if dp_input else layer.strategy.input_ids_list[rank]
        good = [tf.ones([last + 1, 1], tf.int64)] * len(own)
        calls: list[tuple[Any, Any]] = [
            (good[0], ValueError),
            (good[1:], ValueError),
            ([tf.ones([2 * last + 2, 1], tf.int64), *good[1:]], ValueError),
            ([*good[1:], None], (ValueError, TypeError)),
            ([*good[1:], tf.ragged.constant([[[1]]] * (last + 1))], ValueError),
        ]
        if not (dp_input or last == 0):
            calls.append(([tf.ones([last + 2, 1], tf.int64)] * len(own), ValueError))
        for inputs, kind in calls:
            try:
                layer.call(inputs if rank == last else good)
            except (ValueError, TypeError, tf.errors.InvalidArgumentError) as caught:
                told = isinstance(caught, kind) if rank == last else f"rank {last}" in str(caught)
                assert told, repr(caught)
            else:
                raise AssertionError("no error")
        assert len(layer(good)) == len(shapes)
        if layer.strategy.table_groups[0] and not tf.config.list_logical_devices("GPU"):
            _ids_outside_a_replicated_table(layer, good, f"rank {last}")
    if last and not tf.config.list_logical_devices("GPU"):
        own = [Custom(9, 2) for _ in range(last + 1)]  # what tells the ranks may be their exchange
        for others, told in ((own, f"rank {last}"), ([], None)):
            tables = [dmp.Embedding(4, 2, combiner="sum"), dmp.Embedding(5, 1), *others]
            layer = dmp.DistributedEmbedding(tables, data_parallel_threshold=8)
            layer.build()
            assert layer.strategy.table_groups[0] == [0, 1]
            good = [tf.ones([last + 1, 1], tf.int64), *[tf.ones([last + 1], tf.int64)] * (len(tables) - 1)]
            _ids_outside_a_replicated_table(layer, good, told)


def _ids_outside_a_replicated_table(layer, good, told):
    """All ranks raise, in a function too, the one that has them with the table's name. told: what the others raise;
    None: nothing, they go on.
    """
    last = hvd.size() - 1
    own = f"table '{layer.name}/0': key 9 is outside [0, 4)"
    for call in (layer, tf.function(layer, reduce_retracing=True)):
        for kind in (tf.convert_to_tensor, tf.RaggedTensor.from_tensor, tf.sparse.from_dense):
            bad = kind(tf.concat([good[0][:-1], [[9]]], 0))
            expected = own if hvd.rank() == last else told
            try:
                found = call([bad if hvd.rank() == last else kind(good[0]), *good[1:]])
            except tf.errors.InvalidArgumentError as error:
                assert expected is not None and expected in str(error), error
            else:
                assert expected is None and len(found) == len(good), expected
        assert len(call(good)) == len(layer.strategy.global_configs)


class Custom(tf.keras.layers.Layer):
    """An embedding of a class that nobody knows, which looks up by itself."""

    def __init__(self, input_dim, output_dim, **options):
        super().__init__(**options)
        self.input_dim, self.output_dim = input_dim, output_dim

    def build(self, _):
        self.params = self.add_weight(name="params", shape=[self.input_dim, self.output_dim], dtype="float32")

    def call(self, ids):
        return 2 * tf.gather(tf.convert_to_tensor(self.params), ids)

    def get_config(self):
        return {"input_dim": self.input_dim, "output_dim": self.output_dim}


class Own(Custom):
    """One that looks at its ids eagerly."""

    def call(self, ids):
        if tf.executing_eagerly() and tf.reduce_any(ids == 3):
            raise RuntimeError("no 3")
        return super().call(ids)


def wrong_inputs_of_own_classes():
    """What embeddings of a class of the user's refuse, or the layer for them, is an error of all ranks."""
    rank, ranks = hvd.rank(), hvd.size()
    for dp_input in (True, False):
        own = [Own(5, 2) for _ in range(2 * ranks)]  # two to a rank, in one layer there
        for others in ([], [dmp.Embedding(8, 2, combiner="sum") for _ in range(ranks)]):
            layer = dmp.DistributedEmbedding([*own, *others], dp_input=dp_input)
            layer.build()
            number = len(layer.strategy.global_configs) if dp_input else len(layer.strategy.input_ids_list[rank])
            good = [tf.ones([ranks], tf.int64)] * number
            compiled = tf.function(layer, reduce_retracing=True)
            calls: list[tuple[Any, Any, Any]] = [
                (compiled, [good[0] + 4, *good[1:]], tf.errors.InvalidArgumentError),
                (layer, [good[0] - 2, *good[1:]], tf.errors.InvalidArgumentError),
                (layer, [good[0] + 2, *good[1:]], RuntimeError),
                (layer, good[1:], ValueError),
            ]
            if dp_input:
                calls.append((layer, [tf.sparse.from_dense(good[0][:, None]), *good[1:]], ValueError))
            for call, bad, kind in calls:
                try:
                    getattr(call, "call", call)(bad if rank == ranks - 1 else good)
                except (kind, tf.errors.InvalidArgumentError) as error:
                    assert isinstance(error, kind) or "rank " in str(error), repr(error)
                else:
                    raise AssertionError(f"no error: {kind}")
                assert len(call(good)) == len(layer.strategy.global_configs)
