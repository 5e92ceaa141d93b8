# SPDX-License-Identifier: Apache-2.0
"""The fused form of an optimizer and the one on rows have the same states: one goes on where the other was."""

from typing import Any

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import hyperparameters

ROWS, DIMENSION = 6, 4

# Class -> options with which the fused form has every state that it can have, and its states.
FORMS = {
    "Adadelta": ({"learning_rate": 0.5, "epsilon": 1e-4}, ["accum_grad", "accum_var"]),
    "Adagrad": ({"learning_rate": 0.1, "initial_accumulator_value": 0.2}, ["accumulator"]),
    "Adam": ({"learning_rate": 0.02}, ["m", "v"]),
    "AdamW": ({"learning_rate": 0.02, "weight_decay": 0.05}, ["m", "v"]),
    "Adamax": ({"learning_rate": 0.02}, ["m", "v"]),
    "Ftrl": (
        {
            "learning_rate": 0.1,
            "initial_accumulator_value": 0.2,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
            "beta": 0.1,
        },
        ["accumulator", "linear"],
    ),
    "RMSprop": (
        {"learning_rate": 0.01, "momentum": 0.5, "centered": True, "epsilon": 1e-3},
        ["rms", "mg", "momentum"],
    ),
    "SGD": ({"learning_rate": 0.1, "momentum": 0.9}, ["momentum"]),
}
LIBRARIES = {"keras": keras, "tf_keras": tf_keras}
CLIP = 0.3

forms = pytest.mark.parametrize("name", FORMS)
libraries = pytest.mark.parametrize("library", LIBRARIES)


def make(library, name, **options):
    return getattr(LIBRARIES[library].optimizers, name)(**FORMS[name][0], **options)


def table_and_variable(seed=4):
    start = np.random.default_rng(seed).uniform(-1, 1, (ROWS, DIMENSION)).astype(np.float32)
    return sok.Variable(start, name="items"), tf.Variable(start)


def step(random, pairs):
    """One step of all rows by each (optimizer, table or variable)."""
    gradient = tf.constant(random.uniform(-1, 1, (ROWS, DIMENSION)).astype(np.float32))
    for optimizer, variable in pairs:
        optimizer.apply_gradients([(gradient, variable)])


@libraries
@forms
def test_an_option_set_between_steps_keeps_the_states(name, library):
    table, variable = table_and_variable()
    wrapper, plain = sok.OptimizerWrapper(make(library, name)), make(library, name)
    random = np.random.default_rng(5)
    for clip in (None, CLIP, None):  # fused, on rows, fused again
        for optimizer in (wrapper.optimizer, plain):
            optimizer.clipvalue = clip
        for _ in range(4):
            step(random, [(wrapper, table), (plain, variable)])
            reference.assert_close(table, variable, 2e-6, message=f"{name} clipvalue={clip}")
        assert list(wrapper.slots(table)) == FORMS[name][1]
    assert wrapper._tables.rows is not None


@libraries
@forms
@pytest.mark.parametrize("wrote", ["fused", "on rows"])
def test_a_dump_of_one_form_loads_into_the_other(wrote, name, library, tmp_path):
    clips = [{}, {"clipvalue": CLIP}]
    first, second = clips if wrote == "fused" else clips[::-1]
    table, variable = table_and_variable()
    wrapper, plain = sok.OptimizerWrapper(make(library, name, **first)), make(library, name, **first)
    random = np.random.default_rng(6)
    for _ in range(4):
        step(random, [(wrapper, table), (plain, variable)])
    sok.dump(str(tmp_path / "dump"), [table], optimizer=wrapper, progress=False)
    other, _ = table_and_variable(7)
    resumed = sok.OptimizerWrapper(make(library, name, **second))
    sok.load(str(tmp_path / "dump"), [other], optimizer=resumed, progress=False)
    plain.clipvalue = second.get("clipvalue")
    for _ in range(4):
        step(random, [(resumed, other), (plain, variable)])
        reference.assert_close(other, variable, 2e-6, message=name)
    assert sorted(resumed.slots(other)) == sorted(FORMS[name][1])


@libraries
def test_a_distributed_optimizer_keeps_them_too(library):
    table, variable = table_and_variable()
    averaging, plain = sok.DistributedOptimizer(make(library, "Adagrad")), make(library, "Adagrad")
    random = np.random.default_rng(8)
    for clip in (None, CLIP):
        averaging.clipvalue = plain.clipvalue = clip
        step(random, [(averaging, table), (plain, variable)])
    reference.assert_close(table, variable, 2e-6)
    assert list(averaging.sok_slots(table)) == ["accumulator"]


DECAYING: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("Adam", {}),
    "clipvalue": ("Adam", {"clipvalue": 1e9}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "Lion": ("Lion", {}),
    "Nadam": ("Nadam", {}),
}


@libraries
@pytest.mark.parametrize("form", DECAYING)
@pytest.mark.parametrize("wrap", [sok.OptimizerWrapper, sok.DistributedOptimizer])
@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_what_is_excluded_from_weight_decay(by, wrap, form, library):
    name, options = DECAYING[form]
    if library == "tf_keras":
        options = {**options, "jit_compile": False}
    start = np.full((ROWS, DIMENSION), 10, np.float32)
    tables = [sok.Variable(start, name=each) for each in ("decays", "spared")]
    variables = [tf.Variable(start, name=each) for each in ("decays", "spared")]
    optimizers = []
    for pair in (tables, variables):
        optimizer = getattr(LIBRARIES[library].optimizers, name)(0.1, weight_decay=0.5, **options)
        optimizer.exclude_from_weight_decay(**{by: pair[1:] if by == "var_list" else ["^spared"]})
        optimizers.append(optimizer)
    stepping = wrap(optimizers[0])
    random = np.random.default_rng(9)
    for _ in range(3):
        gradients = tf.constant(random.uniform(-1, 1, (2, ROWS, DIMENSION)).astype(np.float32))
        stepping.apply_gradients(list(zip(gradients, tables, strict=True)))
        optimizers[1].apply_gradients(list(zip(gradients, variables, strict=True)))
    for table, variable in zip(tables, variables, strict=True):
        reference.assert_close(table, variable, 2e-6, message=table.table_name)
    assert (tables[0].numpy() < 9).all() and (tables[1].numpy() > 9).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_excluded_tables_that_come_later(compiled):
    """The optimizer on rows makes another twin for them."""
    optimizer = keras.optimizers.Lion(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["spared"])
    wrapper = sok.OptimizerWrapper(optimizer)
    names = ("spared", "decays", "spared_too")
    tables = [sok.Variable(np.full((ROWS, DIMENSION), 10, np.float32), name=name) for name in names]

    for count in (1, 2, 3):
        shown = tables[:count]
        wrapper.build(shown)  # what a function would make when it is traced again, TensorFlow refuses

        def step(shown=shown):
            wrapper.apply_gradients([(tf.zeros([ROWS, DIMENSION]), table) for table in shown])

        (tf.function(step) if compiled else step)()
    for table, expected in zip(tables, (10, 10 * 0.95**2, 10), strict=True):
        np.testing.assert_allclose(table, np.full((ROWS, DIMENSION), expected), rtol=1e-6)


@libraries
def test_a_schedule_set_between_steps_on_rows(library):
    kit = LIBRARIES[library]
    table, variable = table_and_variable()
    wrapper, plain = sok.OptimizerWrapper(kit.optimizers.Lion(0.1)), kit.optimizers.Lion(0.1)
    random = np.random.default_rng(10)
    for rate in (None, kit.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)):
        for optimizer in (wrapper.optimizer, plain):
            if rate is not None:
                optimizer.learning_rate = rate
        for _ in range(2):
            step(random, [(wrapper, table), (plain, variable)])
            reference.assert_close(table, variable, 2e-6)


LEGACY = tf_keras.optimizers.legacy


@pytest.mark.parametrize("cls", [getattr(LEGACY, name) for name in FORMS if name != "AdamW"])
def test_each_setting_of_a_legacy_optimizer_is_read(cls):
    """They keep some as hyper-parameters and some as attributes."""
    optimizer = cls(0.25)
    names = set(optimizer.get_config()) - {"name", "decay"}  # decay is a part of the learning rate
    found = hyperparameters.settings(optimizer, lambda: optimizer.iterations)
    assert names <= set(found)
