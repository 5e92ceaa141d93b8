# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers and of nested lists of numbers, as arrays.

A column of lists in which all are of one length is one array: list<list<int64>> with 100 lists of 10 keys in each row
becomes [n, 100, 10]. Where lengths differ it is its values, with row splits for each depth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from . import columns, fields
from .errors import DataError
from .layout import Rows

_INT64 = np.dtype(np.int64)


@dataclasses.dataclass(frozen=True)
class ArrayColumn:
    """What each row of a column holds: a number (shape ()), a list of numbers ((length,)), a list of lists, and so on;
    None is any length.

    dtype: "int64" of integers (unsigned ones of 64 bits by their bits), "float32" of any numbers.
    """

    name: str
    shape: tuple[int | None, ...] = ()
    dtype: str = "int64"

    def __post_init__(self) -> None:
        if self.dtype not in ("int64", "float32"):
            raise ValueError(f"column {self.name}: the dtype must be int64 or float32, not {self.dtype}")

    @property
    def row_bytes(self) -> int:
        """Of a row; without lists of any length."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.is_dense else 0  # type: ignore[arg-type]

    @property
    def is_dense(self) -> bool:
        """Whether rows are of one shape."""
        return None not in self.shape


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Lists of any lengths: `values` [total], and `splits` of each depth, the outermost first: list i of a depth is
    [splits[i], splits[i + 1]) of the next one, or of the values. Those of the first depth are [n + 1]."""

    values: npt.NDArray[Any]
    splits: tuple[npt.NDArray[np.int64], ...]


@dataclasses.dataclass(frozen=True)
class ArrayBatch:
    """A rank's n rows of global batch `index`, which has `global_rows` rows over all ranks: of each column an array
    [n, *shape], or Ragged where a length of the shape is None."""

    index: int
    global_rows: int
    arrays: Mapping[str, npt.NDArray[Any] | Ragged]

    @property
    def labels(self) -> npt.NDArray[np.float32]:
        """[n], of the column that the layout has as its label."""
        labels = self.arrays[columns.LABEL]
        assert isinstance(labels, np.ndarray)
        return labels


@dataclasses.dataclass(frozen=True)
class _Lists:
    """A column of some rows: all numbers in them, and the lengths of all lists of each depth."""

    values: npt.NDArray[Any]
    lengths: list[npt.NDArray[np.int64]]


class ArrayLayout:
    """A Layout of ArrayBatch: these columns and, with has_label, `label`, which is 0 or 1."""

    def __init__(self, array_columns: Sequence[ArrayColumn], *, has_label: bool = False) -> None:
        self._columns = tuple(array_columns)
        self._has_label = has_label
        self.row_bytes = 4 * has_label + sum(column.row_bytes for column in self._columns)
        self.names = (*(column.name for column in self._columns), *([columns.LABEL] if has_label else []))
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"columns are named twice: {', '.join(self.names)}")

    def extract(self, rows: Rows) -> dict[str, _Lists]:
        """See Layout."""
        found = {column.name: _lists(rows, column) for column in self._columns}
        if self._has_label:
            found[columns.LABEL] = _Lists(fields.labels(rows, columns.LABEL), [])
        return found

    def batch(self, index: int, global_rows: int, parts: Sequence[dict[str, _Lists]]) -> ArrayBatch:
        """See Layout."""
        arrays = {column.name: _joined([part[column.name] for part in parts], column) for column in self._columns}
        if self._has_label:
            labels = [part[columns.LABEL].values for part in parts]
            arrays[columns.LABEL] = np.concatenate([np.empty(0, np.float32), *labels])
        return ArrayBatch(index, global_rows, arrays)


def column_of(name: str, kind: pa.DataType, dtype: str | None = None) -> ArrayColumn:
    """The column of any lengths that a type of Arrow describes; `dtype` None: that of its numbers."""
    depth = 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return ArrayColumn(name, (None,) * depth, dtype or ("float32" if pa.types.is_floating(kind) else "int64"))


def _lists(rows: Rows, column: ArrayColumn) -> _Lists:
    array = rows.columns.column(column.name)
    _check_type(rows, column, array.type)
    lengths: list[npt.NDArray[np.int64]] = []
    for depth, length in enumerate(column.shape, 1):
        _check_missing(rows, column, array, lengths, "a list")
        if pa.types.is_null(array.type):  # and so there are none
            lengths.append(np.empty(0, np.int64))
            continue
        lengths.append(pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64))
        wrong = np.flatnonzero(lengths[-1] != length) if length is not None else np.empty(0, np.int64)
        if wrong.size:
            found = lengths[-1][wrong[0]]
            problem = f"lists of {length} expected at depth {depth} of {len(column.shape)}, not of {found}"
            raise rows.error(_row(lengths[:-1], wrong[0]), column.name, problem)
        array = array.flatten()
    _check_missing(rows, column, array, lengths, "a number")
    return _Lists(array.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False), lengths)


def _check_type(rows: Rows, column: ArrayColumn, kind: pa.DataType) -> None:
    """Raises DataError unless the type is of lists of lists of numbers, or, where all lists are empty, of nulls."""
    own = kind
    for _ in column.shape:
        if not (_is_list(kind) or pa.types.is_null(kind)):
            break
        kind = kind.value_type if _is_list(kind) else kind
    else:
        is_float = column.dtype == "float32" and pa.types.is_floating(kind)
        if pa.types.is_integer(kind) or is_float or pa.types.is_null(kind):
            return
    expected = "lists of " * len(column.shape) + ("integers" if column.dtype == "int64" else "numbers")
    raise DataError(rows.file, f"{expected} expected, not {own}", column=column.name)


def _check_missing(
    rows: Rows, column: ArrayColumn, array: pa.Array, lengths: Sequence[npt.NDArray[np.int64]], what: str
) -> None:
    if array.null_count:
        missing = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
        raise rows.error(_row(lengths, missing[0]), column.name, f"{what} is missing")


def _row(lengths: Sequence[npt.NDArray[np.int64]], index: int) -> int:
    """The row that element `index` is in, below lists of these lengths."""
    for level in reversed(lengths):
        index = int(np.searchsorted(np.cumsum(level), index, side="right"))
    return int(index)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _joined(parts: Sequence[_Lists], column: ArrayColumn) -> npt.NDArray[Any] | Ragged:
    values = np.concatenate([np.empty(0, column.dtype), *(part.values for part in parts)])
    if column.is_dense:
        rows = sum(part.lengths[0].size if column.shape else part.values.size for part in parts)
        return values.reshape(rows, *(length for length in column.shape if length is not None))
    lengths = [[part.lengths[depth] for part in parts] for depth in range(len(column.shape))]
    return Ragged(values, tuple(np.cumsum(np.concatenate([np.zeros(1, _INT64), *each])) for each in lengths))
