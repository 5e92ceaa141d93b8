# SPDX-License-Identifier: Apache-2.0
"""Optimizers that the core does not have: run by their own framework, on the rows of the step alone.

For each table the rows that the gradient names and their states are copied into small variables, a twin of the wrapped
optimizer updates those as it updates any variable, and they are written back. The small variables are float32 whatever
the rows are, which are rounded as they are written.

That is right for optimizers that treat each element, or each row, by itself. All of Keras's do, but those that are
refused below. Of other classes no more is known than their names and those of their bases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from sparse_operation_kit.optimizers import StateSpec, steps_whole_tables
from sparse_operation_kit.tensorflow import devices, keras_compat, runtime, stored
from sparse_operation_kit.tensorflow.call import Tables, distinct
from sparse_operation_kit.tensorflow.gradient import GradientInputs, reduce
from sparse_operation_kit.tensorflow.table_step import TableStates
from sparse_operation_kit.tensorflow.table_variable import TableVariable

# Keras's attribute -> the state's name in checkpoints, of classes that have no fused form.
_STATE_NAMES = {
    "_momentums": "m",
    "_velocities": "v",
    "_velocity_hats": "vhat",
    "_m": "m",
    "_u": "v",
    "momentums": "momentum",
}


_OPTIONS = {
    "use_ema": "it needs every row at every step",
    "gradient_accumulation_steps": "it keeps gradients of every row between steps; take a larger batch, or add up the "
    "losses of several before one step",
    "gradient_transformers": "they would see gradients of tables before those of equal keys are summed, and apart from "
    "those of dense variables; transform the gradients yourself before apply_gradients",
}
"""Options of optimizers with which tables cannot be updated, and why."""


class RowOptimizer(trackable.Trackable):  # type: ignore[misc]
    """Runs an optimizer of Keras 3 or tf_keras on the rows of a step."""

    def __init__(self, optimizer: Any, reason: str, states: TableStates) -> None:
        name = getattr(type(optimizer), "_sok_base", type(optimizer)).__name__
        self._kind = keras_compat.family(optimizer)
        for option, why in _OPTIONS.items():
            if getattr(optimizer, option, None):
                raise NotImplementedError(f"tables cannot be updated by {name} with {option}: {why}")
        if self._kind not in (keras_compat.KERAS, keras_compat.TF_KERAS):
            raise NotImplementedError(
                f"tables cannot be updated by {name}: the core has no fused form of it ({reason}), and only optimizers "
                "of Keras 3 and tf_keras (not its legacy ones) can run on the rows of a step instead"
            )
        if (whole := steps_whole_tables(type(optimizer))) is not None:
            raise NotImplementedError(
                f"tables cannot be updated by {whole}: its step of a row depends on all rows of the variable. Use two "
                "optimizers, and give the tables to one that treats each row by itself"
            )
        if hasattr(optimizer, "inner_optimizer"):
            raise NotImplementedError(
                f"tables cannot be updated by {name}: give the wrapped optimizer itself, with loss_scale_factor where "
                "losses are scaled"
            )
        for option in ("clipnorm", "global_clipnorm"):
            if getattr(optimizer, option, None) and runtime.get().num_ranks > 1:
                raise NotImplementedError(
                    f"tables cannot be updated by {name} with {option} on several ranks: a rank knows the norm of its "
                    "own rows only; clip with sok.clip_by_global_norm before apply_gradients, or use clipvalue"
                )
        self._optimizer = optimizer
        self._states = states
        self._tables: list[TableVariable] = []
        self._rows: list[tf.Variable] = []
        self._row_states: list[dict[str, tf.Variable]] = []
        self._specs: tuple[StateSpec, ...] = ()
        self._twin: Any = None
        self.scalars: dict[str, Any] = {}
        """Variables of the optimizer that are one number for all tables (Nadam's u_product), by name."""

    def apply(self, pairs: Sequence[tuple[Any, TableVariable]], counter: Any) -> None:
        """Updates the tables of (gradient, table) pairs; `counter` holds how many steps there were before."""
        if not tf.executing_eagerly() and not tf.inside_function():
            raise NotImplementedError(
                f"{type(self._optimizer).__name__} updates tables eagerly or in a tf.function, not in a tf.compat.v1 "
                "graph"
            )
        self._check_counts()
        tables, _ = distinct([table for _, table in pairs])
        self.prepare(tables)
        inputs = GradientInputs(len(pairs))
        for position, (gradient, table) in enumerate(pairs):
            if stored.has_store(table):
                inputs.add(position, gradient)
        with stored.alone(tables, inputs.arguments()):
            slots, gradients, rows = [], [], []
            for table in tables:
                own = [gradient for gradient, other in pairs if other is table]
                where, values = reduce(table.handle, Tables.of([table]), own)
                position = next(i for i, known in enumerate(self._tables) if known is table)
                self._rows[position].assign(tf.cast(table.read_slots(where), tf.float32))
                for name, state in self._row_states[position].items():
                    state.assign(tf.gather(self._states.of(table)[name], where))
                slots.append((position, where))
                gradients.append(values)
                rows.append(self._rows[position])
            self._step(gradients, rows, counter)
            for position, where in slots:
                table = self._tables[position]
                table.write_slots(where, tf.cast(self._rows[position], table.dtype))
                for name, state in self._row_states[position].items():
                    self._states.of(table)[name].write_slots(where, state)
                table.end_step()

    def _check_counts(self) -> None:
        """Raises NotImplementedError for tf_keras's Nadam in what is compiled. Its count of products is a number of
        Python, which stands still there: rows would become NaN, or be stepped too far, without an error.
        """
        is_nadam = self._kind == keras_compat.TF_KERAS and keras_compat.library_class(self._optimizer) == "Nadam"
        if is_nadam and (not tf.executing_eagerly() or self._optimizer.jit_compile):
            raise NotImplementedError(
                "tables cannot be updated by Nadam of tf_keras in a tf.function (as fit makes one) or compiled by XLA, "
                "since it counts its steps in Python: step eagerly, with Nadam(..., jit_compile=False), or take Adam, "
                "or Nadam of Keras 3"
            )

    def prepare(self, tables: Sequence[TableVariable]) -> tuple[StateSpec, ...]:
        """Makes the states of tables that have none yet. Returns what states each table has."""
        with tf.init_scope():
            new = [table for table in tables if not any(table is known for known in self._tables)]
            if new:
                self._prepare([*self._tables, *new])
        return self._specs

    def resume(self, scalars: Mapping[str, float]) -> None:
        """Takes over what `scalars` were in another process."""
        for name, variable in self.scalars.items():
            if name in scalars:
                variable.assign(scalars[name])

    def _step(self, gradients: list[Any], rows: list[tf.Variable], counter: Any) -> None:
        twin = self._twin
        _copy_settings(self._optimizer, twin)
        scale = getattr(self._optimizer, "loss_scale_factor", None)
        if scale is not None:
            gradients = [gradient / scale for gradient in gradients]
        keras_compat.step_rows(twin, gradients, rows, counter)

    def _prepare(self, tables: list[TableVariable]) -> None:
        """Makes the twin, the small variables, and the states of tables that have none."""
        optimizer = self._optimizer
        base = getattr(type(optimizer), "_sok_base", type(optimizer))  # below what DistributedOptimizer made of it
        twin = base.from_config(_config(optimizer, base))
        _copy_settings(optimizer, twin)
        dimensions = [table.placement.dimension for table in tables]
        models = [
            tf.Variable(tf.zeros([1, dimension]), name=t.table_name)
            for t, dimension in zip(tables, dimensions, strict=True)
        ]
        before = {name: value for name, value in vars(twin).items() if isinstance(value, (list, tuple))}
        twin.build(models)
        lists = {
            name: list(value)
            for name, value in vars(twin).items()
            if isinstance(value, (list, tuple))
            and before.get(name) is not value
            and len(value) == len(tables)
            and name not in ("_variables", "_trainable_variables", "_build_input_shape")
        }
        self._check_states(lists, dimensions)
        self._rows = [_small(table) for table in tables]
        self._row_states = [{} for _ in tables]
        specs: dict[str, StateSpec] = {}
        names = _STATE_NAMES | keras_compat.state_names(optimizer)
        for attribute, values in lists.items():
            name = names.get(attribute, attribute.strip("_"))
            small = []
            for position, value in enumerate(values):
                specs[name] = StateSpec(name, initial=float(tf.convert_to_tensor(value).numpy()[0, 0]))
                small.append(_small(tables[position]))
                self._row_states[position][name] = small[-1]
            object.__setattr__(twin, attribute, small)
        keras_compat.set_places(twin, self._rows)
        by_key = {twin._var_key(row): table for row, table in zip(self._rows, tables, strict=True)}
        # What is excluded from weight decay is known by name or identity, which are the table's and not the rows'.
        decays = lambda row: keras_compat.uses_weight_decay(optimizer, by_key[twin._var_key(row)])  # noqa: E731
        object.__setattr__(twin, "_use_weight_decay", decays)
        self._specs = tuple(specs.values())
        for table in tables:
            self._states.get(table, type(optimizer).__name__, self._specs)
        for attribute, scalar in _scalars(twin).items():
            name = attribute.strip("_")
            if name not in self.scalars:
                self.scalars[name] = scalar
                self._track_trackable(keras_compat.raw(scalar), name)
            object.__setattr__(twin, attribute, self.scalars[name])  # maybe of the twin before this one
        self._twin, self._tables = twin, tables

    def _check_states(self, lists: dict[str, list[Any]], dimensions: list[int]) -> None:
        for attribute, values in lists.items():
            for value, dimension in zip(values, dimensions, strict=True):
                shape = getattr(value, "shape", None)
                if shape is None or tuple(shape) != (1, dimension):
                    raise NotImplementedError(
                        f"tables cannot be updated by {type(self._optimizer).__name__}: its state "
                        f"{attribute.strip('_')} has the shape {shape} for a row of {dimension} elements, so rows do "
                        "not stand by themselves in it"
                    )


def _config(optimizer: Any, base: Any) -> dict[str, Any]:
    """What an optimizer like it is made of by its class `base`. Its schedule or function is there as it is: Keras
    cannot write every one as plain data and make it anew.
    """
    rate = optimizer._learning_rate
    if callable(rate):
        with_number = object.__new__(base)
        vars(with_number).update(vars(optimizer), _learning_rate=tf.constant(0.0))
        optimizer = with_number
    config: dict[str, Any] = base.get_config(optimizer)
    if callable(rate) and "learning_rate" in config:
        config["learning_rate"] = rate
    return config


def _copy_settings(optimizer: Any, twin: Any) -> None:
    """Takes over what get_config leaves out, and what was assigned since."""
    object.__setattr__(twin, "_learning_rate", optimizer._learning_rate)
    for name, value in vars(optimizer).items():
        if isinstance(value, (bool, int, float, str)) and name not in ("built", "_built", "name", "_name", "_lock"):
            object.__setattr__(twin, name, value)


def _scalars(twin: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(twin).items()
        if isinstance(keras_compat.raw(value), tf.Variable)
        and tuple(value.shape) == ()
        and name not in ("_iterations", "iterations", "_learning_rate", "_current_learning_rate")
    }


def _small(table: TableVariable) -> tf.Variable:
    dimension = table.placement.dimension
    with devices.beside(table):
        return tf.Variable(tf.zeros([0, dimension]), shape=[None, dimension], trainable=False)
