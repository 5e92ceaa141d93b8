# SPDX-License-Identifier: Apache-2.0
"""dump, load and changed rows: `sparse_operation_kit.frontend` over PyTorch's tables and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.checkpoint.variables import StateShard, TableShard, TrainedBy
from sparse_operation_kit.frontend import Frontend
from sparse_operation_kit.optimizers import Flags, NotFused, StateSpec, slot_name_from_torch, slot_name_of_torch
from sparse_operation_kit.torch import hyperparameters, row_optimizer
from sparse_operation_kit.torch.errors import check_errors
from sparse_operation_kit.torch.group import Group
from sparse_operation_kit.torch.held import Column, Replicated, Table
from sparse_operation_kit.torch.optimizer import OptimizerWrapper
from sparse_operation_kit.torch.own_optimizers import OwnOptimizer
from sparse_operation_kit.torch.table_parameter import TableParameter, TableRows
from sparse_operation_kit.torch.table_stack import TableStack


class _PyTorch(Frontend[Table]):
    version = f"torch {torch.__version__}"

    def group(self) -> Group:
        return Group()

    def settle(self) -> None:
        check_errors()

    def members(self, value: Any) -> Sequence[Any]:
        return list(value.members.values()) if isinstance(value, TableStack) else [value]

    def held(self, value: Any) -> Table | None:
        return value.held() if isinstance(value, TableRows) else None

    def held_in_layer(self, variable: Any) -> Table:
        return variable.held() if isinstance(variable, TableParameter) else Replicated(variable)

    def trained(self, optimizer: Any, tables: Sequence[Table]) -> tuple[Sequence[TableShard], TrainedBy]:
        wrapped = optimizer.optimizer if isinstance(optimizer, OptimizerWrapper) else optimizer
        if not isinstance(wrapped, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a sok.OptimizerWrapper or of torch.optim, got {type(optimizer).__name__}"
            )
        shards, name = [], hyperparameters.class_name(wrapped) or type(wrapped).__name__
        for table in tables:
            group = _group_of(wrapped, table.variable)
            state = wrapped.state.get(table.variable, {})
            try:
                spec = hyperparameters.read(wrapped, group, hyperparameters.next_step(state))
            except NotFused as reason:
                row_optimizer.check(wrapped, reason)
                shards.append(_row_shard(wrapped, group, table))
            else:
                name = spec.name
                pieces = [(slot_name_of_torch(name, piece.name), piece) for piece in spec.states]
                counts = hyperparameters.has_step(spec) or hasattr(wrapped, "fused_spec")
                shards.append(
                    TableShard(
                        table,
                        [_state(wrapped, table, key, piece) for key, piece in pieces],
                        hyperparameters.settings(group),
                        bool(spec.flags & Flags.LEARNING_RATE_IN_MOMENTUM),
                        iterations=int(state.get("step", 0)) if counts else None,
                        restore=_counter(wrapped, table.variable, counts),
                    )
                )
        return shards, TrainedBy(name)


_frontend = _PyTorch()
dump = torch.no_grad()(_frontend.dump)
dump_async = torch.no_grad()(_frontend.dump_async)
has_dump = _frontend.has_dump
load = torch.no_grad()(_frontend.load)
track_changes = torch.no_grad()(_frontend.track_changes)
incremental_model_dump = torch.no_grad()(_frontend.incremental_model_dump)
save_incremental = torch.no_grad()(_frontend.save_incremental)
load_incremental = torch.no_grad()(_frontend.load_incremental)
expire = torch.no_grad()(_frontend.expire)
increments = torch.no_grad()(_frontend.increments)
export_for_serving = torch.no_grad()(_frontend.export_for_serving)


def _group_of(optimizer: torch.optim.Optimizer, table: TableParameter) -> Mapping[str, Any]:
    for group in optimizer.param_groups:
        if any(parameter is table for parameter in group["params"]):
            return group
    if isinstance(optimizer, OwnOptimizer):  # it attaches parameters when it first steps them
        return optimizer.param_groups[0]
    raise ValueError(f"table '{table.name}' is not among the parameters of the {type(optimizer).__name__}")


def _state(optimizer: torch.optim.Optimizer, held: Table, key: str, piece: StateSpec) -> StateShard:
    table = held.variable
    present = hyperparameters.present_state(optimizer.state.get(table, {}), key, table)

    def make() -> Column:
        state = hyperparameters.present_state(optimizer.state.get(table, {}), key, table)
        if state is None:  # another member of its stack may have made it
            state = hyperparameters.make_state(piece, table)
            optimizer.state[table][key] = state
        return Column(state, held.within)

    if present is not None:
        present = hyperparameters.as_column(table, key, piece, optimizer.state[table])
        shape = table.shape[:1] if piece.rowwise else table.shape
        if present.shape != shape or present.dtype != torch.float32:
            raise ValueError(
                f"the optimizer state '{key}' of table '{table.name}' is {list(present.shape)} {present.dtype}, must "
                f"be {list(shape)} float32"
            )
    return StateShard(piece, None if present is None else Column(present, held.within), make)


def _counter(optimizer: torch.optim.Optimizer, table: TableParameter, counts: bool) -> Any:
    def restore(iterations: int | None, scalars: Mapping[str, float]) -> None:
        del scalars
        if counts and iterations is not None:
            hyperparameters.set_steps(optimizer.state[table], iterations)

    return restore


def _row_shard(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], held: Table) -> TableShard:
    """A table that PyTorch steps on rows: its states are whatever its optimizer makes."""
    table = held.variable
    rows, others = row_optimizer.initial_state(optimizer, group, table)
    state = optimizer.state.get(table, {})
    name = hyperparameters.class_name(optimizer) or type(optimizer).__name__
    pieces = []
    for key, value in rows.items():
        first = value[:1].flatten()
        if (
            value.shape[1:] not in (table.shape[1:], ())
            or value.dtype != torch.float32
            or not bool((first == first[0]).all())
        ):
            raise NotImplementedError(
                f"the state '{key}' of {name} cannot be dumped or loaded: it is {list(value.shape)} {value.dtype} a row"
            )
        slot = slot_name_from_torch(name, key)
        pieces.append((key, StateSpec(slot, rowwise=value.dim() == 1, initial=float(first[0]))))
    numbers = {key: value for key, value in others.items() if key != "step"}
    for key, value in numbers.items():
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise NotImplementedError(f"the state '{key}' of {name} cannot be dumped or loaded: it is {value!r}")

    def restore(iterations: int | None, scalars: Mapping[str, float]) -> None:
        if iterations == 0:  # its first step makes its states, which may be a step of another kind
            optimizer.state.pop(table, None)
            return
        own = optimizer.state[table]
        for key, value in others.items():
            own.setdefault(key, value)
        if iterations is not None and "step" in others:
            hyperparameters.set_steps(own, iterations)
        for key in numbers:
            if key in scalars:
                own[key] = _like(own[key], scalars[key])

    return TableShard(
        held,
        [_state(optimizer, held, key, piece) for key, piece in pieces],
        hyperparameters.settings(group),
        iterations=int(state.get("step", 0)) if "step" in others or not state else None,
        scalars={key: float(state[key]) for key in numbers if key in state},
        restore=restore,
    )


def _like(old: Any, value: float) -> Any:
    return torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)
