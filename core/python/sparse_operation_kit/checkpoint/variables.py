# SPDX-License-Identifier: Apache-2.0
"""A frontend's tables and optimizer as dump and load see them, and load: what is the same in both frontends.

A frontend describes its tables (`TableShard`) and its optimizer (`TrainedBy`); how rows get in and out of its memory is
behind `held.Column`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arguments import TABLE_DTYPES
from ..dynamic import lowered, most_wanted
from ..held import Array, Column, GatheredColumn, HeldDynamicTable, HeldTable, Slots, admits, gives_up_keys
from ..optimizers import StateSpec
from ..stored_rows import alone
from . import conversion
from .errors import MismatchError
from .group import Group, agree
from .loader import Target, Verify, load, open_together
from .names import KEPT, candidates_name, stem, stems, tensor_name
from .reader import Dump
from .scratch import on_disk
from .source import Rows
from .tables import State

STATE_DTYPE = "float32"


@dataclass(frozen=True)
class StateShard:
    """One optimizer state of a table: its column, or None where no step has made it yet, and what makes it."""

    spec: StateSpec
    column: Column | None
    make: Callable[[], Column]


def _nothing(iterations: int | None, scalars: Mapping[str, float]) -> None:
    del iterations, scalars


@dataclass(frozen=True)
class TableShard:
    """A table as one rank holds it, and what its optimizer keeps for it.

    states:       those of the optimizer, in its order; [] without one. None: this rank has nothing of the table, and
                  another one knows them; `wrap` makes a column of each, as of rows
    settings:     the optimizer's hyper-parameters for this table, by Keras's names, plain JSON data
    in_momentum:  whether the state "momentum" holds learning rates (conversion.LEARNING_RATE_IN_MOMENTUM)
    iterations:   steps that this table has seen, where the optimizer counts them for each table; 0 before its first
    scalars:      states of the optimizer that are one number
    restore:      takes over (steps, scalars) after the rows
    """

    held: HeldTable
    states: Sequence[StateShard] | None = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    in_momentum: bool = False
    iterations: int | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)
    restore: Callable[[int | None, Mapping[str, float]], None] = _nothing
    wrap: Callable[..., Column] | None = None

    @property
    def tensor_name(self) -> str:
        """The table's name in a dump."""
        return tensor_name(self.held.name)

    def stored_settings(self, optimizer: str) -> dict[str, Any]:
        """The hyper-parameters as a dump has them."""
        settings = dict(self.settings)
        if conversion.momentum_differs(optimizer) and any(state.spec.name == "momentum" for state in self.states or ()):
            settings[conversion.LEARNING_RATE_IN_MOMENTUM] = self.in_momentum
        return settings


@dataclass(frozen=True)
class TrainedBy:
    """The optimizer: its name in file names, the steps that it has done (None: its tables count them), and what takes
    over such a count.
    """

    name: str
    iterations: int | None = None
    restore: Callable[[int], None] = lambda iterations: None


Described = tuple[Sequence[TableShard], TrainedBy | None]


def load_variables(
    path: str | os.PathLike[str],
    describe: Callable[[], Described],
    *,
    group: Group,
    verify: Verify,
    progress: bool | None,
) -> Dump:
    """Loads the tables that `describe` gives. Everything is checked on all ranks before the first row changes (unless
    verify="during"); the optimizer's counts change last.
    """

    def check() -> Described:
        if verify not in ("before", "during"):
            raise ValueError(f'verify is {verify!r}; it must be "before" or "during"')
        return describe()

    shards, trained_by = describe_together(check, group)
    with open_together(path, group) as opened, alone(shard.held.stored for shard in shards):
        loaded: list[_Loaded] = []
        stored: list[str | None] = []

        def match() -> None:
            stored.append(None if trained_by is None else conversion.stored_optimizer(opened, trained_by.name))
            loaded.extend(_Loaded(shard, trained_by, opened) for shard in shards)

        agree(group, match)
        targets = [entry.target() for entry in loaded]
        waiting = [_Waiting(shard.held) for shard in shards if admits(shard.held)]
        targets.extend(entry.target() for entry in waiting if entry.is_in(opened))
        load(opened, targets, optimizer=stored[0], group=group, verify=verify, progress=progress)

        def finish() -> None:
            for entry in loaded:
                entry.finish()
            for candidates in waiting:
                candidates.finish()
            if trained_by is not None and opened.optimizer is not None and opened.optimizer.iterations is not None:
                trained_by.restore(opened.optimizer.iterations)

        agree(group, finish)
    return opened


def describe_together(describe: Callable[[], Described], group: Group) -> Described:
    """What `describe` gives, with what only other ranks know of tables of a layer. Called by every rank."""
    described: list[Described] = []

    def prepare() -> Any:
        described.append(describe())
        shards = described[0][0]
        check_ranks(shards, group)
        known = {
            shard.held.name: _known(shard) for shard in shards if shard.wrap is not None and shard.states is not None
        }
        return [check_names(shard.held for shard in shards), known]

    everyone = agree(group, prepare)
    check_same_names([names for names, _ in everyone])
    shards, trained_by = described[0]
    return [_completed(shard, [known for _, known in everyone]) for shard in shards], trained_by


def _known(shard: TableShard) -> dict[str, Any]:
    return {
        "states": [dataclasses.astuple(state.spec) for state in shard.states or ()],
        "settings": dict(shard.settings),
        "in_momentum": shard.in_momentum,
        "iterations": shard.iterations,
        "scalars": dict(shard.scalars),
    }


def _completed(shard: TableShard, everyone: Sequence[Mapping[str, Any]]) -> TableShard:
    if shard.states is not None:
        return shard
    name, wrap = shard.held.name, shard.wrap
    assert wrap is not None
    found: dict[str, Any] = dict(next(known[name] for known in everyone if name in known))

    def state(spec: StateSpec) -> StateShard:
        column = wrap(None, None, spec.initial, spec.rowwise)
        return StateShard(spec, column if isinstance(column, GatheredColumn) else None, lambda: wrap(None))

    found["states"] = [state(StateSpec(*each)) for each in found["states"]]
    return replace(shard, **found)


def gather(shards: Sequence[TableShard], group: Group, folder: str | None) -> None:
    """Brings together the columns that no rank has whole rows of, in files in `folder` (None: that of
    temporary files), so that they can be read. Called by every rank.
    """
    for shard in shards:
        for column in (shard.held.rows, *(state.column for state in shard.states or ())):
            if isinstance(column, GatheredColumn):
                column.gather(group, on_disk(folder))


def check_names(tables: Iterable[HeldTable]) -> list[str]:
    """The names of tables; TableNameError where they cannot be told apart in a dump."""
    names = [table.name for table in tables]
    stems(map(tensor_name, names))
    return names


def check_same_names(everyone: Sequence[Sequence[str]]) -> None:
    """Raises MismatchError unless all ranks, by rank, name the same tables."""
    for rank, names in enumerate(everyone):
        if names != everyone[0]:
            raise MismatchError(
                f"rank 0 names the tables {everyone[0]}, rank {rank} {names}",
                expected="the same tables in the same order on every rank",
            )


def check_ranks(shards: Sequence[TableShard], group: Group) -> None:
    """Raises MismatchError for tables that were made on other ranks than these."""
    for shard in shards:
        place = shard.held.placement
        if (place.num_ranks, place.rank) != (group.size, group.rank):
            raise MismatchError(
                f"table {shard.held.name!r} was made on rank {place.rank} of {place.num_ranks}",
                expected=f"rank {group.rank} of {group.size}; make tables after init()",
            )


class _Waiting:
    """The keys that wait for rows of a table that is being loaded."""

    def __init__(self, held: HeldDynamicTable) -> None:
        self._held, self._name = held, tensor_name(candidates_name(held.name))
        self._found = [np.zeros((0, 2), np.int64)]

    def is_in(self, opened: Dump) -> bool:
        """Whether a dump has some."""
        return stem(self._name) in opened.tables

    def target(self) -> Target:
        return Target(
            self._name,
            1,
            self._take,
            owner=self._held.placement.owner,
            key_dtype=self._held.key_type,
            kept=kept_types(["score"]),
        )

    def _take(self, rows: Rows) -> None:
        if "score" not in rows.states:
            return  # a dump whose manifest is lost does not say how they were asked for: they wait anew
        self._found.append(np.stack([rows.keys.astype(np.int64), rows.states["score"][:, 0]], axis=1))

    def finish(self) -> None:
        """Gives the table those that were asked for most."""
        self._held.set_candidates(most_wanted(np.concatenate(self._found), self._held.most_candidates))


def state_types(shard: TableShard) -> dict[str, State]:
    """The states as a dump's table has them."""
    width = shard.held.placement.dimension
    return {state.spec.name: State(STATE_DTYPE, 1 if state.spec.rowwise else width) for state in shard.states or ()}


def kept_types(kept: Iterable[str]) -> dict[str, str]:
    """The dtypes of HeldTable.kept."""
    return dict.fromkeys(kept, "int64")


class _Loaded:
    """A table that is being loaded: its target, and afterwards its counts."""

    def __init__(self, shard: TableShard, trained_by: TrainedBy | None, opened: Dump) -> None:
        self._shard = shard
        stored = opened.table(shard.tensor_name)
        self._dtype = stored.weight.spec.header.dtype
        self._has_order = (KEPT, "score") in stored.states
        self._columns = {state.spec.name: state.column for state in shard.states or ()}
        self._settings: Mapping[str, Any] = {}
        self._momentum = 1.0
        self._has_begun = False
        self._latest = 0  # the table's generation when rows were written last
        self._numbered_lower = False  # whether generations got lower numbers after some were written
        if trained_by is None:
            return
        settings = conversion.table_settings(opened, shard.tensor_name)
        self._settings = settings or {}
        if "momentum" in self._columns:
            wanted = shard.stored_settings(trained_by.name)
            self._momentum = conversion.momentum_factor(trained_by.name, settings, wanted, shard.held.name, opened.path)

    def target(self) -> Target:
        held = self._shard.held
        return Target(
            self._shard.tensor_name,
            held.placement.dimension,
            self._assign,
            self._dtype if self._dtype in TABLE_DTYPES else held.row_dtype,  # rows are converted as they are written
            rows=None if held.is_dynamic else held.placement.num_rows,
            owner=held.load_owner,
            key_dtype=held.key_type,
            capacity=held.capacity if held.stored is None else None,
            states=state_types(self._shard),
            kept=kept_types(held.kept),
            row_dtype=held.row_dtype,
        )

    def _assign(self, rows: Rows) -> None:
        if not len(rows.keys):
            return
        self._begin()
        for piece in self._shard.held.pieces(len(rows.keys)):
            states = {name: values[piece] for name, values in rows.states.items()}
            self._write(Rows(rows.keys[piece], rows.weights[piece], states))

    def _write(self, rows: Rows) -> None:
        slots: Slots = self._shard.held.slots(rows.keys)
        self._shard.held.rows.write(slots, rows.weights)
        for state in self._shard.states or ():
            name, values = state.spec.name, rows.states[state.spec.name]
            if name == "momentum" and self._momentum != 1.0:
                values = (values.astype(np.float64) * self._momentum).astype(values.dtype)
            column = self._columns[name]
            assert column is not None
            column.write(slots, values[:, 0] if state.spec.rowwise else values)
        for name, column in self._shard.held.kept.items():
            if name in rows.states:
                values = rows.states[name][:, 0]
                column.write(slots, self._numbered_now(values) if name == "score" else values)
        if gives_up_keys(self._shard.held):
            self._latest = self._shard.held.generations(0.0)[0]

    def _numbered_now(self, scores: Array) -> Array:
        """As the table numbers generations now: inserting the keys of these scores may have numbered those of the dump
        that were written before anew.
        """
        held = self._shard.held
        assert gives_up_keys(held)
        self._numbered_lower |= held.was_numbered_anew_since(self._latest)
        return lowered(scores) if self._numbered_lower else scores

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._shard.held.begin_load(self._has_order)
        for state in self._shard.states or ():
            if self._columns[state.spec.name] is None:
                self._columns[state.spec.name] = state.make()

    def finish(self) -> None:
        """On each rank alike, whether it has rows or not."""
        self._begin()
        self._shard.restore(self._settings.get("iterations"), self._settings.get("scalars", {}))
