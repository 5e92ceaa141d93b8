# SPDX-License-Identifier: Apache-2.0
"""A model of Keras 3 or tf_keras with tables that stops in the middle and trains on, on any number of ranks.

Each way takes a compiled model after its first epoch, and gives the model that trains the second one, and how `fit` is
called for it. What it trains is compared with a run that was not stopped: weights, rows of tables, states of both, and
the counts of steps.
"""

import contextlib
import copy
import pickle
from typing import Any

import numpy as np

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import keras_optimizers
from sparse_operation_kit.tensorflow.embedding import layer_class

ROWS, BATCH, STEPS = 12, 4, 3


def own(name):
    """A class of this package as an optimizer of a Keras that need not be the active one."""
    return lambda kit: keras_optimizers.form(getattr(sok, name), kit.__name__)


def nadam(kit):
    """Has a number for all rows beside states. (tf_keras's counts in Python, and by itself goes wrong in functions.)"""
    return (kit.optimizers.Lion if kit.__name__ == "tf_keras" else kit.optimizers.Nadam)(0.05)


OPTIMIZERS = {
    "Adam": lambda kit: sok.DistributedOptimizer(kit.optimizers.Adam(0.05)),
    "schedule": lambda kit: sok.DistributedOptimizer(
        kit.optimizers.Adagrad(kit.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    ),
    "on rows": lambda kit: sok.DistributedOptimizer(kit.optimizers.Adam(0.05, amsgrad=True)),
    "Nadam": lambda kit: sok.DistributedOptimizer(nadam(kit)),
    "wrapper": lambda kit: sok.DistributedOptimizer(sok.OptimizerWrapper(kit.optimizers.Adamax(0.05))),
    "row-wise": lambda kit: sok.DistributedOptimizer(own("RowWiseAdagrad")(kit)(0.05)),
    "Ftrl": lambda kit: sok.DistributedOptimizer(
        own("Ftrl")(kit)(kit.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), beta=0.1)
    ),
}
ALONE = {
    "SGD": lambda kit: own("SGD")(kit)(0.05),
    "wrapper": lambda kit: sok.OptimizerWrapper(kit.optimizers.Adam(0.05)),
    "wrapper on rows": lambda kit: sok.OptimizerWrapper(nadam(kit)),
}
"""What averages nothing."""


def make(kit, optimizer, dynamic=False):
    """A compiled model with two tables, whose first weights are the same whenever and wherever it is made."""
    tables = {"items": (ROWS, 3), "users": {"dimension": 3} if dynamic else (ROWS - 3, 3)}
    layer = layer_class(kit)(tables, combiners="sum", initializer="normal")
    inputs = {name: kit.Input((2,), dtype="int64", name=name) for name in tables}
    pooled = layer(inputs)
    start = kit.initializers.Constant([[0.5], [-0.25], [0.125]])
    dense = kit.layers.Dense(1, kernel_initializer=start, name="dense")
    model = kit.Model(inputs, dense(pooled["items"] + pooled["users"]))
    model.compile(optimizer(kit), "mse", jit_compile=False)
    return model


def data():
    rng = np.random.default_rng(5 + sok.rank())
    ids = rng.integers(0, ROWS - 3, (BATCH * STEPS, 2))
    return {"items": ids + 3, "users": ids}, rng.random((BATCH * STEPS, 1)).astype(np.float32)


def fit(model, epochs=1, **options):
    x, y = data()
    model.fit(x, y, epochs=epochs, batch_size=BATCH, shuffle=False, verbose=0, **options)


def tables_of(model):
    return next(layer for layer in model.layers if hasattr(layer, "tables")).tables.values()


def state_of(model):
    """name -> all numbers that a step depends on and changes."""
    optimizer = model.optimizer
    found = {"iterations": np.asarray(optimizer.iterations)}
    for i, table in enumerate(tables_of(model)):
        keys, rows = (np.asarray(part) for part in sok.export(table))
        order = np.argsort(keys)
        found[f"keys {i}"], found[f"rows {i}"] = keys[order], rows[order]
        for name, state in getattr(optimizer, "sok_slots", getattr(optimizer, "slots", None))(table).items():
            found[f"{name} {i}"] = np.asarray(state)[order]
    for layer in model.layers:
        if not hasattr(layer, "tables"):
            found.update({f"{layer.name} {i}": weight for i, weight in enumerate(layer.get_weights())})
    found.update({f"dense state {i}": np.asarray(variable) for i, variable in enumerate(optimizer.variables)})
    return found


def settings(optimizer):
    return {name: value for name, value in optimizer.get_config().items() if name != "name"}


def by_file(kit, model, folder, again):
    path = folder / f"model-{sok.rank()}.keras"
    model.save(path)
    return kit.models.load_model(path), {}


def by_pickle(kit, model, folder, again):
    return pickle.loads(pickle.dumps(model)), {}


def by_copy(kit, model, folder, again):
    return copy.deepcopy(model), {}


def by_weights(kit, model, folder, again):
    path = folder / f"model-{sok.rank()}.weights.h5"
    model.save_weights(path)
    other = again()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    return other, {}


def by_backup(kit, model, folder, again):
    base: Any = kit.callbacks.Callback

    class Killed(Exception):
        pass

    class Kill(base):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise Killed

    path = str(folder / f"backup-{sok.rank()}")
    with contextlib.suppress(Killed):
        fit(again(), epochs=2, callbacks=[kit.callbacks.BackupAndRestore(path), Kill()])
    return again(), {"epochs": 2, "callbacks": [kit.callbacks.BackupAndRestore(path)]}


def by_clone(kit, model, folder, again):
    """A clone begins anew, as a model that has made no step."""
    clone = kit.models.clone_model(model)
    if not hasattr(clone, "optimizer") or clone.optimizer is None:  # tf_keras's is not compiled
        optimizer = model.optimizer
        clone.compile(type(optimizer).from_config(optimizer.get_config()), "mse", jit_compile=False)
    assert clone.optimizer is not model.optimizer
    for ours, theirs in zip(clone.layers, again().layers, strict=True):
        if not hasattr(ours, "tables"):  # those have the same rows
            ours.set_weights(theirs.get_weights())
    return clone, {"epochs": 2}


WAYS = {
    "file": by_file,
    "weights": by_weights,
    "backup": by_backup,
    "pickle": by_pickle,
    "copy": by_copy,
    "clone": by_clone,
}


def assert_same(actual, wanted):
    assert actual.keys() == wanted.keys(), (sorted(actual), sorted(wanted))
    for name, value in wanted.items():
        assert actual[name].shape == value.shape, name
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def check(kit, folder, dynamic=False):
    """All ways with the first optimizer, and one with the others, end where a run ends that was not stopped. dynamic:
    with a dynamic table too, and with the first optimizer alone.
    """
    alone = sok.num_ranks() == 1
    makers = [*OPTIMIZERS.values(), *ALONE.values()] if alone else [OPTIMIZERS[name] for name in ("Adam", "wrapper")]
    if dynamic:
        del makers[1:]
    for number, optimizer in enumerate(makers):
        _check(kit, optimizer, folder, ["file"] if number else WAYS, dynamic)


def _check(kit, optimizer, folder, ways, dynamic):
    whole = make(kit, optimizer, dynamic)
    fit(whole, 2)
    wanted = state_of(whole)
    assert int(wanted["iterations"]) == 2 * STEPS
    first = make(kit, optimizer, dynamic)
    fit(first)
    for way in ways:
        resumed, options = WAYS[way](kit, first, folder, lambda: make(kit, optimizer, dynamic))
        assert resumed is not first
        assert type(resumed.optimizer) is type(first.optimizer), way
        assert settings(resumed.optimizer) == settings(first.optimizer)
        if not options:
            assert_same(state_of(resumed), state_of(first))
        fit(resumed, **options)
        assert_same(state_of(resumed), wanted)
