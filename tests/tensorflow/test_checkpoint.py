# SPDX-License-Identifier: Apache-2.0
"""dump and load in a process alone: each optimizer goes on as if it had not stopped; what does not fit is an error."""

import os
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.checkpoint as ck
import sparse_operation_kit.tensorflow as sok

K, T, L, V1 = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy, tf.compat.v1.train


def schedule(library):
    return library.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)


OPTIMIZERS = {
    "keras SGD": lambda: K.SGD(0.1),
    "keras SGD momentum": lambda: K.SGD(schedule(keras), momentum=0.9, nesterov=True),
    "keras SGD clipvalue": lambda: K.SGD(0.1, momentum=0.9, clipvalue=0.1),
    "keras Adagrad": lambda: K.Adagrad(0.1),
    "keras Adam": lambda: K.Adam(schedule(keras)),
    "keras Adam amsgrad": lambda: K.Adam(0.1, amsgrad=True),
    "keras AdamW": lambda: K.AdamW(0.1),
    "keras Adamax": lambda: K.Adamax(0.1),
    "keras Adadelta": lambda: K.Adadelta(0.5),
    "keras RMSprop": lambda: K.RMSprop(0.01),
    "keras RMSprop centered": lambda: K.RMSprop(0.01, momentum=0.9, centered=True),
    "keras Ftrl": lambda: K.Ftrl(0.1),
    "keras Nadam": lambda: K.Nadam(0.1),
    "keras Lion": lambda: K.Lion(0.1),
    "tf_keras Adam": lambda: T.Adam(schedule(tf_keras)),
    "tf_keras SGD momentum": lambda: T.SGD(0.1, momentum=0.9),
    "tf_keras Adam amsgrad": lambda: T.Adam(0.1, amsgrad=True),
    "tf_keras Nadam": lambda: T.Nadam(0.1, jit_compile=False),  # compiled, its own counter stands still
    "legacy Adam": lambda: L.Adam(schedule(tf_keras)),
    "legacy SGD momentum": lambda: L.SGD(0.1, momentum=0.9, decay=0.01),
    "legacy RMSprop": lambda: L.RMSprop(0.01),
    "v1 Momentum": lambda: V1.MomentumOptimizer(0.1, 0.9),
    "v1 Adam": lambda: V1.AdamOptimizer(0.1),
    "v1 RMSProp": lambda: V1.RMSPropOptimizer(0.01, momentum=0.5, centered=True),
    "v1 Ftrl": lambda: V1.FtrlOptimizer(0.1),
    "sok.SGD": lambda: sok.SGD(schedule(keras)),
    "sok.RowWiseAdagrad": lambda: sok.RowWiseAdagrad(0.1, 0.1),
    "sok.Ftrl": lambda: sok.Ftrl(0.1, l1_regularization_strength=0.01),
}


def tables(**options):
    return [sok.Variable(shape=(50, 4), name="a", **options), sok.Variable(shape=(9, 3), name="b/c", **options)]


def ids_of(variables, step):
    rng = np.random.default_rng(step)
    return [
        tf.RaggedTensor.from_row_splits(rng.integers(0, v.global_shape[0], 12), np.arange(0, 13, 3)) for v in variables
    ]


def train(variables, optimizer, steps):
    losses = []
    for step in steps:
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(variables, ids_of(variables, step), combiners=["sum"] * len(variables))
            loss = tf.add_n([tf.reduce_sum(tf.square(output - 1)) for output in outputs])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        losses.append(float(loss))
    return losses


def optimizer_of(path):
    with ck.open_dump(path) as dump:
        return dump.optimizer


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("started", [False, True])
def test_training_goes_on(tmp_path, name, started):
    # One of them by what DistributedOptimizer gives, which keeps the same states in another place.
    wrap, other_wrap = sok.OptimizerWrapper, sok.DistributedOptimizer if started else sok.OptimizerWrapper
    variables, optimizer = tables(), wrap(OPTIMIZERS[name]())
    train(variables, optimizer, range(5))
    sok.dump(tmp_path / "d", variables, optimizer)
    others, other = tables(initializer="zeros"), other_wrap(OPTIMIZERS[name]())
    if started:
        train(others, other, range(2))
    sok.load(tmp_path / "d", others, other)
    same(variables, others)
    assert int(optimizer.iterations if name[:2] != "v1" else 5) == optimizer_of(tmp_path / "d").iterations
    assert train(variables, optimizer, range(5, 10)) == train(others, other, range(5, 10))
    same(variables, others)


@pytest.mark.parametrize("name", ["keras Adam", "keras Adagrad", "keras Nadam", "keras Adam amsgrad"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_rows_of_16_bits(tmp_path, dtype, name):
    """Training goes on bit for bit; what float32 tables dumped is rounded, and what they load is exact."""
    variables, others, wide = tables(dtype=dtype), tables(dtype=dtype, initializer="zeros"), tables(initializer="ones")
    optimizer, other, of_wide = (sok.OptimizerWrapper(OPTIMIZERS[name]()) for _ in range(3))
    train(variables, optimizer, range(5))
    sok.dump(tmp_path / "d", variables, optimizer)
    expected = ("float16", None) if dtype == tf.float16 else ("float32", "bfloat16")
    with ck.open_dump(tmp_path / "d") as stored:
        assert {(entry.table.value_dtype, entry.table.row_dtype) for entry in stored.tables.values()} == {expected}
    sok.load(tmp_path / "d", others, other)
    sok.load(tmp_path / "d", wide, of_wide)
    same(variables, others)
    same([tf.cast(table, tf.float32) for table in variables], wide)
    assert train(variables, optimizer, range(5, 8)) == train(others, other, range(5, 8))
    same(variables, others)
    train(wide, of_wide, range(3))
    sok.dump(tmp_path / "wide", wide, of_wide)
    sok.load(tmp_path / "wide", others, other)
    same([tf.cast(table, dtype) for table in wide], others)
    for key, value in of_wide.slots(wide[0]).items():
        same([value], [other.slots(others[0])[key]])


@pytest.mark.parametrize("name", ["keras Adam", "keras Adagrad", "v1 RMSProp", "keras Nadam", "keras Adam amsgrad"])
def test_before_the_first_step(tmp_path, name):
    variables, optimizer = tables(), sok.OptimizerWrapper(OPTIMIZERS[name]())
    sok.dump(tmp_path / "d", variables, optimizer)
    others, other = tables(initializer="zeros"), sok.OptimizerWrapper(OPTIMIZERS[name]())
    train(others, other, range(2))
    sok.load(tmp_path / "d", others, other)
    assert train(variables, optimizer, range(5)) == train(others, other, range(5))


@pytest.mark.parametrize("make", [lambda: K.Adam(0.1), lambda: K.SGD(0.1, momentum=0.9), lambda: K.Nadam(0.1)])
def test_into_a_function_that_was_traced(tmp_path, make):
    variables, optimizer = tables(), sok.OptimizerWrapper(make())
    train(variables, optimizer, range(3))
    sok.dump(tmp_path / "d", variables, optimizer)
    others, other = tables(), sok.OptimizerWrapper(make())

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(others, ids, combiners=["sum"] * 2)
            loss = tf.add_n([tf.reduce_sum(tf.square(output - 1)) for output in outputs])
        other.apply_gradients(zip(tape.gradient(loss, others), others, strict=True))
        return loss

    step(ids_of(others, 9))
    sok.load(tmp_path / "d", others, other)
    losses = [float(step(ids_of(others, number))) for number in range(3, 6)]
    np.testing.assert_allclose(losses, train(variables, optimizer, range(3, 6)), rtol=1e-6)


def test_inside_a_function_is_an_error(tmp_path):
    variables = tables()
    pending = sok.dump_async(tmp_path / "d", variables)
    for call, name in (
        (lambda: sok.dump(tmp_path / "d", variables), "dump"),
        (lambda: sok.dump_async(tmp_path / "d", variables), "dump_async"),
        (lambda: pending.wait(), "wait"),
    ):
        with pytest.raises(RuntimeError, match=rf"{name} runs outside of tf\.function"):
            tf.function(call)()
    pending.wait()


def test_in_a_graph(tmp_path):
    variables, optimizer = tables(), sok.OptimizerWrapper(V1.AdamOptimizer(0.1))
    train(variables, optimizer, range(3))
    sok.dump(tmp_path / "d", variables, optimizer)
    wanted = train(variables, optimizer, range(3, 6))
    values = [[ids.values.numpy() for ids in ids_of(variables, number)] for number in range(3, 6)]
    with tf.Graph().as_default():
        others = tables(initializer="zeros")
        keys = [tf.compat.v1.placeholder(tf.int64, [12]) for _ in others]
        ids = [tf.RaggedTensor.from_row_splits(k, np.arange(0, 13, 3, dtype=np.int64)) for k in keys]
        outputs = sok.lookup_sparse(others, ids, combiners=["sum"] * 2)
        loss = tf.add_n([tf.reduce_sum(tf.square(output - 1)) for output in outputs])
        other = sok.OptimizerWrapper(V1.AdamOptimizer(0.1))
        step = other.minimize(loss, others)
        with pytest.raises(RuntimeError, match="default session"):
            sok.load(tmp_path / "d", others, other)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            sok.load(tmp_path / "d", others, other)
            sok.dump(tmp_path / "again", others, other)
            sok.dump(tmp_path / "before", others, other)
            pending = sok.dump_async(tmp_path / "now", others, other)
            losses = [float(session.run([loss, step], dict(zip(keys, v, strict=True)))[0]) for v in values]
            nodes = len(session.graph.get_operations())
            sok.dump(tmp_path / "again", others, other)
            assert len(session.graph.get_operations()) < nodes + 50, "a dump must not make its nodes anew"
            pending.wait()
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "now" / file.name).read_bytes(), file.name
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    found = optimizer_of(tmp_path / "again")
    assert (found.name, found.iterations) == ("Adam", 6)


def test_keras_variables_around_tables(tmp_path):
    layer = sok.EmbeddingBagCollection({"a": (50, 4), "b/c": (9, 3)}, combiners="sum")
    sok.dump(tmp_path / "d", layer.trainable_variables)
    others = tables(initializer="zeros")
    sok.load(tmp_path / "d", others)
    same(layer.tables.values(), others)


def test_step_extra_and_what_the_optimizer_keeps(tmp_path):
    variables, optimizer = tables(), sok.OptimizerWrapper(K.Adam(0.125))
    train(variables, optimizer, range(2))
    step: Any = np.int64(12)
    sok.dump(tmp_path / "d", variables, optimizer, step=step, extra={"epoch": [1, None]}, progress=False)
    other = sok.OptimizerWrapper(K.Adam(0.75))
    found = sok.load(tmp_path / "d", tables(), other, verify="during", progress=False)
    assert (found.step, found.extra, found.world_size) == (12, {"epoch": [1, None]}, 1)
    assert found.manifest.writer["frontend"].startswith("tensorflow ")
    assert found.optimizer.name == "Adam" and found.optimizer.iterations == 2
    assert found.optimizer.hyperparameters["learning_rate"] == 0.125
    assert float(other.learning_rate) == 0.75, "hyper-parameters stay the user's"


def test_one_table_and_rows_alone(tmp_path):
    variables, optimizer = tables(), sok.OptimizerWrapper(K.Adam(0.1))
    train(variables, optimizer, range(2))
    sok.dump(tmp_path / "d", variables, optimizer)
    other = tables(initializer="zeros")[1]
    assert sok.load(tmp_path / "d", other).optimizer.name == "Adam"
    same([variables[1]], [other])
    sok.dump(tmp_path / "d", other)
    assert optimizer_of(tmp_path / "d") is None
    with pytest.raises(ck.MismatchError, match="without an optimizer"):
        sok.load(tmp_path / "d", other, sok.OptimizerWrapper(K.Adam()))


@pytest.mark.parametrize(("writer", "reader"), [("keras", "v1"), ("v1", "keras")])
def test_momentum_between_the_families(tmp_path, writer, reader):
    make = {"keras": lambda: K.SGD(0.125, momentum=0.5), "v1": lambda: V1.MomentumOptimizer(0.125, 0.5)}
    variables, optimizer = tables(), sok.OptimizerWrapper(make[writer]())
    train(variables, optimizer, range(5))
    sok.dump(tmp_path / "d", variables, optimizer)
    others, other = tables(), sok.OptimizerWrapper(make[reader]())
    sok.load(tmp_path / "d", others, other)
    for table, twin in zip(variables, others, strict=True):
        factor = np.float32(-8.0 if writer == "keras" else -0.125)
        same([optimizer.slots(table)["momentum"] * factor], [other.slots(twin)["momentum"]])
    np.testing.assert_allclose(train(others, other, range(5, 8)), train(variables, optimizer, range(5, 8)), rtol=1e-6)


def _wrapped(make):
    return lambda: sok.OptimizerWrapper(make())


# (tables, optimizer or None) that do not fit the dump of `tables()` with Adam: (error, part of the message)
MISFITS = {
    "rows": (lambda: [sok.Variable(shape=(51, 4), name="a")], None, ck.MismatchError, "a_0-key.*50 rows.*51 rows"),
    "dimension": (lambda: [sok.Variable(shape=(50, 5), name="a")], None, ck.MismatchError, "expected dimension 5"),
    "name": (lambda: [sok.Variable(shape=(50, 4), name="z")], None, ck.MismatchError, "holds no table 'z:0'.*a_0"),
    "optimizer": (tables, _wrapped(lambda: K.Adagrad()), ck.MismatchError, "states of Adam; expected.*Adagrad"),
    "state": (tables, _wrapped(lambda: K.Adam(amsgrad=True)), ck.MismatchError, "no state 'vhat' of Adam"),
    "same name twice": (lambda: [tables()[0], tables()[0]], None, ck.TableNameError, "a_0-key"),
    "no table": (lambda: [tf.Variable([1.0], name="w")], None, TypeError, r"vars\[0\].*'w:0'.*filter_variables"),
    "no wrapper": (tables, lambda: K.Adam(), TypeError, "a Adam by itself has no states of tables"),
    "whole": (tables, _wrapped(lambda: K.Lamb()), NotImplementedError, "Lamb"),
}


@pytest.mark.parametrize(("make", "optimizer", "error", "message"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit(tmp_path, make, optimizer, error, message):
    variables, trained = tables(), sok.OptimizerWrapper(K.Adam(0.1))
    train(variables, trained, range(2))
    sok.dump(tmp_path / "d", variables, trained)
    others = make()
    before = [table.numpy() for table in others]
    with pytest.raises(error, match=message):
        sok.load(tmp_path / "d", others, optimizer and optimizer())
    same(before, others)


@pytest.mark.parametrize("dump", [sok.dump, sok.dump_async])
def test_bad_arguments(tmp_path, dump):
    variables = tables()
    for error, call in (
        (ValueError, lambda: sok.load(tmp_path / "d", variables, verify="after")),
        (TypeError, lambda: dump(tmp_path / "d", [tf.zeros([2, 2])])),
        (TypeError, lambda: dump(tmp_path / "d", None)),
        (TypeError, lambda: dump(tmp_path / "d", variables, step="two")),
        (ValueError, lambda: dump(tmp_path / "d", variables, step=2**70)),
        (ValueError, lambda: dump(tmp_path / "d", variables, extra={"a": object()})),
        (ck.MissingFileError, lambda: sok.load(tmp_path / "nowhere", variables)),
    ):
        with pytest.raises(error):
            call()
    assert not list(tmp_path.iterdir()), "nothing half-done"


def test_damage_changes_nothing(tmp_path):
    variables, optimizer = tables(), sok.OptimizerWrapper(K.Adam(0.1))
    train(variables, optimizer, range(2))
    sok.dump(tmp_path / "d", variables, optimizer)
    with open(tmp_path / "d" / "a_0-Adam-v", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    others, other = tables(), sok.OptimizerWrapper(K.Adam(0.1))
    before = [table.numpy() for table in others]
    with pytest.raises(ck.ChecksumError, match="a_0-Adam-v"):
        sok.load(tmp_path / "d", others, other)
    same(before, others)
    assert not other.slots(others[0]) and int(other.iterations) == 0
