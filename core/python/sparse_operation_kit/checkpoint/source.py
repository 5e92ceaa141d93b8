# SPDX-License-Identifier: Apache-2.0
"""Where a dump takes its rows from: chunks of NumPy arrays."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .tables import Table

Array = np.ndarray[Any, Any]


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


def from_arrays(table: Table, keys: Array, weights: Array, states: Mapping[str, Array] | None = None) -> Source:
    """A Source over arrays in memory; nothing is copied."""
    held = dict(states or {})

    def chunks(size: int) -> Iterator[Rows]:
        for first in range(0, len(keys), size):
            rows = slice(first, first + size)
            yield Rows(keys[rows], weights[rows], {slot: array[rows] for slot, array in held.items()})

    return Source(table, len(keys), chunks)
