# SPDX-License-Identifier: Apache-2.0
"""Tables that are attributes of layers and models of Keras 3 and tf_keras: weights that train, and are saved."""

import copy
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import saving

RNG = np.random.default_rng(3)
IDS = RNG.integers(0, 20, (16, 2))
LABELS = RNG.random((16, 1)).astype(np.float32)


def bags(ids):
    return tf.RaggedTensor.from_tensor(ids)


def layer_class(kit):
    base: Any = kit.layers.Layer

    @kit.utils.register_keras_serializable(package="sok_tests")
    class Held(base):
        """Tables in every place where a layer may keep one."""

        def __init__(self, **options):
            super().__init__(**options)
            self.alone = sok.Variable(shape=(20, 2), initializer="normal", name="alone")
            self.frozen = sok.Variable(shape=(20, 2), initializer="normal", name="frozen", trainable=False)
            self.listed = [sok.Variable(shape=(20, 2), initializer="normal", name="listed")]
            self.named = {"a": sok.DynamicVariable(2, "normal", name="named")}
            self.stack = sok.TableStack({"s": (20, 2), "t": (20, 2)}, initializer="normal", name="stack")
            self.again = self.alone

        def build(self, shape):
            self.built_late = sok.Variable(shape=(20, 2), initializer="normal", name="built_late")
            self.dense = self.add_weight(name="dense", shape=(2, 1), initializer="ones")

        def tables(self):
            return [self.alone, self.frozen, *self.listed, self.named["a"], self.stack, self.built_late]

        def call(self, ids):
            ids = bags(ids)
            singles = [self.alone, self.frozen, *self.listed, self.named["a"], self.built_late]
            rows = sok.lookup_sparse(singles, [ids] * len(singles), combiners="sum")
            stacked = sok.lookup_sparse(self.stack, tf.concat([ids, ids], 0), combiners="sum")
            return tf.matmul(tf.add_n([*rows, stacked[:, :2], stacked[:, 2:]]), self.dense)

        def compute_output_shape(self, shape):
            return (shape[0], 1)

    return Held


def model_of(kit):
    inputs = kit.Input((2,), dtype="int64")
    layer = layer_class(kit)(name="held")
    model = kit.Model(inputs, layer(inputs))
    model.compile(sok.DistributedOptimizer(kit.optimizers.Adam(0.05)), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model, layer


def rows_of(layer):
    found = [np.sort(np.asarray(sok.export(t)[1]), 0) for t in (layer.alone, layer.frozen, *layer.listed)]
    keys, rows = (np.asarray(part) for part in sok.export(layer.named["a"]))
    return [*found, rows[np.argsort(keys)], layer.stack.numpy(), layer.built_late.numpy(), np.asarray(layer.dense)]


@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_tables_are_weights_that_train_and_are_saved(kit, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*weight of")
        model, layer = model_of(kit)
        before = rows_of(layer)
        names = [table.table_name for table in layer.tables()]
        trained = [v for v in layer.trainable_variables if "dense" not in v.name]
        assert len(trained) == len(names) - 1
        assert len(layer.variables) == len(names) + 1 and len(layer.non_trainable_variables) == 1
        model.fit(IDS, LABELS, batch_size=8, epochs=2, verbose=0)
    after = rows_of(layer)
    for name, old, new in zip([*names, "dense"], before, after, strict=True):
        assert (old.shape != new.shape or (old != new).any()) == (name != "frozen"), name
    model.save(tmp_path / "model.keras")
    loaded = kit.models.load_model(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    other, _ = model_of(kit)
    other.load_weights(tmp_path / "model.weights.h5")
    copied = copy.deepcopy(model)
    checkpoint, _ = model_of(kit)
    tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))
    tf.train.Checkpoint(model=checkpoint).read(str(tmp_path / "c"))
    for way, each in {"file": loaded, "weights": other, "copy": copied, "checkpoint": checkpoint}.items():
        for name, ours, theirs in zip([*names, "dense"], after, rows_of(each.layers[-1]), strict=True):
            np.testing.assert_array_equal(ours, theirs, f"{way} {name}")


@pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_rows_of_another_rank_are_refused(kit, tmp_path, monkeypatch):
    model, _ = model_of(kit)
    with monkeypatch.context() as patched:
        patched.setattr(saving, "layout", lambda place: np.array([2 * place.num_rows, -1, 2, 1]))
        model.save_weights(tmp_path / "model.weights.h5")
    other, layer = model_of(kit)
    before = rows_of(layer)
    with pytest.raises(ValueError, match="rank 1 of 2"):
        other.load_weights(tmp_path / "model.weights.h5")
    for old, new in zip(before, rows_of(layer), strict=True):
        np.testing.assert_array_equal(old, new)


def test_what_is_not_tracked_warns_once_by_name():
    """A table that Keras does not find among a layer's attributes is not trained by `fit`."""
    hidden = sok.Variable(shape=(20, 2), name="hidden")

    class Hidden(keras.layers.Layer):
        def call(self, ids):
            return tf.reduce_sum(sok.lookup_sparse(hidden, bags(ids), combiners="sum"), 1, keepdims=True)

        def compute_output_shape(self, shape):
            return (shape[0], 1)

    layer = Hidden()
    with pytest.warns(UserWarning, match="table 'hidden'.*is not a weight of any layer") as caught:
        layer(IDS)
        layer(IDS)
    assert len(caught) == 1
    late = sok.Variable(shape=(20, 2), name="late")
    with pytest.warns(UserWarning, match="table 'late'.*is built already") as caught:
        layer.late = late
        layer.late_too = [late]
    assert len(caught) == 1 and not layer.trainable_variables
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sok.lookup_sparse(sok.Variable(shape=(20, 2)), bags(IDS))  # outside of layers
        keras.metrics.Mean().table = late
