# SPDX-License-Identifier: Apache-2.0
"""get_weights and set_weights of Keras 3 and tf_keras where tables are dynamic: rows go and come with their keys."""

import copy
import pickle
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_harness as harness
import tf_keras

import sparse_operation_kit.tensorflow as sok

RNG = np.random.default_rng(9)
IDS = RNG.integers(0, 2**40, (64, 1))
LABELS = RNG.random((64, 1)).astype(np.float32)


def model_of(kit, name="users", **options):
    made: dict[str, Any] = {"dimension": 2, "initializer": "normal"}
    collection = sok.EmbeddingBagCollection({name: made | options, "static": (8, 3)}, initializer="normal")
    base: Any = kit.Model

    @kit.utils.register_keras_serializable(package="sok_tests", name=f"Two{name}")
    class Two(base):
        def __init__(self):
            super().__init__()
            self.first, self.tables, self.last = kit.layers.Dense(2), collection, kit.layers.Dense(1)

        def call(self, ids, training=False):
            bags = tf.RaggedTensor.from_tensor(tf.cast(ids, tf.int64))
            found = self.tables({name: bags, "static": bags % 8}, training=training)
            return self.last(self.first(tf.concat([found[name], found["static"]], 1)))

    model = Two()
    model.compile(sok.DistributedOptimizer(kit.optimizers.Adam(0.05)), "mse", jit_compile=False)
    return model, collection.tables[name]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(params=[keras, tf_keras], ids=["keras", "tf_keras"])
def kit(request):
    return request.param


@pytest.mark.parametrize("by", ["as they are", "deepcopy", "pickle"])
def test_weights_come_back_with_their_keys(kit, by):
    model, table = model_of(kit)
    model.fit(IDS[:32], LABELS[:32], batch_size=8, verbose=0)
    before, weights, guess = harness.exported(table), model.get_weights(), model.predict(IDS, verbose=0)
    if by != "as they are":
        weights = copy.deepcopy(weights) if by == "deepcopy" else pickle.loads(pickle.dumps(weights))
    table.erase(before[0][:5])
    model.fit(IDS[16:], LABELS[16:], batch_size=8, verbose=0)
    assert not np.isin(IDS[40:], before[0]).any() and len(harness.exported(table)[0]) > len(before[0])
    model.set_weights(weights)
    assert_same(harness.exported(table), before)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), guess)
    model.fit(IDS, LABELS, batch_size=8, verbose=0)  # it trains on
    assert len(harness.exported(table)[0]) == len(np.unique(IDS))


def test_what_they_are_evicted_by_comes_back(kit):
    model, table = model_of(kit, evict_strategy="lru", max_capacity=40)
    for first in (0, 16):  # the first 16 keys are the oldest ones
        model.fit(IDS[first : first + 24], LABELS[first : first + 24], batch_size=8, shuffle=False, verbose=0)
    weights = model.get_weights()
    model.fit(IDS[:16], LABELS[:16], batch_size=8, verbose=0)  # now the newest
    model.set_weights(weights)
    model.fit(IDS[40:56], LABELS[40:56], batch_size=8, verbose=0)
    np.testing.assert_array_equal(harness.exported(table)[0], np.sort(IDS[16:56, 0]))


def test_another_model_takes_them(kit):
    (model, table), (other, its_table) = model_of(kit), model_of(kit, "others")
    model.fit(IDS, LABELS, batch_size=8, verbose=0)
    other.fit(IDS[:8], LABELS[:8], batch_size=8, verbose=0)
    other.set_weights(model.get_weights())
    assert_same(harness.exported(its_table), harness.exported(table))
    np.testing.assert_array_equal(other.predict(IDS, verbose=0), model.predict(IDS, verbose=0))


def test_what_it_cannot_take_changes_nothing(kit):
    model, table = model_of(kit)
    model.fit(IDS[:32], LABELS[:32], batch_size=8, verbose=0)
    weights = model.get_weights()
    place = next(i for i, array in enumerate(weights) if getattr(array, "content", None) is not None)
    model.fit(IDS[32:], LABELS[32:], batch_size=8, verbose=0)
    before, others = harness.exported(table), [np.copy(array) for array in model.get_weights()]
    without_keys, wrong = list(weights), list(weights)
    without_keys[place] = np.copy(weights[place])
    wrong[-1] = np.zeros(9, np.float32)
    for given, said in ((without_keys, "the keys of its rows"), (wrong, "has shape"), (weights[1:], "weights")):
        with pytest.raises(ValueError, match=said):
            model.set_weights(given)
        assert_same(harness.exported(table), before)
        assert_same(model.get_weights(), others)
    for changed in (weights[place] * 2, weights[place][1:]):  # neither is what the table held
        with pytest.raises(ValueError, match="the keys of its rows"):
            model.set_weights([*weights[:place], changed, *weights[place + 1 :]])
    small, _ = model_of(kit, "small", max_capacity=8)
    small.predict(IDS[:8], verbose=0)
    first = [np.copy(array) for array in small.get_weights()]
    with pytest.raises(ValueError, match="may hold 8 rows"):
        small.set_weights(weights)
    assert_same(small.get_weights(), first)


def test_early_stopping_restores_the_best_weights(kit):
    model, table = model_of(kit)
    seen: dict[int, Any] = {}
    base: Any = kit.callbacks.Callback

    class Worse(base):
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = [1.0, 0.0, 2.0, 3.0][epoch]
            seen[epoch] = harness.exported(table), [np.copy(array) for array in self.model.get_weights()]

    stopping = kit.callbacks.EarlyStopping("score", patience=2, mode="min", restore_best_weights=True)
    model.fit(IDS, LABELS, batch_size=8, epochs=9, verbose=0, callbacks=[Worse(), stopping])
    assert sorted(seen) == [0, 1, 2, 3]
    assert_same(harness.exported(table), seen[1][0])
    assert_same(model.get_weights(), seen[1][1])
    assert (seen[3][1][0] != seen[1][1][0]).any()
