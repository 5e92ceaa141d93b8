# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a wrapped optimizer, as they are at this step, into the fields of the fused optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.optimizers import NotFused, OptimizerSpec, StateSpec, from_torch, slot_name_of_torch
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.keyed_shard import fill_column
from sparse_operation_kit.torch.table_parameter import has_column, new_column

_CLASSES: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "SGD",
    torch.optim.Adagrad: "Adagrad",
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "AdamW",
    torch.optim.SparseAdam: "SparseAdam",
    torch.optim.Adamax: "Adamax",
    torch.optim.Adadelta: "Adadelta",
    torch.optim.RMSprop: "RMSprop",
}

_WITHOUT_STEP = ("SGD",)
"""Classes whose state in torch.optim has no step count."""


def class_name(optimizer: torch.optim.Optimizer) -> str | None:
    """The name under which the optimizers of torch.optim are fused; None for others, subclasses included."""
    return _CLASSES.get(type(optimizer))


def read(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], step: int) -> OptimizerSpec:
    """The step that `optimizer` takes for a table of `group`; `step` is 1 for the table's first.

    Raises NotFused when the core has no fused form of it.
    """
    spec = getattr(optimizer, "fused_spec", None)
    if spec is not None:  # one of this package's own
        result: OptimizerSpec = spec(group, step)
        return result
    name = class_name(optimizer)
    if name is None:
        raise NotFused(f"the class {type(optimizer).__name__}")
    return from_torch(name, group, step)


_KERAS_NAMES = {"lr": "learning_rate", "eps": "epsilon"}
_NO_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group by Keras's names, as plain numbers, booleans and strings."""
    result: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if name == "betas":
            result.update(zip(("beta_1", "beta_2"), map(float, value), strict=True))
        elif name == "alpha" and "centered" in group:  # RMSprop's; another one is ASGD's
            result["rho"] = float(value)
        elif name not in _NO_SETTINGS and isinstance(value, (bool, int, float, str)):
            result[_KERAS_NAMES.get(name, name)] = value
    return result


def has_step(spec: OptimizerSpec) -> bool:
    """Whether torch.optim keeps a step count in the state of a parameter."""
    return spec.name not in _WITHOUT_STEP


def counts_steps(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the fused step of the tables of `group`, if there is one, has a step count."""
    name = class_name(optimizer)
    if name is not None:
        return name not in _WITHOUT_STEP
    spec = getattr(optimizer, "fused_spec", None)
    return spec is not None and has_step(spec(group, 1))


def next_step(state: Mapping[str, Any]) -> int:
    """The number of the coming step, 1 for the first."""
    step = state.get("step")
    return 1 if step is None else int(step) + 1


def set_steps(state: dict[str, Any], steps: int) -> None:
    """Sets the step count of a parameter's state, in the form that torch.optim keeps it."""
    step = state.get("step")
    if isinstance(step, Tensor):
        step.fill_(steps)
    else:
        state["step"] = torch.tensor(float(steps), device="cpu") if step is None else type(step)(steps)


def count_steps(states: Iterable[dict[str, Any]]) -> None:
    """Raises the step counts of parameters' states, each in the form that torch.optim keeps it."""
    tensors: list[Tensor] = []
    for state in states:
        step = state.get("step")
        if step is None:
            state["step"] = torch.tensor(1.0, dtype=torch.float32, device="cpu")  # read on the host at each step
        elif isinstance(step, Tensor):
            tensors.append(step)
        else:
            state["step"] = step + 1
    if tensors:
        ops.count_up(tensors)


def state_tensors(spec: OptimizerSpec, state: dict[str, Any], table: Tensor) -> list[Tensor]:
    """The state tensors of a table in the core's order, made when they are not there yet.

    They live in `optimizer.state[table]` under torch.optim's names, so that state_dict() holds them.
    """
    if not spec.states:
        return []
    return [_state_tensor(slot_name_of_torch(spec.name, piece.name), piece, state, table) for piece in spec.states]


def make_state(piece: StateSpec, table: Tensor) -> Tensor:
    """A state of a table before its first step."""
    return new_column(table, 0 if piece.rowwise else table.shape[1], piece.initial)


def present_state(state: Mapping[str, Any], key: str, table: Tensor) -> Tensor | None:
    """A state of a table as it is so far, None before it is made."""
    tensor: Tensor | None = state.get(key)
    if tensor is None or "step" not in state or next_step(state) > 1:
        return tensor
    # torch.optim.Adagrad makes its state beforehand, in the dtype of the rows, and of as many as there are then.
    is_of_rows = tensor.dtype == table.dtype != torch.float32 or not has_column(table, tensor)
    return None if is_of_rows else tensor


def as_column(table: Tensor, key: str, piece: StateSpec, state: dict[str, Any]) -> Tensor:
    """A state of a table that is there. That of a dynamic table which is no column of it becomes one."""
    tensor: Tensor = state[key]
    if not has_column(table, tensor):
        tensor = state[key] = fill_column(table, make_state(piece, table), tensor)
    return tensor


def _state_tensor(key: str, piece: StateSpec, state: dict[str, Any], table: Tensor) -> Tensor:
    tensor = present_state(state, key, table)
    if tensor is None:
        tensor = state[key] = make_state(piece, table)
    return tensor
