# SPDX-License-Identifier: Apache-2.0
"""The fused update of tables: their optimizer states, and one `apply` op for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from sparse_operation_kit.optimizers import FIELDS, StateSpec
from sparse_operation_kit.tensorflow import devices, stamps, stored
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.agreement import Agreement
from sparse_operation_kit.tensorflow.call import Tables, distinct
from sparse_operation_kit.tensorflow.gradient import GradientInputs
from sparse_operation_kit.tensorflow.hyperparameters import Step, double, hyperparameter_tensor
from sparse_operation_kit.tensorflow.saving import StateVariable
from sparse_operation_kit.tensorflow.table_stack import Member
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table

_DECAY = FIELDS.index("weight_decay")


class TableStates(trackable.Trackable):  # type: ignore[misc]
    """The optimizer states of tables: variables of the shard's shape, made at the first step and kept."""

    def __init__(self) -> None:
        self._tables: dict[str, TableVariable] = {}
        self._states: dict[str, dict[str, StateVariable]] = {}
        self._stamps: dict[tuple[str, ...], stamps.Together] = {}

    def get(self, table: TableVariable, optimizer: str, specs: Sequence[StateSpec]) -> list[StateVariable]:
        """The table's states in the order of `specs`, making those that are not there."""
        key = table._unique_id
        self._tables[key] = table
        states = self._states.setdefault(key, {})
        for spec in specs:
            if spec.name not in states:
                with tf.init_scope(), devices.beside(table), stored.alone([table]):
                    states[spec.name] = table.new_state(
                        f"{table.table_name}/{optimizer}/{spec.name}", spec.initial, spec.rowwise
                    )
                self._track(states[spec.name], f"{table.table_name}/{spec.name}")
        return [states[spec.name] for spec in specs]

    def _track(self, state: tf.Variable, name: str) -> None:
        """Saves the state in checkpoints, and gives it what a checkpoint that was restored before has for it."""
        known = self._trackable_children()
        number = next(n for n in itertools.count() if (f"{name}_{n}" if n else name) not in known)
        with tf.init_scope():
            self._track_trackable(state, f"{name}_{number}" if number else name)

    def make_awaited(self, table: TableVariable, optimizer: str, specs: Sequence[StateSpec]) -> None:
        """Makes the states of a table for which a checkpoint was restored: TensorFlow fills them when they are made."""
        awaited = self._deferred_dependencies
        self.get(table, optimizer, [spec for spec in specs if f"{table.table_name}/{spec.name}" in awaited])

    def stamps(self, tables: Sequence[TableVariable]) -> tf.Tensor:
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

    def of(self, table: Any) -> Mapping[str, Any]:
        """The states that a table has so far, by name; of a member of a stack copies of its part.

        Raises TypeError for anything else.
        """
        if isinstance(table, Member):
            return {name: state[table.slots] for name, state in self.of(table.stack).items()}
        return dict(self._states.get(as_table(table)._unique_id, {}))

    def items(self) -> Iterator[tuple[TableVariable, Mapping[str, StateVariable]]]:
        """The tables that have states, in the order in which they were first seen, with their states by name."""
        return ((self._tables[key], states) for key, states in self._states.items())

    def variables(self) -> list[tf.Variable]:
        """All states of all tables."""
        return [state for states in self._states.values() for state in states.values()]


def apply(
    step: Step,
    pairs: Sequence[tuple[Any, TableVariable]],
    states: TableStates,
    decays: Callable[[TableVariable], bool],
    agreement: Agreement,
) -> Any:
    """Updates the tables of (gradient, table) pairs with one op; a table may occur more than once.

    Args:
      step: what the optimizer does now.
      pairs: gradients as PendingGradient, tf.IndexedSlices or dense tensors.
      states: where the tables' states are.
      decays: whether weight decay applies to a table.
      agreement: of the ranks, before a row changes.

    Returns:
      The operation (None in eager mode).
    """
    tables, positions = distinct([table for _, table in pairs])
    gradients = [gradient for gradient, _ in pairs]
    spec = step.spec
    slots = [state for table in tables for state in states.get(table, spec.name, step.states)]
    values = spec.values()
    decayed = [decays(table) for table in tables]
    rows = [values]
    if not all(decayed):
        rows = [values if decay else [*values[:_DECAY], 0.0, *values[_DECAY + 1 :]] for decay in decayed]
    with tf.device(devices.HOST):
        hyperparameters = hyperparameter_tensor(rows)
    # In a tf.compat.v1 graph a state may not have met its table yet: each is initialised when the session likes.
    in_graph = not tf.executing_eagerly() and not tf.inside_function()
    shown = [op for state in slots if in_graph and (op := state.show()) is not None]
    stamped = states.stamps(tables)

    def inputs_of(given: Sequence[bool]) -> dict[str, Any]:
        """Of the op, for those gradients that are given."""
        collected = GradientInputs(len(tables))
        for gradient, position, is_given in zip(gradients, positions, given, strict=True):
            if is_given:
                collected.add(position, gradient)
        scale = step.gradient_scale * spec.gradient_sign
        if any(each != 1.0 for each in collected.scales):
            scale = scale * np.array(collected.scales)
        with tf.device(devices.HOST):
            scale = double(scale)
        return {"gradient_scale": scale, **collected.arguments()}

    def updates(op: Callable[..., Any], inputs: dict[str, Any], **more: Any) -> Any:
        return op(
            tables=[table.handle for table in tables],
            states=[state.handle for state in slots],
            stamps=stamped,
            hyperparameters=hyperparameters,
            kind=int(spec.kind),
            flags=[int(spec.flags)] * len(tables),
            **inputs,
            **Tables.of(tables).attributes(),
            **more,
        )

    # What the update alone has to wait for, its inputs must not: a number on the host that waits for an op of a GPU
    # waits until the GPU is done with all that is queued.
    whole = inputs_of([True] * len(pairs))
    with tf.control_dependencies(shown):
        agreed = agreement.reach(gradients, lambda given: updates(ops.sok_check_updates, inputs_of(given)))
    with tf.control_dependencies([*shown, *agreed]), stored.alone(tables, whole):
        return agreement.update(lambda told: updates(ops.sok_apply, whole, communicator=told))
