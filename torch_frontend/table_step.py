# SPDX-License-Identifier: Apache-2.0
"""The one way from the gradients of tables to their rows: all tables of an optimizer in one call of the core.

What is known of an optimizer's parameter groups and states is remembered from step to step and compared by identity,
so that a state_dict that is loaded, a state that somebody replaces, or another list of parameters is noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit import stored_rows
from sparse_operation_kit.optimizers import NotFused, OptimizerSpec, slot_name_of_torch
from sparse_operation_kit.stored_rows import StoredRows, in_order
from sparse_operation_kit.torch import hyperparameters, keyed_shard, row_optimizer, runtime, stamps
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.exchange import Exchange
from sparse_operation_kit.torch.gradient import PendingGradient, Rows, of_rows
from sparse_operation_kit.torch.table_parameter import TableParameter
from sparse_operation_kit.torch.turns import alone

_STEP = operator.itemgetter("step")


@dataclasses.dataclass(slots=True)
class ParameterGroup:
    """A parameter group of an optimizer."""

    group: dict[str, Any]
    parameters: list[Tensor]
    """As they were listed when this was made."""
    tables: range
    """Positions among the tables of all groups."""
    dense: list[Tensor]

    def holds(self, group: dict[str, Any]) -> bool:
        """Whether the group still is what this says."""
        parameters = group["params"]
        return (
            self.group is group
            and len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
        )


@dataclasses.dataclass(slots=True)
class _Told:
    """What the handle was told of a run, by id(): of tensors that may be gone by now."""

    tables: Sequence[int]
    counts: tuple[int, ...]
    states: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class Known:
    """The parameters of an optimizer."""

    groups: list[ParameterGroup]
    tables: list[TableParameter]
    handle: Any
    """torch.classes.sok.OptimizerTables of the tables."""
    stores: list[StoredRows] = dataclasses.field(default_factory=list)
    """What the tables have in stores."""
    told: list[_Told] = dataclasses.field(default_factory=list)
    """Of each run."""

    def forget_gradients(self) -> None:
        """Sets the gradients of the tables to None without looking at them."""
        self.handle.forget()

    def tell(self, run: int, tables: Sequence[int], counts: list[Tensor]) -> None:
        """Makes these the tables of a run."""
        ids = tuple(map(id, counts))
        if run < len(self.told) and self.told[run].counts == ids and self.told[run].tables == tables:
            return
        self.handle.set_run(run, list(tables), counts)
        self.told[run:] = [_Told(tables, ids)]

    def tell_states(
        self, run: int, spec: OptimizerSpec, states: Sequence[dict[str, Any]], tensors: list[Tensor]
    ) -> None:
        """Makes these the states of a run, which are in `states` too: one of all tables after the other, in the core's
        order.
        """
        ids = tuple(map(id, tensors))
        if self.told[run].states == ids and self.handle.has_states(run):
            return
        keys = [slot_name_of_torch(spec.name, piece.name) for piece in spec.states]
        tables = [self.tables[position] for position in self.told[run].tables]
        tensors = [
            hyperparameters.as_column(table, key, piece, state)
            for key, piece in zip(keys, spec.states, strict=True)
            for table, state in zip(tables, states, strict=True)
        ]
        self.handle.set_states(run, keys, [int(piece.rowwise) for piece in spec.states], tensors)
        self.told[run].states = tuple(map(id, tensors))


@dataclasses.dataclass(slots=True)
class _Run:
    """Tables that take the same step."""

    index: int
    group: Mapping[str, Any]
    tables: Sequence[int]
    number: int
    """Of the coming step, 1 for the first."""
    states: list[dict[str, Any]]
    """`optimizer.state` of each; empty where the optimizer counts no steps."""
    counted: bool
    """Whether the handle knows the step counts."""


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Known] = weakref.WeakKeyDictionary()


def known(optimizer: torch.optim.Optimizer) -> Known:
    """The groups of an optimizer, in their order, with tables and dense parameters told apart."""
    groups = optimizer.param_groups
    result = _known.get(optimizer)
    if result is None or len(result.groups) != len(groups) or not all(map(ParameterGroup.holds, result.groups, groups)):
        result = _known[optimizer] = _look_at(groups)
    return result


def _look_at(groups: Sequence[dict[str, Any]]) -> Known:
    sorted_groups: list[ParameterGroup] = []
    tables: list[TableParameter] = []
    for group in groups:
        first = len(tables)
        tables += [parameter for parameter in group["params"] if isinstance(parameter, TableParameter)]
        dense = [parameter for parameter in group["params"] if not isinstance(parameter, TableParameter)]
        sorted_groups.append(ParameterGroup(group, list(group["params"]), range(first, len(tables)), dense))
    gradients, names = [table._gradient for table in tables], [table._sok_name for table in tables]
    stores = in_order(table._stored for table in tables)
    return Known(sorted_groups, tables, _handle(tables, gradients, names), stores)


def _handle(tables: Sequence[Tensor], gradients: Sequence[Any], names: list[str]) -> Any:
    return torch.classes.sok.OptimizerTables(tables, [gradient.number() for gradient in gradients], names)


def step(optimizer: torch.optim.Optimizer, known: Known) -> None:
    """Updates the tables that have a gradient: those that the core steps all or none, then the others.

    Raises:
      ValueError: a state or a gradient that does not fit its table. Nothing has changed.
      RuntimeError: the ids, weights or output gradients of a lookup were overwritten since; in a CUDA graph, an
        optimizer that follows its step number. Nothing has changed.
      NotImplementedError: an optimizer that does not treat rows by themselves. Nothing has changed.
      PeerError: one of these on another rank. Nothing has changed on any; tables on a GPU: raised by the next lookup.
    """
    if not known.tables:
        return
    with contextlib.ExitStack() as turns:
        if known.stores:
            turns.enter_context(stored_rows.alone(known.stores))
        _step(optimizer, known, turns)


def _step(optimizer: torch.optim.Optimizer, known: Known, turns: contextlib.ExitStack) -> None:
    """turns: what this thread holds of the tables, until the step ends."""
    exchange = runtime.get().exchange if known.tables[0].placement.num_ranks > 1 else None
    device = known.tables[0].device
    try:
        waiting, looked_at = known.handle.waiting()
        given = {position: _handle_of(known.tables[position]) for position in looked_at}
        fused: list[tuple[_Run, OptimizerSpec]] = []
        others: list[_Run] = []
        in_graph = is_captured(device)
        for run in _runs(optimizer, known, waiting):
            try:
                spec = hyperparameters.read(optimizer, run.group, run.number)
                if in_graph and spec != hyperparameters.read(optimizer, run.group, run.number + 1):
                    raise RuntimeError(
                        f"{type(optimizer).__name__} follows the number of its step, which the host counts for tables: "
                        "a CUDA graph would repeat that of the capture; leave the step out of the graph"
                    )
                fused.append((run, spec))
            except NotFused as reason:
                row_optimizer.check(optimizer, reason)
                others.append(run)
        if others:  # rows and states are read and written by slot, which other threads may give to other keys
            turns.enter_context(alone(known.tables))
        by_row = [
            (run.group, known.tables[position], _rows_of(known.tables[position], given.get(position)))
            for run in others
            for position in run.tables
        ]  # all of them first: a gradient that is refused leaves no states behind
        rows = [
            (group, table, gradient, row_optimizer.new_states(optimizer, group, table))
            for group, table, gradient in by_row
        ]
        prepared = _prepare(optimizer, known, fused)
    except Exception:
        if exchange is not None:
            exchange.handle.agree(device, True, False)
        raise
    if fused:
        _step_fused(known, prepared, given, exchange, bool(rows))
    elif exchange is not None:
        exchange.handle.agree(device, False, bool(rows))
    else:
        for index in {table.device.index for _, table, *_ in rows if table.is_cuda}:  # which were waited for
            ops.check_errors(index)
    for group, table, gradient, made in rows:
        row_optimizer.step(optimizer, group, table, gradient, made)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph takes in what happens on the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Makes states of dynamic tables that load_state_dict or a copy brought columns, which rows that go take with them.
    Where a table lacks some of their keys, it may be loaded later: the next step does it.
    """
    for group in optimizer.param_groups:
        for table in group["params"]:
            state = optimizer.state.get(table) if isinstance(table, TableParameter) else None
            if not state or not keyed_shard.can_settle(table, state):
                continue
            try:
                spec = hyperparameters.read(optimizer, group, hyperparameters.next_step(state))
            except NotFused:
                row_optimizer.make_columns(optimizer, group, table, state)
                continue
            for piece in spec.states:
                key = slot_name_of_torch(spec.name, piece.name)
                if key in state:
                    hyperparameters.as_column(table, key, piece, state)


def step_dense(
    optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[Mapping[str, Any], Tensor, Tensor, Tensor]]
) -> None:
    """Steps dense parameters in the core, which sees each as a table of its rows, all of which have a gradient.

    Args:
      parameters: (group, parameter, its memory as rows [n, m], their gradient [n, m]) of each; float32.
    """
    if not parameters:
        return
    slots = [torch.arange(rows.shape[0], device=rows.device) for _, _, rows, _ in parameters]
    gradients = [
        of_rows("dense parameter", slot, gradient, True)
        for slot, (_, _, _, gradient) in zip(slots, parameters, strict=True)
    ]
    tables: list[Any] = [rows for _, _, rows, _ in parameters]
    known = Known([], tables, _handle(tables, gradients, ["dense parameter"] * len(tables)))
    fused: list[tuple[_Run, OptimizerSpec]] = []
    for index, (group, parameter, _, _) in enumerate(parameters):
        state = optimizer.state[parameter]
        run = _Run(index, group, [index], hyperparameters.next_step(state), [state], False)
        known.tell(index, run.tables, [])
        fused.append((run, hyperparameters.read(optimizer, group, run.number)))
    _step_fused(known, _prepare(optimizer, known, fused), {})


def _runs(optimizer: torch.optim.Optimizer, known: Known, waiting: list[int] | None) -> Iterator[_Run]:
    """The tables that have a gradient, by the step that they take."""
    chosen = None if waiting is None else set(waiting)
    index = 0
    for each in known.groups:
        positions: Sequence[int] = each.tables
        if chosen is not None and not chosen.issuperset(positions):
            positions = [position for position in positions if position in chosen]
        if not positions:
            continue
        if not hyperparameters.counts_steps(optimizer, each.group):
            known.tell(index, positions, [])
            yield _Run(index, each.group, positions, 1, [], False)
            index += 1
            continue
        states = _states_of(optimizer, known, positions)
        steps = _step_tensors(states)
        known.tell(index, positions, steps)
        number = known.handle.common_count(index) if steps else None
        if number is not None:
            yield _Run(index, each.group, positions, int(number) + 1, states, True)
            index += 1
            continue
        by_number: dict[int, list[int]] = {}
        for member, state in enumerate(states):
            by_number.setdefault(hyperparameters.next_step(state), []).append(member)
        for coming, members in by_number.items():
            tables = [positions[member] for member in members]
            known.tell(index, tables, [])
            yield _Run(index, each.group, tables, coming, [states[member] for member in members], False)
            index += 1


def _states_of(optimizer: torch.optim.Optimizer, known: Known, positions: Sequence[int]) -> list[dict[str, Any]]:
    """`optimizer.state` of each table."""
    everything, tables = optimizer.state, known.tables
    # Mostly they are the first in their order, and hash() of a tensor is slow.
    if len(everything) >= len(tables) and all(map(operator.is_, everything, tables)):
        values = list(itertools.islice(everything.values(), len(tables)))
        return values if len(positions) == len(values) else [values[position] for position in positions]
    return [everything[tables[position]] for position in positions]


def _step_tensors(states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The step counts, if all are tensors."""
    with contextlib.suppress(KeyError):  # before the first step
        steps = list(map(_STEP, states))
        if set(map(type, steps)) == {Tensor}:
            return steps
    return []


@dataclasses.dataclass(slots=True)
class _Prepared:
    """What is left of fused runs when nothing of Python can fail any more."""

    fused: Sequence[tuple[_Run, OptimizerSpec]]
    counted: list[int] = dataclasses.field(default_factory=list)
    """The runs whose steps the handle counts."""
    others: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """`optimizer.state` of the tables whose steps it does not count."""


def _prepare(optimizer: torch.optim.Optimizer, known: Known, fused: Sequence[tuple[_Run, OptimizerSpec]]) -> _Prepared:
    """Tells the handle of the states."""
    result = _Prepared(fused)
    for run, spec in fused:
        if spec.states:
            states = run.states or _states_of(optimizer, known, run.tables)
            known.tell_states(run.index, spec, states, _state_tensors(known, spec, run, states))
        if hyperparameters.has_step(spec):
            if run.counted:
                result.counted.append(run.index)
            else:
                result.others.extend(run.states)
    return result


def _step_fused(
    known: Known, prepared: _Prepared, given: Mapping[int, Any], exchange: Exchange | None = None, wait: bool = False
) -> None:
    """One call of the core.

    Args:
      given: torch.classes.sok.TableGradient of the tables whose own is not the whole.
      exchange: by which the ranks agree, whatever this raises.
      wait: for that, also on a GPU.
    """
    fused = prepared.fused
    with stamps.known(known.tables, [run.tables for run, _ in fused]) as (tracked, positions):
        known.handle.step(
            [run.index for run, _ in fused],
            [int(spec.kind) for _, spec in fused],
            [int(spec.flags) for _, spec in fused],
            [number for _, spec in fused for number in spec.numbers],
            [spec.gradient_sign for _, spec in fused],
            prepared.counted,
            list(given),
            [handle.number() for handle in given.values()],
            tracked,
            positions,
            stamps.now(tracked),
            -1 if exchange is None else exchange.number,
            wait,
        )
    hyperparameters.count_steps(prepared.others)


def _state_tensors(known: Known, spec: OptimizerSpec, run: _Run, states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """One state of all tables after the other; made where they are not there yet."""
    keys = [slot_name_of_torch(spec.name, piece.name) for piece in spec.states]
    if run.number > 1 or not hyperparameters.has_step(spec):
        with contextlib.suppress(KeyError):
            return [state[key] for key in keys for state in states]
    by_table = [
        hyperparameters.state_tensors(spec, state, known.tables[position])
        for state, position in zip(states, run.tables, strict=True)
    ]
    return [of_table[i] for i in range(len(keys)) for of_table in by_table]


# --- gradients that somebody has looked at, or given ----------------------------------------------------------------


def _handle_of(table: TableParameter) -> Any:
    """torch.classes.sok.TableGradient of the .grad of a table, whatever it is."""
    gradient = table.grad
    assert gradient is not None
    if isinstance(gradient, PendingGradient):
        if not gradient.is_dense():
            return gradient.settled()
        gradient = gradient.materialise()
    # A dynamic table may have had fewer slots when it was made.
    fewer = table._index is not None and gradient.shape[0] < table.shape[0]
    if gradient.shape[1:] != table.shape[1:] or (gradient.shape[0] != table.shape[0] and not fewer):
        raise ValueError(
            f"the gradient of table '{table.name}' has shape {list(gradient.shape)}, this rank's rows "
            f"{list(table.shape)}"
        )
    if gradient.layout == torch.sparse_coo:
        if gradient.sparse_dim() != 1:
            raise ValueError(f"the sparse gradient of table '{table.name}' must have one sparse dimension (rows)")
        values = gradient._values().to(torch.float32)
        return of_rows(table._sok_name, gradient._indices()[0], values, gradient.is_coalesced(), table._index)
    if table._index is None:
        slots, rows = torch.arange(gradient.shape[0], device=table.device), gradient
    else:  # of the slots that have a key
        slots = table.keyed_slots()
        slots = slots[slots < gradient.shape[0]]
        rows = gradient[slots]
    return of_rows(table._sok_name, slots, rows.to(torch.float32), True, table._index)


def _rows_of(table: TableParameter, handle: Any) -> Rows:
    """The summed rows of a table's gradient."""
    handle = table._gradient.copy() if handle is None else handle
    return Rows(*handle.reduce(table._sok_name, *table.shape, table.device, table._index))
