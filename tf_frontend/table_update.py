# SPDX-License-Identifier: Apache-2.0
"""The fused update of tables: their optimizer states, and one `apply` op for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.optimizers import FIELDS, StateSpec
from sparse_operation_kit.placement import Initializer
from sparse_operation_kit.tensorflow import devices, stamps
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Tables, distinct
from sparse_operation_kit.tensorflow.gradient import GradientInputs
from sparse_operation_kit.tensorflow.hyperparameters import Step, double, hyperparameter_tensor
from sparse_operation_kit.tensorflow.saving import StateVariable
from sparse_operation_kit.tensorflow.variable import Variable, initialize

_DECAY = FIELDS.index("weight_decay")


class TableStates(trackable.Trackable):  # type: ignore[misc]
    """The optimizer states of tables: variables of the shard's shape, made at the first step and kept."""

    def __init__(self) -> None:
        self._tables: dict[str, Variable] = {}
        self._states: dict[str, dict[str, tf.Variable]] = {}
        self._stamps: dict[tuple[str, ...], stamps.Together] = {}

    def get(self, table: Variable, optimizer: str, specs: Sequence[StateSpec]) -> list[tf.Variable]:
        """The table's states in the order of `specs`, making those that are not there."""
        key = table._unique_id
        self._tables[key] = table
        states = self._states.setdefault(key, {})
        for spec in specs:
            if spec.name not in states:
                states[spec.name] = _make_state(table, f"{table.table_name}/{optimizer}/{spec.name}", spec)
                self._track(states[spec.name], f"{table.table_name}/{spec.name}")
        return [states[spec.name] for spec in specs]

    def _track(self, state: tf.Variable, name: str) -> None:
        """Saves the state in checkpoints, and gives it what a checkpoint that was restored before has for it."""
        known = self._trackable_children()
        number = next(n for n in itertools.count() if (f"{name}_{n}" if n else name) not in known)
        with tf.init_scope():
            self._track_trackable(state, f"{name}_{number}" if number else name)

    def stamps(self, tables: Sequence[Variable]) -> tf.Tensor:
        """The stamps of tables, as `SokApply` takes them. The tables must have their states."""
        key = tuple(table._unique_id for table in tables)
        if key not in self._stamps:
            self._stamps[key] = stamps.Together(tables)
        return self._stamps[key].resource_handle

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        children = dict(super()._trackable_children(save_type, **options))
        if save_type == "savedmodel":  # which wants to know of all that its functions capture
            children.update({f"stamps_{i}": together for i, together in enumerate(self._stamps.values())})
        return children

    def of(self, table: Variable) -> Mapping[str, tf.Variable]:
        """The states that a table has so far, by name."""
        return dict(self._states.get(table._unique_id, {}))

    def variables(self) -> list[tf.Variable]:
        """All states of all tables."""
        return [state for states in self._states.values() for state in states.values()]


def _make_state(table: Variable, name: str, spec: StateSpec) -> tf.Variable:
    place = table.placement
    constant = Initializer(_placement.CONSTANT, spec.initial)
    if spec.rowwise:
        narrow = _placement.Placement(place.num_rows, 1, place.owner, place.num_ranks, place.rank)
        first = lambda: tf.reshape(initialize(constant, narrow, 0), [-1])  # noqa: E731
    else:
        first = lambda: initialize(constant, place, 0)  # noqa: E731
    shape = [place.local_rows] if spec.rowwise else list(place.local_shape)
    with tf.init_scope(), devices.beside(table):
        return StateVariable(
            name=name, place=place, initial_value=first, trainable=False, dtype=tf.float32, shape=shape
        )


def apply(
    step: Step,
    pairs: Sequence[tuple[Any, Variable]],
    states: TableStates,
    decays: Callable[[Variable], bool],
) -> Any:
    """Updates the tables of (gradient, table) pairs with one op; a table may occur more than once.

    Args:
      step: what the optimizer does now.
      pairs: gradients as PendingGradient, tf.IndexedSlices or dense tensors.
      states: where the tables' states are.
      decays: whether weight decay applies to a table.

    Returns:
      The operation (None in eager mode).
    """
    tables, positions = distinct([table for _, table in pairs])
    inputs = GradientInputs(len(tables))
    for (gradient, _), position in zip(pairs, positions, strict=True):
        inputs.add(position, gradient)
    spec = step.spec
    slots = [state for table in tables for state in states.get(table, spec.name, step.states)]
    values = spec.values()
    decayed = [decays(table) for table in tables]
    rows = [values]
    if not all(decayed):
        rows = [values if decay else [*values[:_DECAY], 0.0, *values[_DECAY + 1 :]] for decay in decayed]
    with tf.device(devices.HOST):
        hyperparameters = hyperparameter_tensor(rows)
        scale = double(step.gradient_scale * spec.gradient_sign)
    return ops.sok_apply(
        tables=[table.handle for table in tables],
        states=[state.handle for state in slots],
        stamps=states.stamps(tables),
        hyperparameters=hyperparameters,
        gradient_scale=scale,
        kind=int(spec.kind),
        flags=[int(spec.flags)] * len(tables),
        **inputs.arguments(),
        **Tables.of(tables).attributes(),
    )
