# SPDX-License-Identifier: Apache-2.0
"""dump and load of a frontend's tables and optimizer: what is the same in both.

A frontend describes its tables (`TableShard`) and its optimizer (`TrainedBy`); how rows get in and out of its memory is
behind `Storage`.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .. import placement as _placement
from ..arguments import TABLE_DTYPES
from ..optimizers import StateSpec
from . import conversion
from .errors import MismatchError
from .group import Group, agree
from .header import BFLOAT16, stored_dtype
from .loader import Target, Verify, load, open_together
from .names import stems, tensor_name
from .reader import Dump
from .source import Array, Rows, Source
from .tables import Optimizer, State, Table
from .writer import dump

_STATE_DTYPE = "float32"


class Storage(Protocol):
    """This rank's rows of a table, [rows, dimension], or of one of its states, also [rows]; anywhere."""

    def read(self, first: int, end: int) -> Array:
        """Rows [first, end), in host memory; the storage itself where it is there. bfloat16 as float32."""

    def write(self, slots: slice | Array, values: Array) -> None:
        """Overwrites rows; `values`, of any floating dtype, are rounded to nearest and last until it returns."""


@dataclass(frozen=True)
class StateShard:
    """One optimizer state of a table: its storage, or None where no step has made it yet, and what makes it."""

    spec: StateSpec
    storage: Storage | None
    make: Callable[[], Storage]


def _nothing(iterations: int | None, scalars: Mapping[str, float]) -> None:
    del iterations, scalars


@dataclass(frozen=True)
class TableShard:
    """A table as one rank holds it.

    name:        without TensorFlow's output number
    row_dtype:   NumPy's name of it, or "bfloat16"
    states:      those of the optimizer, in its order; [] without one
    settings:    the optimizer's hyper-parameters for this table, by Keras's names, plain JSON data; and
                 conversion.LEARNING_RATE_IN_MOMENTUM where the optimizer has a momentum
    iterations:  steps that this table has seen, where the optimizer counts them for each table; 0 before its first
    scalars:     states of the optimizer that are one number
    restore:     takes over (steps, scalars) after the rows
    """

    name: str
    placement: _placement.Placement
    storage: Storage
    row_dtype: str = "float32"
    states: Sequence[StateShard] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    iterations: int | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)
    restore: Callable[[int | None, Mapping[str, float]], None] = _nothing


@dataclass(frozen=True)
class TrainedBy:
    """The optimizer: its name in file names, the steps that it has done (None: its tables count them), and what takes
    over such a count.
    """

    name: str
    iterations: int | None = None
    restore: Callable[[int], None] = lambda iterations: None


Described = tuple[Sequence[TableShard], TrainedBy | None]


def dump_variables(
    path: str | os.PathLike[str],
    describe: Callable[[], Described],
    *,
    group: Group,
    frontend: str,
    step: int | None,
    extra: Any,
    progress: bool | None,
) -> None:
    """Dumps the tables that `describe` gives; what it raises on one rank ends the dump on all."""
    sources: list[Source] = []
    optimizers: list[Optimizer | None] = []

    def prepare() -> None:
        if step is not None:
            operator.index(step)
        shards, trained_by = describe()
        _check_ranks(shards, group)
        sources.extend(_source(shard, trained_by) for shard in shards)
        optimizers.append(None if trained_by is None else _optimizer(shards, trained_by))

    agree(group, prepare)
    dump(
        path,
        sources,
        optimizer=optimizers[0],
        step=None if step is None else operator.index(step),
        extra=extra,
        group=group,
        frontend=frontend,
        progress=progress,
    )


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
    described: list[Described] = []

    def prepare() -> list[str]:
        described.append(describe())
        _check_ranks(described[0][0], group)
        if verify not in ("before", "during"):
            raise ValueError(f'verify is {verify!r}; it must be "before" or "during"')
        stems(tensor_name(shard.name) for shard in described[0][0])
        return [shard.name for shard in described[0][0]]

    names = agree(group, prepare)
    for rank, others in enumerate(names):
        if others != names[0]:
            raise MismatchError(
                f"ranks 0 and {rank} load different tables: {names[0]} and {others}",
                expected="the same variables, in the same order, on every rank",
            )
    shards, trained_by = described[0]
    with open_together(path, group) as opened:
        loaded: list[_Loaded] = []
        stored: list[str | None] = []

        def match() -> None:
            stored.append(None if trained_by is None else conversion.stored_optimizer(opened, trained_by.name))
            loaded.extend(_Loaded(shard, trained_by, opened) for shard in shards)

        agree(group, match)
        targets = [entry.target() for entry in loaded]
        load(opened, targets, optimizer=stored[0], group=group, verify=verify, progress=progress)

        def finish() -> None:
            for entry in loaded:
                entry.finish()
            if trained_by is not None and opened.optimizer is not None and opened.optimizer.iterations is not None:
                trained_by.restore(opened.optimizer.iterations)

        agree(group, finish)
    return opened


def _check_ranks(shards: Sequence[TableShard], group: Group) -> None:
    for shard in shards:
        if (shard.placement.num_ranks, shard.placement.rank) != (group.size, group.rank):
            raise MismatchError(
                f"table {shard.name!r} was made on rank {shard.placement.rank} of {shard.placement.num_ranks}",
                expected=f"rank {group.rank} of {group.size}; make tables after init()",
            )


def _optimizer(shards: Sequence[TableShard], trained_by: TrainedBy) -> Optimizer:
    iterations = trained_by.iterations
    counts = [shard.iterations for shard in shards if shard.iterations is not None]
    if iterations is None and counts and len(counts) == len(shards):
        iterations = max(counts)
    settings: dict[str, dict[str, Any]] = {}
    for shard in shards:
        own = dict(shard.settings)
        if shard.scalars:
            own["scalars"] = dict(shard.scalars)
        if shard.iterations is not None and shard.iterations != iterations:
            own["iterations"] = shard.iterations
        settings[tensor_name(shard.name)] = own
    # A count of its own must not become everybody's by being the first table's.
    alone = {name: own.pop("iterations") for name, own in settings.items() if "iterations" in own}
    joined = conversion.joined_settings(settings)
    for name, count in alone.items():
        joined.setdefault("tables", {}).setdefault(name, {})["iterations"] = count
    return Optimizer(trained_by.name, iterations, joined)


def _source(shard: TableShard, trained_by: TrainedBy | None) -> Source:
    place = shard.placement
    table = Table(
        tensor_name(shard.name),
        place.dimension,
        stored_dtype(shard.row_dtype),
        row_dtype=BFLOAT16 if shard.row_dtype == BFLOAT16 else None,
        mode=place.mode,
        optimizer=trained_by.name if trained_by is not None and shard.states else None,
        states={state.spec.name: _state(state, place) for state in shard.states},
    )

    def chunks(size: int) -> Iterator[Rows]:
        for first in range(0, place.local_rows, size):
            end = min(first + size, place.local_rows)
            keys = np.arange(first, end, dtype=np.int64) * place.key_stride + place.first_key
            states = {state.spec.name: _read(state, place, first, end) for state in shard.states}
            yield Rows(keys.astype(table.key_type, copy=False), shard.storage.read(first, end), states)

    return Source(table, place.local_rows, chunks)


def _state(state: StateShard, place: _placement.Placement) -> State:
    return State(_STATE_DTYPE, 1 if state.spec.rowwise else place.dimension)


def _read(state: StateShard, place: _placement.Placement, first: int, end: int) -> Array:
    if state.storage is not None:
        return state.storage.read(first, end)
    shape = (end - first,) if state.spec.rowwise else (end - first, place.dimension)
    return np.full(shape, state.spec.initial, _STATE_DTYPE)


class _Loaded:
    """A table that is being loaded: its target, and afterwards its counts."""

    def __init__(self, shard: TableShard, trained_by: TrainedBy | None, opened: Dump) -> None:
        self._shard = shard
        self._dtype = opened.table(tensor_name(shard.name)).weight.spec.header.dtype
        self._states = {state.spec.name: state.storage for state in shard.states}
        self._settings: Mapping[str, Any] = {}
        self._factors: dict[str, float] = {}
        if trained_by is None:
            return
        name = tensor_name(shard.name)
        settings = conversion.table_settings(opened, name)
        self._settings = settings or {}
        if "momentum" in self._states:
            self._factors["momentum"] = conversion.momentum_factor(
                trained_by.name, settings, shard.settings, shard.name, opened.path
            )

    def target(self) -> Target:
        shard = self._shard
        return Target(
            tensor_name(shard.name),
            shard.placement.dimension,
            self._assign,
            self._dtype if self._dtype in TABLE_DTYPES else shard.row_dtype,  # rows are converted as they are written
            rows=shard.placement.num_rows,
            owner=shard.placement.owner,
            states={state.spec.name: _state(state, shard.placement) for state in shard.states},
        )

    def _assign(self, rows: Rows) -> None:
        if not len(rows.keys):
            return
        self._make_states()
        slots = _as_slice(self._shard.placement.key_map(rows.keys))
        self._shard.storage.write(slots, rows.weights)
        for state in self._shard.states:
            values = rows.states[state.spec.name]
            factor = self._factors.get(state.spec.name, 1.0)
            if factor != 1.0:
                values = (values.astype(np.float64) * factor).astype(values.dtype)
            storage = self._states[state.spec.name]
            assert storage is not None
            storage.write(slots, values[:, 0] if state.spec.rowwise else values)

    def _make_states(self) -> None:
        for state in self._shard.states:
            if self._states[state.spec.name] is None:
                self._states[state.spec.name] = state.make()

    def finish(self) -> None:
        """On each rank alike, whether it has rows or not."""
        self._make_states()
        self._shard.restore(self._settings.get("iterations"), self._settings.get("scalars", {}))


def _as_slice(slots: Array) -> slice | Array:
    """Consecutive slots as a slice, which is what a reader of as many ranks as wrote gets."""
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, first + count)
    return slots
