# SPDX-License-Identifier: Apache-2.0
"""The rows that changed since a moment, from the ranks that train to a copy that follows: what is the same in both
frontends.

A frontend describes its tables (`Tracked`, `Follower`); stamps are nanoseconds of UTC since 1970, read from the host's
clock by the rank that changes a row.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checkpoint
from .checkpoint.errors import KeysError, MismatchError
from .checkpoint.group import Group, agree
from .checkpoint.names import stems, tensor_name
from .checkpoint.source import Array, Rows
from .placement import Placement

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_STAMPS = np.iinfo(np.int64)
_PIECE_BYTES = 256 << 20  # of a rank, in one all-gather


@dataclass(frozen=True)
class Tracked:
    """A table as one rank holds it.

    changed(stamp) -> (slots [n] int64, rows [n, dimension]) of the rows whose stamps are `stamp` or later.
    """

    name: str
    placement: Placement
    changed: Callable[[int], tuple[Array, Array]]


@dataclass(frozen=True)
class Follower:
    """A table that takes rows.

    write(keys, rows) takes [n] int64 global keys that this rank holds, each once, and [n, dimension] rows.
    """

    name: str
    placement: Placement
    value_dtype: str
    write: Callable[[Array, Array], None]


def to_stamp(moment: datetime.datetime) -> int:
    """The stamp of a timezone-aware datetime, the nearest of int64: of datetime.min the earliest there is.

    TypeError for another type, ValueError for a naive one.
    """
    if not isinstance(moment, datetime.datetime):
        raise TypeError(f"time_threshold must be a datetime.datetime, got {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise ValueError(
            f"time_threshold {moment.isoformat()} has no time zone: ranks and hosts may differ in theirs. Use "
            "datetime.datetime.now(datetime.timezone.utc)"
        )
    stamp = (moment - _EPOCH) // datetime.timedelta(microseconds=1) * 1000
    return min(max(stamp, _STAMPS.min), _STAMPS.max)


def collect(
    describe: Callable[[], Sequence[Tracked]], time_threshold: datetime.datetime, group: Group
) -> tuple[list[Array], list[Array]]:
    """(keys, rows) of each table, of all ranks together, ascending by key. What a rank raises ends the call on all."""
    tables: list[Tracked] = []

    def prepare() -> list[Any]:
        stamp = to_stamp(time_threshold)
        tables.extend(describe())
        return [stamp, [table.name for table in tables]]

    everyone = agree(group, prepare)
    _same_names(everyone)
    stamp = min(entry[0] for entry in everyone)
    keys, values = [], []
    for table in tables:
        found: list[Array] = []

        def find(table: Tracked = table, found: list[Array] = found) -> int:
            slots, rows = table.changed(stamp)
            found.extend((table.placement.global_keys(slots).astype(np.int64), rows))
            return len(slots)

        counts = agree(group, find)
        all_keys, all_rows = (_gathered(group, array, counts) for array in found)
        order = np.argsort(all_keys, kind="stable")
        keys.append(all_keys[order])
        values.append(all_rows[order])
    return keys, values


def _same_names(everyone: Sequence[Any]) -> None:
    for rank, entry in enumerate(everyone):
        if entry[1] != everyone[0][1]:
            raise MismatchError(
                f"rank 0 names the tables {everyone[0][1]}, rank {rank} {entry[1]}",
                expected="the same tables in the same order on every rank",
            )


def _gathered(group: Group, array: Array, counts: Sequence[int]) -> Array:
    """The arrays of all ranks one after another, sent in pieces."""
    if group.size == 1:
        return array
    array = np.ascontiguousarray(array)
    row_bytes = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    at_once = max(1, _PIECE_BYTES // max(1, row_bytes))
    parts: list[list[bytes]] = [[] for _ in counts]
    for first in range(0, max(counts), at_once):
        for part, data in zip(parts, group.allgather(array[first : first + at_once].tobytes()), strict=True):
            part.append(data)
    whole = b"".join(data for part in parts for data in part)
    return np.frombuffer(whole, array.dtype).reshape(sum(counts), *array.shape[1:])


def save(
    path: str | os.PathLike[str],
    tables: Sequence[tuple[str, Placement]],
    keys: Sequence[Any],
    values: Sequence[Any],
    *,
    step: int | None,
    extra: Any,
    frontend: str,
) -> None:
    """Writes what `collect` returned for tables of (name, placement) as a dump of one process, whole or not at all."""
    keys, values = list(keys), list(values)
    _check_lengths(len(tables), keys, values)
    sources = []
    for (name, placement), table_keys, rows in zip(tables, keys, values, strict=True):
        table_keys, rows = np.asarray(table_keys), np.asarray(rows)
        _check_rows(name, placement, rows.dtype.name, table_keys, rows)
        table = checkpoint.Table(
            tensor_name(name),
            placement.dimension,
            rows.dtype.name,
            kind="dynamic",  # some keys, not each of [0, rows)
            mode=placement.mode,
            key_dtype="int64",
        )
        sources.append(checkpoint.from_arrays(table, table_keys.astype(np.int64, copy=False), rows))
    checkpoint.dump(path, sources, step=step, extra=extra, frontend=frontend, progress=False)


def apply(source: Any, describe: Callable[[], Sequence[Follower]], group: Group) -> None:
    """Gives each rank its rows of (keys, values), or of the dump at a path. All ranks check before the first writes."""
    tables: list[Follower] = []
    taken: list[tuple[Array, Array]] = []
    from_path = isinstance(source, (str, os.PathLike))

    def prepare() -> list[Any]:
        tables.extend(describe())
        stems(tensor_name(table.name) for table in tables)
        if not from_path:
            taken.extend(_own_rows(source, tables))
        return [0, [table.name for table in tables]]

    _same_names(agree(group, prepare))
    if from_path:
        taken = _read(source, tables, group)

    def write() -> None:
        for table, (keys, rows) in zip(tables, taken, strict=True):
            if len(keys):
                table.write(keys, rows)

    agree(group, write)


def _own_rows(source: Any, tables: Sequence[Follower]) -> list[tuple[Array, Array]]:
    try:
        keys, values = source
    except (TypeError, ValueError):
        raise TypeError(
            f"path_or_arrays must be a path or the pair (keys, values) of incremental_model_dump, got "
            f"{type(source).__name__}"
        ) from None
    keys, values = list(keys), list(values)
    _check_lengths(len(tables), keys, values)
    result = []
    for table, table_keys, rows in zip(tables, keys, values, strict=True):
        table_keys, rows = np.asarray(table_keys), np.asarray(rows)
        _check_rows(table.name, table.placement, table.value_dtype, table_keys, rows)
        mine = table.placement.owner_of(table_keys) == table.placement.rank
        result.append((table_keys[mine].astype(np.int64), rows[mine]))
    return result


def _check_lengths(tables: int, keys: Sequence[Any], values: Sequence[Any]) -> None:
    if len(keys) != tables or len(values) != tables:
        raise ValueError(
            f"{tables} tables, but keys of {len(keys)} and values of {len(values)}: give one entry a table"
        )


def _check_rows(name: str, placement: Placement, dtype: str, keys: Array, rows: Array) -> None:
    if keys.dtype not in (np.int32, np.int64) or keys.ndim != 1:
        raise ValueError(f"table '{name}': keys must be [n] int32 or int64, got {keys.dtype} {list(keys.shape)}")
    if rows.dtype.name != dtype or rows.shape != (len(keys), placement.dimension):
        raise ValueError(
            f"table '{name}': values must be {dtype} [{len(keys)}, {placement.dimension}], got {rows.dtype} "
            f"{list(rows.shape)}"
        )
    problem = _bad_key(keys, placement.num_rows)
    if problem is not None:
        raise KeysError(f"table '{name}': {problem}")


def _bad_key(keys: Array, num_rows: int) -> str | None:
    """What is wrong with the keys of a delta, if anything."""
    if not len(keys):
        return None
    ordered = np.sort(keys)
    for key in (int(ordered[0]), int(ordered[-1])):
        if not 0 <= key < num_rows:
            return f"key {key} is outside [0, {num_rows})"
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    return f"key {int(ordered[twice[0]])} occurs twice" if len(twice) else None


def _read(path: Any, tables: Sequence[Follower], group: Group) -> list[tuple[Array, Array]]:
    """This rank's rows of a dump, checksums and keys checked on all ranks."""
    pieces: list[list[Rows]] = [[] for _ in tables]

    def keep(held: list[Rows]) -> Callable[[Rows], None]:
        return lambda rows: held.append(Rows(rows.keys.astype(np.int64), np.array(rows.weights), {}))

    targets = [
        checkpoint.Target(
            tensor_name(table.name),
            table.placement.dimension,
            keep(held),
            value_dtype=table.value_dtype,
            owner=table.placement.owner,
        )
        for table, held in zip(tables, pieces, strict=True)
    ]
    dump = checkpoint.load(path, targets, group=group, progress=False)
    result: list[tuple[Array, Array]] = []

    def check() -> None:
        for table, held in zip(tables, pieces, strict=True):
            keys = np.concatenate([np.zeros(0, np.int64), *(rows.keys for rows in held)])
            empty = np.zeros((0, table.placement.dimension), table.value_dtype)
            rows = np.concatenate([empty, *(rows.weights for rows in held)]) if held else empty
            problem = _bad_key(keys, table.placement.num_rows)
            if problem is not None:
                file = dump.table(tensor_name(table.name)).key.file.path
                raise KeysError(f"table '{table.name}': {problem}", file=file)
            result.append((keys, rows))

    agree(group, check)
    return result
