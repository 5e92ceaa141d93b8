# SPDX-License-Identifier: Apache-2.0
"""Rows that are loaded into a table of a narrower dtype: no finite element may become infinite."""

from __future__ import annotations

import numpy as np

from ..arguments import INFINITE_FROM
from .errors import MismatchError
from .reader import DumpTable
from .source import Array


class Narrow:
    """What a table of `row_dtype` does not hold. Rows are rounded to nearest as they are written."""

    def __init__(self, table: DumpTable, row_dtype: str, name: str) -> None:
        self._table, self._row_dtype, self._name = table, row_dtype, name
        self._limit = INFINITE_FROM[row_dtype]

    @staticmethod
    def of(table: DumpTable, row_dtype: str | None, name: str) -> Narrow | None:
        """For the variable `name`; None where its dtype holds all that the dump's does."""
        stored = table.table.row_dtype or table.weight.spec.header.dtype
        if row_dtype is None or stored not in INFINITE_FROM or INFINITE_FROM[stored] <= INFINITE_FROM[row_dtype]:
            return None
        return Narrow(table, row_dtype, name)

    def check(self, weights: Array, first: int) -> None:
        """MismatchError for rows [first, ...) of the dump if one has such an element."""
        # Two fast passes: only what has a NaN, or something large, is looked at by element.
        if not weights.size or (-self._limit < weights.min() and weights.max() < self._limit):
            return
        beyond = np.isfinite(weights) & (np.abs(weights) >= self._limit)
        if not beyond.any():
            return
        row, column = (int(place) for place in np.argwhere(beyond)[0])
        size = self._table.key.spec.row_bytes
        key = self._table.key.read_rows(first + row, first + row + 1, np.empty(size, np.uint8))
        raise MismatchError(
            f"the row of key {int(key[0, 0])} has the element {weights[row, column]!s}",
            file=self._table.weight.file.path,
            expected=f"what {self._row_dtype} holds, the dtype of {self._name!r}",
        )
