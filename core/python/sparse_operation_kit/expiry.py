# SPDX-License-Identifier: Apache-2.0
"""Which rows of a dynamic table go on call: those that are small, seldom or long unused, or that a function names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .dynamic import ranks_in, uses_in
from .held import Array, HeldDynamicTable

Predicate = Callable[[Array, Array, Array | None], Any]
_CHUNK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Expiry:
    """A row goes where one of these says so; see `Frontend.expire`."""

    min_norm: float | None = None
    min_score: int | None = None
    max_age: float | None = None
    max_idle: int | None = None
    predicate: Predicate | None = None

    def check(self, table: HeldDynamicTable) -> None:
        """Raises ValueError and TypeError for what the table does not have."""
        where, given = f"table '{table.name}'", {k: v for k, v in vars(self).items() if v is not None}
        if not given:
            raise ValueError(f"{where}: say which rows are to go: {', '.join(vars(self))}")
        predicate = given.pop("predicate", None)
        if predicate is not None and not callable(predicate):
            raise TypeError(f"{where}: predicate must be a function of (keys, rows, scores), got {predicate!r}")
        for name, value in given.items():
            if isinstance(value, bool) or not hasattr(value, "__float__"):
                raise TypeError(f"{where}: {name} must be a number, got {value!r}")
            if not float(value) >= 0:
                raise ValueError(f"{where}: {name} must not be negative, got {value}")
        by_score = [name for name in ("min_score", "max_age", "max_idle") if name in given]
        if by_score and "score" not in table.kept:
            raise ValueError(
                f"{where} does not keep how its rows were used, so they cannot go by {by_score[0]}: give it an "
                "evict_strategy or a time_to_live"
            )

    def of(self, table: HeldDynamicTable) -> Array:
        """[n] int64: the keys of the rows that go. The table is read in pieces."""
        last_use = -1
        if self.max_idle is not None:
            last_use = table.generations(0.0)[0] - int(self.max_idle)
        if self.max_age is not None:
            last_use = max(last_use, table.generations(float(self.max_age))[1])
        found = [np.zeros(0, np.int64)]
        row_bytes = table.placement.dimension * np.dtype(table.stored_dtype).itemsize
        needs_rows = self.min_norm is not None or self.predicate is not None
        for keys, scores, rows in _pieces(table, max(1, _CHUNK_BYTES // row_bytes), needs_rows):
            goes = np.zeros(len(keys), np.bool_)
            if scores is not None:
                goes |= uses_in(scores) <= last_use
                if self.min_score is not None:
                    goes |= ranks_in(scores) < self.min_score
            if rows is not None:
                if self.min_norm is not None:
                    goes |= np.linalg.norm(rows.astype(np.float64), axis=1) < self.min_norm
                if self.predicate is not None:
                    goes |= self._named(table, keys, rows, None if scores is None else ranks_in(scores))
            found.append(keys[goes])
        return np.concatenate(found)

    def _named(self, table: HeldDynamicTable, keys: Array, rows: Array, scores: Array | None) -> Array:
        assert self.predicate is not None
        named = np.asarray(self.predicate(keys.copy(), rows.copy(), scores))
        if named.dtype != np.bool_ or named.shape != keys.shape:
            raise ValueError(
                f"table '{table.name}': predicate must return booleans {list(keys.shape)}, one a key, got "
                f"{named.dtype} {list(named.shape)}"
            )
        return named


def _pieces(table: HeldDynamicTable, size: int, needs_rows: bool) -> Iterator[tuple[Array, Array | None, Array | None]]:
    """(keys, scores, rows where they are needed) of what is in the table, and in its store."""
    for keys, slots in table.entries(size):
        scores = table.kept["score"].read(slots) if "score" in table.kept else None
        yield keys, scores, table.rows.read(slots) if needs_rows else None
    if table.stored is not None:
        for keys, records in table.stored.pieces(table, size):
            yield keys, table.stored.scores(table, records), table.stored.rows(table, records) if needs_rows else None
