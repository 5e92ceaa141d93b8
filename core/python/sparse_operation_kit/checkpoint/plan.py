# SPDX-License-Identifier: Apache-2.0
"""Which rows of a dump a rank needs, found from the keys alone; the rows follow by position."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .errors import KeysError
from .reader import DumpTable
from .source import Array
from .tables import DISTRIBUTED
from .verify import Piece

_INT64_MAX = np.iinfo(np.int64).max
_SLOTS_AT_ONCE = 1 << 23  # slots whose bits are unpacked at once


@dataclass(frozen=True)
class Placement:
    """Which keys a rank holds: k mod num_ranks == rank, or all of them on `owner`. As core/include/sok/table.h has
    it.
    """

    owner: int = DISTRIBUTED
    num_ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not (self.num_ranks >= 1 and 0 <= self.rank < self.num_ranks and -1 <= self.owner < self.num_ranks):
            raise ValueError(f"no such placement: {self}")

    @property
    def everything(self) -> bool:
        """Whether this rank holds every key."""
        return self.num_ranks == 1 or self.owner == self.rank

    @property
    def nothing(self) -> bool:
        """Whether this rank can hold no key."""
        return self.owner not in (DISTRIBUTED, self.rank)

    def mine(self, keys: Array) -> Array:
        """[n] bool: which of the int64 `keys` this rank holds."""
        if self.owner != DISTRIBUTED:
            return np.full(len(keys), self.owner == self.rank)
        return np.asarray(np.mod(keys, self.num_ranks) == self.rank)

    def slots(self, keys: Array) -> Array:
        """Slots of the keys of a static table that this rank holds."""
        return keys if self.owner != DISTRIBUTED else keys // self.num_ranks

    def local_rows(self, rows: int) -> int:
        """How many of the keys [0, rows) this rank holds."""
        if self.owner == DISTRIBUTED:
            return max(0, -(-(rows - self.rank) // self.num_ranks))
        return rows if self.owner == self.rank else 0


def plan(
    table: DumpTable, placement: Placement, rows: int | None, key_dtype: str, advance: Callable[[int], None]
) -> list[Piece]:
    """Reads the keys once and returns the pieces that hold this rank's rows, in file order.

    rows:       of a static table: its keys must be exactly [0, rows), each once; None: a dynamic table
    key_dtype:  which integers the caller can hold

    Memory: a block of keys, 24 bytes a chunk, and for a static table one bit for each of this rank's rows. KeysError.
    """
    path = table.key.file.path
    coverage = None if rows is None else _Coverage(placement.local_rows(rows))
    pieces = []
    for chunk, stored in table.key_chunks():
        keys = to_int64(stored, path)
        _check_range(keys, rows, key_dtype, path)
        first = int(table.bounds[chunk, 0])
        if placement.everything:
            pieces.append(Piece(chunk, first, first + len(keys)))
        elif not placement.nothing:
            mine = np.flatnonzero(placement.mine(keys))
            keys = keys[mine]
            if len(mine):
                pieces.append(Piece(chunk, first + int(mine[0]), first + int(mine[-1]) + 1))
        if coverage is not None and not placement.nothing:
            coverage.add(placement.slots(keys))
        advance(stored.nbytes)
    if coverage is not None and not placement.nothing:
        coverage.finish(placement, path)
    return pieces


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
    """That each slot of a shard occurs, at one bit a slot. A table has as many keys as rows, so each occurs once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._bits = np.zeros(-(-slots // 8), np.uint8)

    def add(self, slots: Array) -> None:
        np.bitwise_or.at(self._bits, slots >> 3, np.left_shift(np.uint8(1), (slots & 7).astype(np.uint8)))

    def finish(self, placement: Placement, path: str) -> None:
        for first in range(0, self._slots, _SLOTS_AT_ONCE):
            end = min(first + _SLOTS_AT_ONCE, self._slots)
            bits = np.unpackbits(self._bits[first // 8 : -(-end // 8)], count=end - first, bitorder="little")
            if not bits.all():
                slot = first + int(bits.argmin())
                key = slot if placement.owner != DISTRIBUTED else slot * placement.num_ranks + placement.rank
                raise KeysError(f"lacks the key {key}", file=path, expected="each row of the table once")
