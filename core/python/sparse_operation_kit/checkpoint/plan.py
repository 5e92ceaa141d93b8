# SPDX-License-Identifier: Apache-2.0
"""Which rows of a dump a rank needs, found from the keys alone; the rows follow by position."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..placement import Placement
from .errors import KeysError
from .reader import DumpTable
from .source import Array
from .verify import Piece

_INT64_MAX = np.iinfo(np.int64).max
_SLOTS_AT_ONCE = 1 << 23  # slots whose bits are unpacked at once


class Plan(NamedTuple):
    """pieces: those that hold this rank's rows, in file order; rows: how many these are."""

    pieces: list[Piece]
    rows: int


def plan(
    table: DumpTable,
    placement: Placement,
    rows: int | None,
    key_dtype: str,
    advance: Callable[[int], None],
    *,
    whole: bool = True,
) -> Plan:
    """Reads the keys once and finds the rows of this rank.

    rows:       of a static table, also the placement's: its keys must be in [0, rows), each at most once; None: a
                dynamic table
    key_dtype:  which integers the caller can hold
    whole:      each row of a static table must be there

    Memory: a block of keys, 24 bytes a chunk, and for a static table one bit for each of this rank's rows. KeysError.
    """
    path = table.key.file.path
    coverage = None if rows is None else _Coverage(placement)
    pieces, num_rows = [], 0
    for chunk, stored in table.key_chunks():
        keys = to_int64(stored, path)
        _check_range(keys, rows, key_dtype, path)
        first = int(table.bounds[chunk, 0])
        if placement.holds_everything:
            pieces.append(Piece(chunk, first, first + len(keys)))
        else:
            mine = np.flatnonzero(placement.mine(keys))
            keys = keys[mine]
            if len(mine):
                pieces.append(Piece(chunk, first + int(mine[0]), first + int(mine[-1]) + 1))
        if coverage is not None:
            coverage.add(placement.key_map(keys))
        num_rows += len(keys)
        advance(stored.nbytes)
    if coverage is not None:
        coverage.finish(path, num_rows, whole)
    return Plan(pieces, num_rows)


def to_int64(keys: Array, path: str) -> Array:
    """Stored keys as int64; KeysError for a uint64 beyond it."""
    if keys.dtype == np.uint64 and len(keys) and keys.max() > _INT64_MAX:
        raise KeysError(f"holds the key {keys.max()}", file=path, expected=f"keys of at most {_INT64_MAX}")
    return keys.astype(np.int64, copy=False)


def _check_range(keys: Array, rows: int | None, key_dtype: str, path: str) -> None:
    if not len(keys):
        return
    limits = np.iinfo(key_dtype)
    low, high = (max(0, limits.min), rows - 1) if rows is not None else (int(limits.min), int(limits.max))
    for key in (int(keys.min()), int(keys.max())):
        if not low <= key <= high:
            raise KeysError(f"holds the key {key}", file=path, expected=f"keys in [{low}, {high}]")


class _Coverage:
    """Which slots of a shard occur, at one bit a slot."""

    def __init__(self, placement: Placement) -> None:
        self._placement, self._slots = placement, placement.local_rows
        self._bits = np.zeros(-(-self._slots // 8), np.uint8)

    def add(self, slots: Array) -> None:
        np.bitwise_or.at(self._bits, slots >> 3, np.left_shift(np.uint8(1), (slots & 7).astype(np.uint8)))

    def finish(self, path: str, num_keys: int, whole: bool) -> None:
        """KeysError unless the `num_keys` keys were different ones, or, where `whole`, all that there are."""
        different = 0
        for first in range(0, self._slots, _SLOTS_AT_ONCE):
            end = min(first + _SLOTS_AT_ONCE, self._slots)
            bits = np.unpackbits(self._bits[first // 8 : -(-end // 8)], count=end - first, bitorder="little")
            different += int(bits.sum())
            if whole and not bits.all():
                key = self._placement.global_keys(first + int(bits.argmin()))
                raise KeysError(f"lacks the key {key}", file=path, expected="each row of the table once")
        if not whole and different != num_keys:
            raise KeysError(f"holds {num_keys - different} keys twice", file=path, expected="each key once")
