# SPDX-License-Identifier: Apache-2.0
"""diff: two dumps compared row by row, by key, whatever the order of their rows.

Memory: about 40 bytes a key of the larger table; rows stream.
"""

import mmap
from typing import Any

import numpy as np

from . import manifest
from .plan import to_int64
from .reader import Dump, DumpFile, DumpTable
from .source import Array

_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def diff(first: Dump, second: Dump, tolerance: float = 0.0) -> dict[str, Any]:
    """Compares two open dumps.

    tolerance: a row differs when an element differs by more than this; 0: when a bit differs.

    Returns {"equal", "metadata": [{"member", "first", "second"}], "only_first", "only_second": [table names], "tables":
    [...]}; a table has rows of both, keys only in one, and for weight and states the rows that differ and the largest
    absolute difference ("inf" where one of two values is not finite).
    """
    metadata = _metadata(first, second)
    held = [
        _table(first.tables[stem], second.tables[stem], tolerance) for stem in first.tables if stem in second.tables
    ]
    only_first = [table.table.name for stem, table in first.tables.items() if stem not in second.tables]
    only_second = [table.table.name for stem, table in second.tables.items() if stem not in first.tables]
    return {
        "first": first.path,
        "second": second.path,
        "equal": not (metadata or only_first or only_second) and all(table["equal"] for table in held),
        "tolerance": tolerance,
        "metadata": metadata,
        "only_first": only_first,
        "only_second": only_second,
        "tables": held,
    }


def _metadata(first: Dump, second: Dump) -> list[dict[str, Any]]:
    """step, extra and optimizer; a dump of SOK 2.x has none of them and differs from nothing."""
    if first.manifest is None or second.manifest is None:
        return []
    found = []
    one = {"step": first.step, "extra": first.extra, "optimizer": manifest.optimizer_to_json(first.optimizer)}
    two = {"step": second.step, "extra": second.extra, "optimizer": manifest.optimizer_to_json(second.optimizer)}
    for member in one:
        if one[member] != two[member]:
            found.append({"member": member, "first": one[member], "second": two[member]})
    return found


def _keys(table: DumpTable) -> Array:
    keys = np.empty(table.rows, np.int64)
    for chunk, part in table.key_chunks():
        keys[table.bounds[chunk, 0] : table.bounds[chunk, 1]] = to_int64(part, table.key.file.path)
    return keys


def _table(first: DumpTable, second: DumpTable, tolerance: float) -> dict[str, Any]:
    result: dict[str, Any] = {"name": first.table.name, "rows": [first.rows, second.rows]}
    keys = _keys(second)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    files = {"weight": (first.weight, second.weight)}
    only = []
    for name in sorted(set(first.states) | set(second.states)):
        if name in first.states and name in second.states:
            files["-".join(name)] = (first.states[name], second.states[name])
        else:
            only.append({"state": "-".join(name), "in": "first" if name in first.states else "second"})
    comparisons = {name: _Comparison(*pair, tolerance) for name, pair in files.items()}
    found = 0
    for chunk, part in first.key_chunks():
        begin, end = (int(bound) for bound in first.bounds[chunk])
        places = np.searchsorted(keys, to_int64(part, first.key.file.path))
        places[places == len(keys)] = 0
        here = keys[places] == part.astype(np.int64) if len(keys) else np.zeros(len(part), bool)
        rows = order[places[here]] if len(keys) else places[:0]
        found += len(rows)
        for comparison in comparisons.values():
            comparison.add(chunk, begin, end, here, rows)
    result.update(
        only_first=first.rows - found,
        only_second=second.rows - found,
        repeated_keys=int((keys[1:] == keys[:-1]).sum()),
        states_in_one=only,
        fields={name: comparison.result() for name, comparison in comparisons.items()},
    )
    same = all(field["rows_that_differ"] == 0 and field["comparable"] for field in result["fields"].values())
    result["equal"] = same and not only and result["only_first"] == 0 and result["only_second"] == 0
    return result


class _Comparison:
    """One field of a table in both dumps."""

    def __init__(self, first: DumpFile, second: DumpFile, tolerance: float) -> None:
        self._first, self._second, self._tolerance = first, second, tolerance
        self._comparable = first.spec.columns == second.spec.columns
        self._differ, self._largest = 0, 0.0
        self._buffer = np.empty(0, np.uint8)
        self._rows: Array = np.empty((0, second.spec.columns), second.spec.dtype)
        if self._comparable and second.file.size > second.spec.size(0):
            mapped = mmap.mmap(second.file.fd, second.file.size, prot=mmap.PROT_READ)
            self._rows = np.frombuffer(mapped, second.spec.dtype, offset=second.spec.size(0)).reshape(
                -1, second.spec.columns
            )

    def add(self, chunk: int, begin: int, end: int, here: Array, rows: Array) -> None:
        """Compares the rows `here` of first's chunk [begin, end) with second's `rows`."""
        if not self._comparable or not len(rows):
            return
        size = (end - begin) * self._first.spec.row_bytes
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.uint8)
        one = self._first.read_rows(begin, end, self._buffer)[here]
        two = self._rows[rows]
        if one.dtype == two.dtype and self._tolerance == 0:
            bits = _UNSIGNED[one.dtype.itemsize]
            different = one.view(bits) != two.view(bits)
        else:
            different = ~((one == two) | (np.isnan(one) & np.isnan(two)))
        if not different.any():
            return
        with np.errstate(invalid="ignore"):
            distance = np.abs(one[different].astype(np.float64) - two[different].astype(np.float64))
        distance[np.isnan(distance)] = np.inf
        self._largest = max(self._largest, float(distance.max()))
        if self._tolerance > 0:
            different[different] = distance > self._tolerance
        self._differ += int(different.any(axis=1).sum())

    def result(self) -> dict[str, Any]:
        return {
            "comparable": self._comparable,
            "columns": [self._first.spec.columns, self._second.spec.columns],
            "dtypes": [self._first.spec.header.dtype, self._second.spec.header.dtype],
            "rows_that_differ": self._differ,
            "largest_difference": self._largest if np.isfinite(self._largest) else "inf",
        }
