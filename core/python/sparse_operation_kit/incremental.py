# SPDX-License-Identifier: Apache-2.0
"""The rows that changed since a moment, from the ranks that train to a copy that follows: what is the same in both
frontends.

Stamps are nanoseconds of UTC since 1970, read from the host's clock by the rank that changes a row.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from . import checkpoint
from .checkpoint.errors import KeysError
from .checkpoint.group import Group, agree, gathered
from .checkpoint.names import tensor_name
from .checkpoint.scratch import in_memory
from .checkpoint.source import Array, Rows
from .checkpoint.variables import check_names, check_same_names
from .held import GatheredColumn, HeldTable, Make

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_STAMPS = np.iinfo(np.int64)


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


Thresholds = datetime.datetime | Sequence[datetime.datetime]
"""One moment, or one for each table."""


def _to_stamps(moments: Thresholds, num_tables: int) -> list[int]:
    """The stamp of each table; `to_stamp` says what it raises, ValueError for another number of moments."""
    if not isinstance(moments, (list, tuple)):
        moments = [moments]  # type: ignore[list-item]
    if len(moments) not in (1, num_tables):
        raise ValueError(f"time_threshold has {len(moments)} entries, but there are {num_tables} tables")
    stamps = [to_stamp(moment) for moment in moments]
    return stamps if len(stamps) == num_tables else stamps * num_tables


def collect(
    describe: Callable[[], Sequence[HeldTable]], time_threshold: Thresholds, group: Group
) -> tuple[list[Array], list[Array]]:
    """(keys, rows) of each table, of all ranks together, ascending by key. What a rank raises ends the call on all."""
    tables: list[HeldTable] = []

    def prepare() -> list[Any]:
        tables.extend(describe())
        stamps = _to_stamps(time_threshold, len(tables))
        for table in tables:
            table.track()
        return [stamps, [table.name for table in tables]]

    everyone = agree(group, prepare)
    check_same_names([names for _, names in everyone])
    found: list[Array] = []

    def find() -> None:
        earliest = map(min, zip(*(stamps for stamps, _ in everyone), strict=True))
        found.extend(table.changed(stamp) for table, stamp in zip(tables, earliest, strict=True))

    agree(group, find)
    keys, values = [], []
    for table, changed in zip(tables, found, strict=True):
        slots = gathered_slots(table, changed, group, in_memory)
        parts: list[Array] = []

        def read(table: HeldTable = table, slots: Array = slots, parts: list[Array] = parts) -> int:
            parts.extend((table.keys(slots), table.rows.read(slots)))
            return len(slots)

        counts = agree(group, read)
        all_keys, all_rows = (gathered(group, array, counts) for array in parts)
        order = np.argsort(all_keys, kind="stable")
        keys.append(all_keys[order])
        values.append(all_rows[order])
    return keys, values


def gathered_slots(table: HeldTable, slots: Array, group: Group, make: Make) -> Array:
    """The slots that this rank is to give of a table of which all ranks know some; its rows can be read then."""
    return table.rows.gather_rows(group, slots, make) if isinstance(table.rows, GatheredColumn) else slots


def save(
    path: str | os.PathLike[str],
    tables: Sequence[HeldTable],
    keys: Sequence[Any],
    values: Sequence[Any],
    *,
    step: int | None,
    extra: Any,
    frontend: str,
) -> None:
    """Writes what `collect` returned for tables as a dump of one process, whole or not at all."""
    sources = []
    for table, table_keys, rows in _checked_rows(tables, keys, values):
        described = some_rows(table, table.name, table.placement.dimension, table.stored_dtype)
        sources.append(checkpoint.from_arrays(described, table_keys, rows))
    checkpoint.dump(path, sources, step=step, extra=extra, frontend=frontend, progress=False)


def some_rows(table: HeldTable, name: str, dimension: int, dtype: str) -> checkpoint.Table:
    """What a dump says of some of a table's keys, with vectors of this dimension and dtype."""
    mode = table.placement.mode
    # Dynamic: not each key of [0, rows).
    return checkpoint.Table(tensor_name(name), dimension, dtype, kind="dynamic", mode=mode, key_dtype="int64")


def target_of(table: HeldTable, name: str, dimension: int, dtype: str, pieces: list[Rows]) -> checkpoint.Target:
    """What a load of `some_rows` adds to `pieces`: those of this rank's keys."""

    def keep(rows: Rows) -> None:
        pieces.append(Rows(rows.keys.astype(np.int64), np.array(rows.weights), {}))

    return checkpoint.Target(
        tensor_name(name), dimension, keep, value_dtype=dtype, owner=table.load_owner, key_dtype=table.key_type
    )


def keys_of(pieces: list[Rows]) -> Array:
    """The keys of what a load gave, [n] int64."""
    return np.concatenate([np.zeros(0, np.int64), *(rows.keys for rows in pieces)])


def checked_keys(table: HeldTable, pieces: list[Rows], dump: checkpoint.Dump) -> Array:
    """The same of rows of a table; KeysError where they do not fit it."""
    keys = keys_of(pieces)
    problem = _bad_key(keys, table)
    if problem is not None:
        raise KeysError(f"table '{table.name}': {problem}", file=dump.table(tensor_name(table.name)).key.file.path)
    return keys


def apply(source: Any, describe: Callable[[], Sequence[HeldTable]], group: Group) -> None:
    """Gives each rank its rows of (keys, values), or of the dump at a path. All ranks check before the first writes."""
    tables: list[HeldTable] = []
    taken: list[tuple[Array, Array]] = []
    from_path = isinstance(source, (str, os.PathLike))

    def prepare() -> list[str]:
        tables.extend(describe())
        names = check_names(tables)
        if not from_path:
            taken.extend(_own_rows(source, tables))
        return names

    check_same_names(agree(group, prepare))
    if from_path:
        taken = _read(source, tables, group)

    def check_room() -> None:
        for table, (keys, _) in zip(tables, taken, strict=True):
            table.check_room(keys, keys[:0])

    agree(group, check_room)

    def write() -> None:
        for table, (keys, rows) in zip(tables, taken, strict=True):
            if len(keys):
                table.overwrite(keys, rows)

    agree(group, write)


def _own_rows(source: Any, tables: Sequence[HeldTable]) -> list[tuple[Array, Array]]:
    try:
        keys, values = source
    except (TypeError, ValueError):
        raise TypeError(
            f"path_or_arrays must be a path or the pair (keys, values) of incremental_model_dump, got "
            f"{type(source).__name__}"
        ) from None
    result = []
    for table, table_keys, rows in _checked_rows(tables, keys, values):
        mine = table.takes(table_keys)
        result.append((table_keys[mine], rows[mine]))
    return result


def _checked_rows(
    tables: Sequence[HeldTable], keys: Iterable[Any], values: Iterable[Any]
) -> Iterator[tuple[HeldTable, Array, Array]]:
    """(table, its keys as int64, its rows); ValueError and KeysError for what does not fit the table."""
    keys, values = list(keys), list(values)
    if len(keys) != len(tables) or len(values) != len(tables):
        raise ValueError(
            f"{len(tables)} tables, but keys of {len(keys)} and values of {len(values)}: give one entry a table"
        )
    for table, given_keys, given_rows in zip(tables, keys, values, strict=True):
        own, rows, name = np.asarray(given_keys), np.asarray(given_rows), f"table '{table.name}'"
        if own.dtype not in (np.int32, np.int64) or own.ndim != 1:
            raise ValueError(f"{name}: keys must be [n] int32 or int64, got {own.dtype} {list(own.shape)}")
        dtype, shape = table.stored_dtype, (len(own), table.placement.dimension)
        if rows.dtype.name != dtype or rows.shape != shape:
            raise ValueError(f"{name}: values must be {dtype} {list(shape)}, got {rows.dtype} {list(rows.shape)}")
        problem = _bad_key(own, table)
        if problem is not None:
            raise KeysError(f"{name}: {problem}")
        yield table, own.astype(np.int64, copy=False), rows


def _bad_key(keys: Array, table: HeldTable) -> str | None:
    """What is wrong with the keys of a delta, if anything."""
    if not len(keys):
        return None
    ordered = np.sort(keys)
    for key in (int(ordered[0]), int(ordered[-1])):
        if table.is_dynamic and not np.iinfo(table.key_type).min <= key <= np.iinfo(table.key_type).max:
            return f"key {key} is no {table.key_type}, the key_type"
        if not table.is_dynamic and not 0 <= key < table.placement.num_rows:
            return f"key {key} is outside [0, {table.placement.num_rows})"
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    return f"key {int(ordered[twice[0]])} occurs twice" if len(twice) else None


def _read(path: Any, tables: Sequence[HeldTable], group: Group) -> list[tuple[Array, Array]]:
    """This rank's rows of a dump, checksums and keys checked on all ranks."""
    pieces: list[list[Rows]] = [[] for _ in tables]

    targets = [
        target_of(table, table.name, table.placement.dimension, table.stored_dtype, held)
        for table, held in zip(tables, pieces, strict=True)
    ]
    dump = checkpoint.load(path, targets, group=group, progress=False)
    result: list[tuple[Array, Array]] = []

    def check() -> None:
        for table, held in zip(tables, pieces, strict=True):
            keys = checked_keys(table, held, dump)
            empty = np.zeros((0, table.placement.dimension), table.stored_dtype)
            rows = np.concatenate([empty, *(rows.weights for rows in held)]) if held else empty
            result.append((keys, rows))

    agree(group, check)
    return result
