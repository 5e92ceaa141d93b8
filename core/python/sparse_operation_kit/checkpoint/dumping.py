# SPDX-License-Identifier: Apache-2.0
"""dump of a frontend's tables and optimizer (variables.py)."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..dynamic import times_of
from ..held import HeldDynamicTable, Slots, admits, gives_up_keys
from ..stored_rows import alone
from . import conversion
from .background import PendingDump, dump_async
from .group import Group, agree
from .header import BFLOAT16
from .names import candidates_name, tensor_name
from .scratch import folder_of
from .source import Array, Rows, Source
from .tables import DYNAMIC, STATIC, Optimizer, Table
from .variables import (
    STATE_DTYPE,
    Described,
    StateShard,
    TableShard,
    TrainedBy,
    describe_together,
    gather,
    kept_types,
    state_types,
)
from .writer import dump


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
    with contextlib.ExitStack() as held:
        sources, optimizer, step = _to_dump(path, describe, group, step, held)
        dump(
            path,
            sources,
            optimizer=optimizer,
            step=step,
            extra=extra,
            group=group,
            frontend=frontend,
            progress=progress,
        )


def dump_variables_async(
    path: str | os.PathLike[str],
    describe: Callable[[], Described],
    *,
    group: Group,
    frontend: str,
    step: int | None,
    extra: Any,
    progress: bool | None,
    check: Callable[[str], None] | None = None,
) -> PendingDump:
    """The same by dump_async. NotImplementedError for a table with a store, whose rows memory may not hold."""

    def describe_in_memory() -> Described:
        described = describe()
        for shard in described[0]:
            if gives_up_keys(shard.held):
                shard.held.refuse_store("dump_async, which copies rows to memory,")
        return described

    with contextlib.ExitStack() as held:
        sources, optimizer, step = _to_dump(path, describe_in_memory, group, step, held)
        return dump_async(
            path,
            sources,
            optimizer=optimizer,
            step=step,
            extra=extra,
            group=group,
            frontend=frontend,
            progress=progress,
            check=check,
        )


def _to_dump(
    path: str | os.PathLike[str],
    describe: Callable[[], Described],
    group: Group,
    step: int | None,
    held: contextlib.ExitStack,
) -> tuple[list[Source], Optimizer | None, int | None]:
    """(this rank's rows, the optimizer, the step) for the writer, which no other thread moves until `held` ends."""
    sources: list[Source] = []
    optimizers: list[Optimizer | None] = []

    folders: list[str] = []

    def check() -> Described:
        if step is not None:
            operator.index(step)
        folders.append(folder_of(path))
        return describe()

    shards, trained_by = describe_together(check, group)
    held.enter_context(alone(shard.held.stored for shard in shards))
    gather(shards, group, folders[0])

    def prepare() -> None:
        for shard in shards:
            shard.held.begin_dump()
        sources.extend(source_of(shard, trained_by) for shard in shards)
        sources.extend(_candidates_of(shard.held) for shard in shards if admits(shard.held))
        optimizers.append(None if trained_by is None else _optimizer(shards, trained_by))

    agree(group, prepare)
    return sources, optimizers[0], None if step is None else operator.index(step)


def source_of(shard: TableShard, trained_by: TrainedBy | None) -> Source:
    """This rank's rows of a table, and its states where `trained_by` is given."""
    held, dimension = shard.held, shard.held.placement.dimension
    table = Table(
        shard.tensor_name,
        dimension,
        held.stored_dtype,
        row_dtype=BFLOAT16 if held.row_dtype == BFLOAT16 else None,
        kind=DYNAMIC if held.is_dynamic else STATIC,
        key_dtype=held.key_type if held.is_dynamic else None,
        mode=held.placement.mode,
        optimizer=trained_by.name if trained_by is not None and shard.states else None,
        states=state_types(shard),
        kept=kept_types(held.kept),
    )

    def chunks(size: int) -> Iterator[Rows]:
        for keys, slots in held.entries(size):
            states = {state.spec.name: _read(state, slots, dimension) for state in shard.states or ()}
            states.update({name: column.read(slots) for name, column in held.kept.items()})
            yield Rows(keys.astype(table.key_type, copy=False), held.rows.read(slots), states)
        if gives_up_keys(held) and held.stored is not None:
            for keys, records in held.stored.pieces(held, size):
                scores = held.stored.scores(held, records)
                last_uses = times_of(scores, held.use_times(), time.time_ns())
                states = {name: scores if name == "score" else last_uses for name in held.kept}
                for state in shard.states or ():
                    states[state.spec.name] = _stored(held, records, state, dimension)
                yield Rows(keys.astype(table.key_type, copy=False), held.stored.rows(held, records), states)

    return Source(table, held.num_entries + (0 if held.stored is None else held.stored.size), chunks)


def _candidates_of(held: HeldDynamicTable) -> Source:
    """The keys that wait for rows of this rank's part."""
    table = Table(
        tensor_name(candidates_name(held.name)),
        1,
        "float32",
        kind=DYNAMIC,
        key_dtype=held.key_type,
        mode=held.placement.mode,
        kept=kept_types(["score"]),
    )
    candidates = held.candidates()

    def chunks(size: int) -> Iterator[Rows]:
        for first in range(0, len(candidates), size):
            keys, scores = candidates[first : first + size].T
            yield Rows(keys.astype(table.key_type), np.zeros((len(keys), 1), np.float32), {"score": scores.copy()})

    return Source(table, len(candidates), chunks)


def _read(state: StateShard, slots: Slots, dimension: int) -> Array:
    if state.column is not None:
        return state.column.read(slots)
    return _initial(state, slots.stop - slots.start if isinstance(slots, slice) else len(slots), dimension)


def _stored(held: HeldDynamicTable, records: Array, state: StateShard, dimension: int) -> Array:
    if state.column is not None:
        assert held.stored is not None
        return held.stored.state(held, records, state.column)
    return _initial(state, len(records), dimension)


def _initial(state: StateShard, count: int, dimension: int) -> Array:
    return np.full((count,) if state.spec.rowwise else (count, dimension), state.spec.initial, STATE_DTYPE)


def _optimizer(shards: Sequence[TableShard], trained_by: TrainedBy) -> Optimizer:
    iterations = trained_by.iterations
    counts = [shard.iterations for shard in shards if shard.iterations is not None]
    if iterations is None and counts and len(counts) == len(shards):
        iterations = max(counts)
    settings: dict[str, dict[str, Any]] = {}
    for shard in shards:
        own = settings[shard.tensor_name] = shard.stored_settings(trained_by.name)
        if shard.scalars:
            own["scalars"] = dict(shard.scalars)
        if shard.iterations is not None and shard.iterations != iterations:
            own["iterations"] = shard.iterations
    # A count of its own must not become everybody's by being the first table's.
    alone = {name: own.pop("iterations") for name, own in settings.items() if "iterations" in own}
    joined = conversion.joined_settings(settings)
    for name, count in alone.items():
        joined.setdefault("tables", {}).setdefault(name, {})["iterations"] = count
    return Optimizer(trained_by.name, iterations, joined)
