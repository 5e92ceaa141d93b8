# SPDX-License-Identifier: Apache-2.0
"""Tables of layers and models of Keras 3 and tf_keras: weights that train, are saved, and are made anew of configs."""

import copy
import json
import pickle
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_harness as harness
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import saving
from sparse_operation_kit.tensorflow.embedding import layer_class as collection_of
from sparse_operation_kit.tensorflow.table_stack import Member

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
    named = harness.exported(layer.named["a"])[1]
    return [*found, named, layer.stack.numpy(), layer.built_late.numpy(), np.asarray(layer.dense)]


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


each_kit = pytest.mark.parametrize("kit", [keras, tf_keras], ids=["keras", "tf_keras"])
WAYS = {
    "file": lambda kit, model, path: model.save(path) or kit.models.load_model(path),
    "pickle": lambda kit, model, path: pickle.loads(pickle.dumps(model)),
    "clone": lambda kit, model, path: kit.models.clone_model(model),
}


def collection_model(kit, tables, frozen=False, optimizer=None, **options):
    layer = collection_of(kit)(tables, concat=True, name="tables", **options)
    inputs = {name: kit.Input((2,), dtype="int64", name=name) for name in tables}
    if frozen:
        layer.trainable = False
    model = kit.Model(inputs, kit.layers.Dense(1)(layer(inputs)))
    model.compile(sok.DistributedOptimizer(optimizer or kit.optimizers.Adam(0.05)), "mse", jit_compile=False)
    model.fit(dict.fromkeys(tables, IDS), LABELS, verbose=0)
    return model, layer


def described(layer):
    return {
        name: (type(table), table.table_name, table.mode, table.dtype, getattr(table, "stack", table).trainable)
        for name, table in layer.tables.items()
    }


@each_kit
def test_a_collection_of_a_config_has_the_same_tables(kit, tmp_path):
    made: dict[str, Any] = {"shape": (20, 2), "name": "of its own", "mode": "localized:0", "dtype": tf.float16}
    tables = {
        "frozen": sok.Variable(shape=(20, 2), initializer="normal", name="ready", trainable=False),
        "localized": sok.Variable(shape=(20, 3), name="b", mode="localized:0", dtype=tf.bfloat16),
        "made": {**made, "initializer": kit.initializers.Constant(0.5)},
        "one": (20, 2),
        "other": (30, 2),
        "dynamic": {"dimension": 3, "trainable": False},
    }
    model, layer = collection_model(kit, tables, initializer=kit.initializers.RandomNormal(stddev=0.5, seed=3))

    def rows(layer, name):
        table = layer.tables[name]
        return harness.exported(table)[1] if name == "dynamic" else table.numpy()

    first = {name: rows(layer, name) for name in tables}
    assert isinstance(layer.tables["one"], Member) and (first["made"] != 0.5).any()
    initial = collection_of(kit).from_config(json.loads(json.dumps(layer.get_config())))
    assert described(initial) == described(layer)
    for way, make in WAYS.items():
        again = make(kit, model, tmp_path / "model.keras").get_layer("tables")
        assert described(again) == described(layer), way
        assert len(again.trainable_variables) == len(layer.trainable_variables) == 3, way
        for name in tables if way != "clone" else ():
            np.testing.assert_array_equal(rows(again, name), first[name], f"{way} {name}")
        for name in ("made", "one", "other") if way == "clone" else ():
            np.testing.assert_array_equal(again.tables[name].numpy(), initial.tables[name].numpy(), name)
    np.testing.assert_array_equal(initial.tables["made"].numpy(), np.full((20, 2), 0.5))
    assert 0.3 < initial.tables["other"].numpy().std() < 0.7


@each_kit
@pytest.mark.parametrize("frozen", ["table", "layer", "layer from the start"])
def test_what_is_frozen_stays_so(kit, frozen, tmp_path):
    tables: dict[str, Any] = {"a": (20, 2), "b": {"dimension": 2}}
    if frozen == "table":
        tables = {name: sok.Variable(shape=(20, 2), trainable=False) for name in tables}
    options = {"trainable": False} if frozen == "layer from the start" else {}
    model, layer = collection_model(kit, tables, frozen == "layer", **options)
    model.save(tmp_path / "model.keras")
    loaded = kit.models.load_model(tmp_path / "model.keras")
    again = loaded.get_layer("tables")
    before = [np.asarray(sok.export(table)[1]) for table in layer.tables.values()]
    loaded.fit(dict.fromkeys(tables, IDS), LABELS, verbose=0)
    for table, rows in zip(again.tables.values(), before, strict=True):
        np.testing.assert_array_equal(np.asarray(sok.export(table)[1]), rows)
    for each in (layer, again):
        assert not each.trainable_variables and len(each.non_trainable_variables) == 2
        each.trainable = True  # which thaws a layer, and no table
        assert len(each.trainable_variables) == (0 if frozen == "table" else 2)


@each_kit
def test_initializers_in_a_config(kit):
    """One that draws by itself is kept by what it draws, others by Keras; what Keras cannot make again is named."""

    class Unknown:
        def __call__(self, shape, dtype):
            return tf.ones(shape, dtype)

        def get_config(self):
            return {}

    def of(initializer):
        layer = collection_of(kit)({"a": (20, 2), "b": (8, 3)}, initializer=initializer, name="tables")
        config = json.loads(json.dumps(layer.get_config()))
        again = type(layer).from_config(config)
        assert again.get_config() == layer.get_config()
        return [(layer.tables[name].numpy(), again.tables[name].numpy()) for name in layer.tables]

    for initializer in (
        "normal",
        0.25,
        kit.initializers.Zeros,
        kit.initializers.HeNormal(seed=4),
        kit.initializers.Constant(2.0),
        tf.compat.v1.truncated_normal_initializer(0.0, 0.5),
        tf.constant_initializer(3.0),
        kit.initializers.Orthogonal(seed=2),
    ):
        for ours, theirs in of(initializer):
            np.testing.assert_array_equal(theirs, ours, str(initializer))
    with pytest.warns(UserWarning, match=r"'tables'.*Unknown.*register_keras_serializable"):
        of(Unknown())
    with pytest.warns(UserWarning, match=r"'tables'.*function.*'uniform'"):
        of(lambda shape, dtype: tf.ones(shape, dtype))


@each_kit
def test_a_config_of_an_older_file(kit):
    """Of tables that are (rows, dimension) alone, ready-made ones too, and initializers that are names."""
    config = {
        "name": "tables", "trainable": True, "dtype": "float32", "tables": {"a": [20, 2], "b": [8, 2]},
        "features": {"a": "a", "b": "b"}, "combiners": {"a": "sum", "b": "mean"}, "concat": True,
        "initializer": "ones", "mode": None, "stack": False, "table_dtype": {"a": "float16", "b": "float32"},
    }  # fmt: skip
    layer = collection_of(kit).from_config(config)
    assert [table.dtype.name for table in layer.tables.values()] == ["float16", "float32"]
    np.testing.assert_array_equal(layer.tables["a"].numpy(), np.ones((20, 2)))
