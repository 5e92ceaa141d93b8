# SPDX-License-Identifier: Apache-2.0
"""Divides a split into global batches and gives each rank its part of each.

Global batch b is rows [b B, (b + 1) B) of the split, whatever the number of ranks N; rank r gets its rows
[r B div N, (r + 1) B div N). The last batch may be short: the ranks at the end then get fewer rows, or none.
Several processes of a rank can read in turn: of W the one with number w reads batches w, w + W, w + 2W, ... (`share`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np

from .dataset import Split
from .layout import Layout, Rows
from .sources import Chunk

Part = TypeVar("Part")
B = TypeVar("B")


class Reader(Generic[Part, B]):
    """Iterates over this rank's batches from number `first_batch` on, or each `every`-th of them, anew each time."""

    def __init__(
        self,
        split: Split,
        batch_rows: int,
        layout: Layout[Part, B],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        first_batch: int = 0,
        every: int = 1,
    ) -> None:
        if batch_rows < 1:
            raise ValueError(f"a batch needs at least one row, not {batch_rows}")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} is not one of {num_ranks}")
        self._split = split
        self._batch_rows = batch_rows
        self._layout = layout
        self._first = rank * batch_rows // num_ranks
        self._last = (rank + 1) * batch_rows // num_ranks
        self._first_batch = first_batch
        self._every = every

    @property
    def batches(self) -> int | None:
        """Number of batches, those before the first one too; None if unknown."""
        rows = self._split.rows
        return None if rows is None else -(-rows // self._batch_rows)

    @property
    def batch_bytes(self) -> int:
        """Of the arrays of this rank's part of a batch, about."""
        return (self._last - self._first) * self._layout.row_bytes

    def share(self, number: int, count: int) -> Reader[Part, B]:
        """One of `count` readers that give these batches in turn, number 0 the first."""
        share = copy.copy(self)
        share._first_batch += number * self._every
        share._every *= count
        return share

    def __iter__(self) -> Iterator[B]:
        size = self._batch_rows
        before = 0  # rows of the source in earlier chunks
        position = 0  # rows of the split in earlier chunks
        parts: list[Part] = []
        for chunk in self._split.source.chunks(self._is_wanted):
            end = self._split.count_before(before + chunk.length)
            for index in range(max(position // size, self._first_batch), -(-end // size)):
                if (index - self._first_batch) % self._every:
                    continue
                first = max(position, index * size + self._first)
                last = min(end, index * size + self._last)
                if first < last:
                    parts.append(self._extract(chunk, before, first - position, last - position))
                if end >= (index + 1) * size:
                    yield self._layout.batch(index, size, parts)
                    parts = []
            before += chunk.length
            position = end
        after = position // size - self._first_batch
        if position % size and after >= 0 and after % self._every == 0:
            yield self._layout.batch(position // size, position % size, parts)

    def _is_wanted(self, first: int, last: int) -> bool:
        return self._own_before(self._split.count_before(last)) > self._own_before(self._split.count_before(first))

    def _own_before(self, position: int) -> int:
        """How many of the split's first `position` rows are given to this rank, by this reader."""
        own = self._last - self._first
        whole, rest = divmod(max(position - self._first_batch * self._batch_rows, 0), self._batch_rows)
        given, turn = -(-whole // self._every), whole % self._every
        return given * own + (min(max(rest - self._first, 0), own) if turn == 0 else 0)

    def _extract(self, chunk: Chunk, before: int, first: int, last: int) -> Part:
        """What rows [first, last) among those of the chunk that belong to the split come to."""
        if chunk.columns is None:
            raise AssertionError("a chunk was skipped although rows of it are wanted")
        chosen = np.flatnonzero(self._split.mask(before, chunk.length))[first:last]
        selected = chunk.columns.slice(int(chosen[0]), int(chosen[-1] - chosen[0]) + 1)
        if selected.num_rows != chosen.size:
            selected = selected.take(chosen - chosen[0])
        return self._layout.extract(Rows(chunk.file, chunk.first + chosen + 1, selected))
