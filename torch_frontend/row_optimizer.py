# SPDX-License-Identifier: Apache-2.0
"""Runs an optimizer that the core does not fuse on the rows of the step alone, in PyTorch.

The rows and their states are gathered into a small float32 parameter, the optimizer steps that, and both are scattered
back, rows of 16 bits rounded.
This is right for optimizers that treat each row by itself, which all of torch.optim do but those refused below.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.optimizers import NotFused, steps_whole_tables
from sparse_operation_kit.torch import stamps
from sparse_operation_kit.torch.gradient import Rows
from sparse_operation_kit.torch.keyed_shard import fill_column, is_by_slot
from sparse_operation_kit.torch.table_parameter import TableParameter


def check(optimizer: torch.optim.Optimizer, reason: NotFused) -> None:
    """Raises NotImplementedError for an optimizer that cannot run on some rows alone."""
    if (name := steps_whole_tables(type(optimizer))) is not None:
        raise NotImplementedError(
            f"a table cannot be stepped by {name}: its step of one row depends on the others. Use two optimizers, "
            "and give the tables to one that treats each row by itself"
        ) from reason


def new_states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], table: TableParameter) -> dict[str, Tensor]:
    """The states of all slots that the first step of a table needs. NotImplementedError for what it cannot keep."""
    if optimizer.state.get(table):
        return {}
    initial, _ = initial_state(optimizer, group, table)
    return {key: table.new_state(key, value) for key, value in initial.items()}


def step(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    table: TableParameter,
    gradient: Rows,
    made: Mapping[str, Tensor],
) -> None:
    """Steps the rows gradient.slots (distinct) of `table`; its states are optimizer.state[table] as ever. made: of
    `new_states`.
    """
    slots = gradient.slots
    state = optimizer.state.get(table)
    if state:
        make_columns(optimizer, group, table, state)
        per_row = {key for key, value in state.items() if _is_per_row(value, table.shape[0])}
        small = {key: value[slots] if key in per_row else value for key, value in state.items()}
    else:
        per_row = set(made)
        small = {}
    rows = torch.nn.Parameter(table.detach()[slots].to(torch.float32))
    rows.grad = gradient.values
    small = _step_alone(optimizer, group, rows, small)
    with stamps.marking(table, lambda: slots):
        table.detach()[slots] = rows.detach().to(table.dtype)
    if table._index is not None:
        table._index.end_step()
    if not small:
        return
    state = optimizer.state[table]
    for key, value in small.items():
        if key not in per_row:
            state[key] = value
            continue
        if key in made:
            state[key] = made[key]
        state[key][slots] = value


def make_columns(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], table: TableParameter, state: dict[str, Any]
) -> None:
    """States of a table that are no columns of it (load_state_dict brought them) become columns."""
    brought = [key for key, value in state.items() if is_by_slot(value) and not table.has_column(value)]
    if brought:
        initial, _ = initial_state(optimizer, group, table)
        for key in brought:
            state[key] = fill_column(table, table.new_state(key, initial[key]), state[key])


def initial_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], table: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the optimizer's states of a table are before its first gradient: [1, ...] for each state that has rows; and
    the others (a step count and the like), as they are after one step.

    A step of a few rows with zero gradients shows it, because it leaves the states of each at their initial values.
    """
    dimension = table.shape[1]
    count = 3 if dimension != 3 else 2
    rows = torch.nn.Parameter(torch.zeros((count, dimension), dtype=torch.float32, device=table.device))
    rows.grad = torch.zeros_like(rows)
    states = _step_alone(optimizer, group, rows, {})
    per_row = {key: value[:1] for key, value in states.items() if _is_per_row(value, count)}
    return per_row, {key: value for key, value in states.items() if key not in per_row}


def _is_per_row(value: Any, num_rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 1 and value.shape[0] == num_rows


def _step_alone(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rows: torch.nn.Parameter, state: dict[str, Any]
) -> dict[str, Any]:
    """One step of `rows` with the options of `group`, by a twin of the optimizer that knows nothing else."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # what a scheduler put in its place counts the steps of the original
    twin._optimizer_step_pre_hooks = collections.OrderedDict()
    twin._optimizer_step_post_hooks = collections.OrderedDict()
    twin.state = collections.defaultdict(dict)
    twin.param_groups = [{**group, "params": [rows]}]
    if state:
        twin.state[rows] = state
    twin.step()
    result: dict[str, Any] = twin.state[rows]
    return result
