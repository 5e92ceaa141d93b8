# SPDX-License-Identifier: Apache-2.0
"""Where a dump takes its rows from: chunks of NumPy arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .errors import MismatchError
from .tables import STATIC, Table

Array = np.ndarray[Any, Any]

_COPIES = 12  # that are under way or wait: what they copy from may be memory of their own


class Rows(NamedTuple):
    """Some rows: keys [n], weights [n, dimension], for each slot its states [n, columns] ([n] when columns is 1), and
    among these what else is kept [n].
    """

    keys: Array
    weights: Array
    states: Mapping[str, Array]


@dataclass(frozen=True)
class Source:
    """This rank's rows of one table.

    table:   the table as a whole, equal on all ranks
    rows:    how many rows this rank writes; 0 is legal
    chunks:  called once with the number of rows a chunk best has; yields Rows of any size, `rows` in total, this
             rank's keys in any order. Dtypes are the table's. An array must not change after it was yielded.
    """

    table: Table
    rows: int
    chunks: Callable[[int], Iterable[Rows]]

    def arrays(self, size: int, rows_of_all: int) -> Iterator[tuple[int, list[Array]]]:
        """(rows before it, an array [n, columns] for each of the table's files) of each chunk.

        rows_of_all: of all ranks. MismatchError for anything but the rows that were declared.
        """
        files, done = list(self.table.files()), 0
        for rows in self.chunks(size) if self.rows else ():
            count = len(rows.keys)
            if done + count > self.rows:
                raise self._wrong(f"yields more than the {self.rows} rows it declared")
            given = [
                rows.keys,
                rows.weights,
                *(rows.states.get(slot) for slot in (*self.table.states, *self.table.kept)),
            ]
            arrays = []
            for file, array in zip(files, given, strict=True):
                if array is None:
                    raise self._wrong(f"yields no state {file.header.state!r}")
                shapes = [(count, file.columns)] + [(count,)] * (file.columns == 1)
                if array.shape not in shapes or array.dtype.name != file.dtype.name:
                    raise self._wrong(
                        f"yields {array.dtype.name} {list(array.shape)} for {file.name}, "
                        f"not {file.dtype.name} {list(shapes[0])}"
                    )
                arrays.append(np.ascontiguousarray(array, dtype=file.dtype).reshape(shapes[0]))
            if self.table.kind == STATIC and count and not 0 <= rows.keys.min() <= rows.keys.max() < rows_of_all:
                raise self._wrong(f"yields a key outside [0, {rows_of_all})")
            yield done, arrays
            done += count
        if done != self.rows:
            raise self._wrong(f"yields {done} rows, but declared {self.rows}")

    def _wrong(self, problem: str) -> MismatchError:
        return MismatchError(f"the source of table {self.table.name!r} {problem}")


def copied(
    source: Source, size: int, rows_of_all: int, pool: ThreadPoolExecutor, advance: Callable[[int], None]
) -> Source:
    """The source as it is now, copied to memory. Its `chunks` gives the copy back as soon as all of it was taken.

    size, rows_of_all: as of Source.arrays; pool: copies; advance: is told the bytes that were copied.
    """
    table = source.table
    pending: deque[Future[None]] = deque()
    copies = [np.empty((source.rows, file.columns), file.dtype) for file in table.files()]
    for done, arrays in source.arrays(size, rows_of_all):
        for copy, array in zip(copies, arrays, strict=True):
            while len(pending) >= _COPIES:
                pending.popleft().result()
            pending.append(pool.submit(copy.__setitem__, slice(done, done + len(array)), array))
            advance(array.nbytes)
    for future in pending:
        future.result()

    def chunks(size: int) -> Iterable[Rows]:
        keys, weights, *others = copies
        copies.clear()
        states = dict(zip((*table.states, *table.kept), others, strict=True))
        return from_arrays(table, keys[:, 0], weights, states).chunks(size)

    return Source(table, source.rows, chunks)


def from_arrays(table: Table, keys: Array, weights: Array, states: Mapping[str, Array] | None = None) -> Source:
    """A Source over arrays in memory; nothing is copied."""
    held = dict(states or {})

    def chunks(size: int) -> Iterator[Rows]:
        for first in range(0, len(keys), size):
            rows = slice(first, first + size)
            yield Rows(keys[rows], weights[rows], {slot: array[rows] for slot, array in held.items()})

    return Source(table, len(keys), chunks)
