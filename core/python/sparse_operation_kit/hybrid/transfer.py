# SPDX-License-Identifier: Apache-2.0
"""Whole tables in and out of the variables of all ranks: what is sent and written, in which order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .layout import Layout, Member, chunks
from .strategy import DistEmbeddingStrategy

Array = np.ndarray[Any, Any]

TOGETHER = 1 << 25
"""Elements that a rank sends at once."""


class Segment(NamedTuple):
    """Rows of a variable: `number` slots from slot `first` of a member on."""

    variable: int
    member: Member
    first: int
    number: int


def as_floats(rows: Array) -> Array:
    """A copy of numbers that both frameworks take: float64 of those of 8 bytes and more, float32 of all others."""
    return np.array(rows, np.float64 if rows.dtype.itemsize >= 8 else np.float32)


class Transfer:
    """The tables of a plan, between arrays and the variables of `num_ranks` ranks, of which this is `rank`."""

    def __init__(self, strategy: DistEmbeddingStrategy, layout: Layout, rank: int) -> None:
        self._configs, self._layout = strategy.global_configs, layout
        self._rank, self._num_ranks = rank, strategy.world_size

    def batches(self) -> Iterator[list[Segment]]:
        """Segments of all variables, as many at a time as are sent together; the same on all ranks."""
        batch: list[Segment] = []
        total = 0
        for number, variable in enumerate(self._layout.variables):
            place = variable.placement(self._num_ranks, 0)  # which has the most rows of a row-sliced table
            for member in variable.members:
                rows = member.rows if variable.owner >= 0 else place.local_rows
                for first, count in chunks(rows, member.columns, TOGETHER):
                    if batch and total + count * member.columns > TOGETHER:
                        yield batch
                        batch, total = [], 0
                    batch.append(Segment(number, member, first, count))
                    total += count * member.columns
        if batch:
            yield batch

    def rows(self, segment: Segment, rank: int) -> range:
        """The rows of the table that a rank has of a segment."""
        variable = self._layout.variables[segment.variable]
        first, last = segment.first, segment.first + segment.number
        if variable.owner >= 0:
            return range(first, last) if variable.owner == rank else range(0)
        place = variable.placement(self._num_ranks, rank)
        last = min(last, place.local_rows)
        if first >= last:
            return range(0)
        return range(place.global_keys(first), place.global_keys(last - 1) + 1, place.key_stride)

    def own(self, segment: Segment) -> slice:
        """This rank's slots of a segment."""
        first = segment.member.first_row + segment.first
        return slice(first, first + len(self.rows(segment, self._rank)))

    def put(self, tables: Sequence[Array], batch: Sequence[Segment], came: Array) -> None:
        """Puts what came of a batch, flat, rank by rank and segment by segment, into the tables."""
        at = 0
        for rank in range(self._num_ranks):
            for segment in batch:
                rows, member = self.rows(segment, rank), segment.member
                end = at + len(rows) * member.columns
                columns = slice(member.first_column, member.first_column + member.columns)
                where = slice(rows.start, rows.stop, rows.step)
                tables[member.table][where, columns] = came[at:end].reshape(-1, member.columns)
                at = end

    def check(self, weights: Sequence[Any], chunk: int) -> list[Array]:
        """The tables as arrays; those that are paths of .npy files mapped.

        Raises ValueError for another number of them, or another shape, TypeError for what are no numbers, OSError.
        """
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        if len(weights) != len(self._configs):
            raise ValueError(
                f"You called `set_weights(weights)` with a weight list of length {len(weights)}, but the layer was "
                f"expecting {len(self._configs)} weights."
            )
        arrays = []
        for table, (value, config) in enumerate(zip(weights, self._configs, strict=True)):
            is_path = isinstance(value, (str, os.PathLike))
            array = np.load(value, mmap_mode="r") if is_path else np.asarray(value)
            what = f"weights[{table}]" + (f" ({os.fspath(value)})" if is_path else "")
            expected = (config["input_dim"], config["output_dim"])
            if array.shape != expected:
                raise ValueError(f"{what} has the shape {list(array.shape)}, table {table} has {list(expected)}")
            if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
                raise TypeError(f"{what} is {array.dtype}, which is no number that a table can hold")
            arrays.append(array)
        return arrays

    def writes(self, given: Sequence[Array], chunk: int) -> Iterator[tuple[int, int, Array]]:
        """(variable, first slot, rows) of what this rank holds, `chunk` elements at a time."""
        for number in self._layout.of_rank(self._rank):
            for member in self._layout.variables[number].members:
                columns = slice(member.first_column, member.first_column + member.columns)
                for first, count in chunks(member.rows, member.columns, chunk):
                    segment = Segment(number, member, first, count)
                    rows = self.rows(segment, self._rank)
                    if rows:
                        where = slice(rows.start, rows.stop, rows.step)
                        yield number, member.first_row + first, given[member.table][where, columns]
