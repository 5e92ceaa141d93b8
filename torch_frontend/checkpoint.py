# SPDX-License-Identifier: Apache-2.0
"""dump and load: tables and their optimizer's states in the format that both frontends share (docs/FORMAT.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_operation_kit import checkpoint as _checkpoint
from sparse_operation_kit.checkpoint import variables as _variables
from sparse_operation_kit.checkpoint.conversion import LEARNING_RATE_IN_MOMENTUM
from sparse_operation_kit.optimizers import Flags, NotFused, StateSpec, slot_name_from_torch, slot_name_of_torch
from sparse_operation_kit.torch import hyperparameters, row_optimizer
from sparse_operation_kit.torch.errors import check_errors
from sparse_operation_kit.torch.group import Group
from sparse_operation_kit.torch.optimizer import FusedOptimizer, OptimizerWrapper
from sparse_operation_kit.torch.variable import Variable

_MOMENTUM = ("SGD", "RMSprop")


@torch.no_grad()
def dump(
    path: str | os.PathLike[str],
    vars: Any,
    optimizer: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
    progress: bool | None = None,
) -> None:
    """Writes tables, and with an optimizer their states and step counts, to the directory `path`.

    Called by every rank with the same tables; each writes its rows. The dump appears whole or not at all, in place of
    one that was there. Any number of ranks loads it, in either frontend.

    Args:
      path: a directory that all ranks see.
      vars: tables, or one. Dense parameters are not for this; see :func:`filter_variables`.
      optimizer: the :class:`OptimizerWrapper` (:class:`DistributedOptimizer`, :class:`SGD`, ...) that updates them, or
        the optimizer that it wraps. Its hyper-parameters are written too, for the record.
      step, extra: an integer and plain JSON data of the caller's, which load gives back.
      progress: whether to show a bar; None: on rank 0 of a terminal.

    Raises, on all ranks when on one:
      RuntimeError: before init().
      TypeError: something that is no table, or no optimizer.
      ValueError: a table that is not the optimizer's.
      NotImplementedError: an optimizer that cannot update tables.
      Otherwise what sparse_operation_kit.checkpoint raises (ValueError and OSError); the older dump is then intact.
    """
    group = Group()
    _variables.dump_variables(
        path,
        lambda: _describe(vars, optimizer),
        group=group,
        frontend=f"torch {torch.__version__}",
        step=step,
        extra=extra,
        progress=progress,
    )


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    vars: Any,
    optimizer: Any = None,
    *,
    verify: str = "before",
    progress: bool | None = None,
) -> _checkpoint.Dump:
    """Loads tables, and with an optimizer their states and step counts, from a dump of any number of ranks.

    Called by every rank with the same tables; each reads its rows. A dump of either frontend, or of SparseOperationKit
    2.x. Tables of float16 and bfloat16 load what float32 ones dumped, rounded to nearest, and the reverse, exactly. The
    optimizer must be of the dump's kind (Adam and AdamW count as one); its hyper-parameters stay as they are,
    its step counts become the dump's, so that bias corrections go on. Momentum that Keras dumped becomes PyTorch's,
    which does not hold the learning rate. States of dense parameters are not the dump's, nor are schedulers.

    Args:
      path, vars, optimizer, progress: as of :func:`dump`; `vars` may be some of the dump's tables.
      verify: "before": every byte that is needed is checked before the first row changes, which reads the files
        twice. "during": reads once; damage may be found after some rows have changed.

    Returns:
      The dump, closed: `step` and `extra` as given to dump, `optimizer.name`, `.iterations` and `.hyperparameters`.

    Raises as :func:`dump` does. With verify="before" nothing has changed then.
    """
    group = Group()
    return _variables.load_variables(
        path,
        lambda: _describe(vars, optimizer),
        group=group,
        verify=verify,  # type: ignore[arg-type]
        progress=progress,
    )


# --- where the rows are ----------------------------------------------------------------------------------------------


class _Storage:
    """A tensor: on the CPU read in place, elsewhere copied in pieces."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def read(self, first: int, end: int) -> Any:
        """See Storage."""
        rows = self._tensor[first:end].cpu()
        return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()

    def write(self, slots: Any, values: Any) -> None:
        """See Storage."""
        rows = slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self._tensor.device)
        self._tensor[rows] = torch.from_numpy(np.ascontiguousarray(values)).to(self._tensor.device, self._tensor.dtype)


# --- what there is to dump and load ----------------------------------------------------------------------------------


def _describe(variables: Any, optimizer: Any) -> _variables.Described:
    check_errors()  # a GPU may not have said yet that the last step was wrong
    tables = _tables(variables)
    if optimizer is None:
        return [_shard(table) for table in tables], None
    wrapped = optimizer.optimizer if isinstance(optimizer, OptimizerWrapper) else optimizer
    if not isinstance(wrapped, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a sok.OptimizerWrapper or of torch.optim, got {type(optimizer).__name__}")
    shards, name = [], hyperparameters.class_name(wrapped) or type(wrapped).__name__
    for table in tables:
        group = _group_of(wrapped, table)
        state = wrapped.state.get(table, {})
        try:
            spec = hyperparameters.read(wrapped, group, hyperparameters.next_step(state))
        except NotFused as reason:
            row_optimizer.check(wrapped, reason)
            shards.append(_row_shard(wrapped, group, table))
        else:
            name = spec.name
            momentum = bool(spec.flags & Flags.LEARNING_RATE_IN_MOMENTUM)
            pieces = [(slot_name_of_torch(name, piece.name), piece) for piece in spec.states]
            counts = hyperparameters.has_step(spec) or hasattr(wrapped, "fused_spec")
            shards.append(
                _shard(
                    table,
                    states=[_state(wrapped, table, key, piece) for key, piece in pieces],
                    settings=_settings(name, group, pieces, momentum),
                    iterations=int(state.get("step", 0)) if counts else None,
                    restore=_counter(wrapped, table, counts),
                )
            )
    return shards, _variables.TrainedBy(name)


def _tables(variables: Any) -> list[Variable]:
    given = [variables] if isinstance(variables, Tensor) or not isinstance(variables, Iterable) else list(variables)
    tables: list[Variable] = []
    for position, variable in enumerate(given):
        if not isinstance(variable, Variable):
            raise TypeError(
                f"vars[{position}] is a {type(variable).__name__}, not a table: a dump holds tables; "
                "sok.filter_variables tells them from other parameters, which torch.save saves"
            )
        tables.append(variable)
    return tables


def _group_of(optimizer: torch.optim.Optimizer, table: Variable) -> Mapping[str, Any]:
    for group in optimizer.param_groups:
        if any(parameter is table for parameter in group["params"]):
            return group
    if isinstance(optimizer, FusedOptimizer):  # it attaches parameters when it first steps them
        return optimizer.param_groups[0]
    raise ValueError(f"table '{table.name}' is not among the parameters of the {type(optimizer).__name__}")


def _shard(table: Variable, **options: Any) -> _variables.TableShard:
    dtype = str(table.dtype).removeprefix("torch.")
    return _variables.TableShard(table.name, table.placement, _Storage(table), dtype, **options)


def _settings(name: str, group: Mapping[str, Any], pieces: Any, in_momentum: bool) -> dict[str, Any]:
    settings = hyperparameters.settings(group)
    if name in _MOMENTUM and any(piece.name == "momentum" for _, piece in pieces):
        settings[LEARNING_RATE_IN_MOMENTUM] = in_momentum
    return settings


def _state(optimizer: torch.optim.Optimizer, table: Variable, key: str, piece: StateSpec) -> _variables.StateShard:
    present = hyperparameters.present_state(optimizer.state.get(table, {}), key, table)

    def make() -> _Storage:
        state = hyperparameters.make_state(piece, table)
        optimizer.state[table][key] = state
        return _Storage(state)

    if present is not None:
        shape = table.shape[:1] if piece.rowwise else table.shape
        if present.shape != shape or present.dtype != torch.float32:
            raise ValueError(
                f"the optimizer state '{key}' of table '{table.name}' is {list(present.shape)} {present.dtype}, must "
                f"be {list(shape)} float32"
            )
    return _variables.StateShard(piece, None if present is None else _Storage(present), make)


def _counter(optimizer: torch.optim.Optimizer, table: Variable, counts: bool) -> Any:
    def restore(iterations: int | None, scalars: Mapping[str, float]) -> None:
        del scalars
        if counts and iterations is not None:
            hyperparameters.set_steps(optimizer.state[table], iterations)

    return restore


def _row_shard(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], table: Variable) -> _variables.TableShard:
    """A table that PyTorch steps on rows: its states are whatever its optimizer makes."""
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

    return _shard(
        table,
        states=[_state(optimizer, table, key, piece) for key, piece in pieces],
        settings=_settings(name, group, pieces, in_momentum=False),
        iterations=int(state.get("step", 0)) if "step" in others or not state else None,
        scalars={key: float(state[key]) for key in numbers if key in state},
        restore=restore,
    )


def _like(old: Any, value: float) -> Any:
    return torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)
