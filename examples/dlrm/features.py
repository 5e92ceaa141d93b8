# SPDX-License-Identifier: Apache-2.0
"""From the columns of a file to what a model takes: labels, log counts, table rows.

- A count x becomes log(1 + max(x, 0)); a missing one becomes 0.
- A category is a number: an integer as it is, text as a hexadecimal number (Criteo's way). That is its key in a dynamic
  table. Its row in another is the number modulo the table's rows, so ids may collide in a table smaller than its
  column.
- A missing category (null or empty text) gives an empty bag, and so a vector of zeros: no row stands for "missing".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from . import columns
from .errors import DataError

_MAX_DIGITS = 16
_BAD_DIGIT = 255
_DIGITS = np.full(256, _BAD_DIGIT, np.uint8)
for _value, _letters in enumerate(zip("0123456789abcdef", "0123456789ABCDEF", strict=True)):
    for _letter in _letters:
        _DIGITS[ord(_letter)] = _value


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a file: their columns, and their numbers in the file (from 1) for messages."""

    file: Path
    numbers: npt.NDArray[np.int64]
    columns: pa.RecordBatch

    def error(self, index: int, column: str, problem: str) -> DataError:
        """The error for row `index` of these rows."""
        return DataError(self.file, problem, row=int(self.numbers[index]), column=column)


@dataclasses.dataclass(frozen=True)
class Features:
    """`labels` [n] and `dense` [n, 13] float32; for each of 26 columns `rows`, the table rows or keys (int64) of the
    fields that are not missing, and `present` [n], which of the n fields those are (bool)."""

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    rows: list[npt.NDArray[np.int64]]
    present: list[npt.NDArray[np.bool_]]


def extract(rows: Rows, table_rows: Sequence[int | None]) -> Features:
    """Converts rows; of a dynamic table the rows are None. Raises DataError for the first malformed field found."""
    labels = _numbers(rows, columns.LABEL)
    wrong = np.flatnonzero((labels != 0) & (labels != 1))
    if wrong.size:
        value = _text(rows, columns.LABEL, wrong[0])
        raise rows.error(wrong[0], columns.LABEL, f"a label is 0 or 1, not {value}")
    dense = np.empty((labels.size, len(columns.DENSE)), np.float32)
    for place, column in enumerate(columns.DENSE):
        dense[:, place] = np.log1p(np.maximum(np.nan_to_num(_numbers(rows, column), nan=0.0), 0.0))
    keys = []
    present = []
    for column, size in zip(columns.CATEGORICAL, table_rows, strict=True):
        ids, column_present = _ids(rows, column)
        # NumPy's remainder has the sign of the divisor: negative ids are fine.
        column_keys = ids.view(np.int64) if size is None else (ids % ids.dtype.type(size)).astype(np.int64)
        keys.append(column_keys)
        present.append(column_present)
    return Features(labels.astype(np.float32), dense, keys, present)


def _numbers(rows: Rows, column: str) -> npt.NDArray[np.float64]:
    """A column as float64, missing fields NaN."""
    array = rows.columns.column(column)
    if _is_text(array.type):
        array = pc.if_else(pc.equal(array, ""), None, array)
    try:
        values = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise _not_a_number(rows, column, array) from None
    except pa.ArrowNotImplementedError:
        raise DataError(rows.file, f"numbers expected, not {array.type}", column=column) from None
    numbers: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    infinite = np.flatnonzero(np.isinf(numbers))
    if infinite.size:
        raise rows.error(infinite[0], column, "a number must be finite")
    return numbers


def _not_a_number(rows: Rows, column: str, array: pa.Array) -> DataError:
    for index, value in enumerate(array.to_pylist()):
        try:
            pc.cast(pa.scalar(value, array.type), pa.float64())
        except pa.ArrowInvalid:
            return rows.error(index, column, f"not a number: {value!r}")
    return DataError(rows.file, "not numbers", column=column)


def _ids(rows: Rows, column: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Ids, int64 or uint64, of the fields that are not missing, and which fields those are."""
    array = rows.columns.column(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        return np.empty(0, np.int64), np.zeros(len(array), np.bool_)
    present = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_integer(array.type):
        integers = array.drop_null().to_numpy(zero_copy_only=False)
        return integers.astype(np.uint64 if integers.dtype == np.uint64 else np.int64), present
    if not _is_text(array.type):
        problem = f"integers or hexadecimal text expected, not {array.type}"
        raise DataError(rows.file, problem, column=column)
    present &= pc.not_equal(array.fill_null(""), "").to_numpy(zero_copy_only=False)
    values, good = _parse_hexadecimal(array.filter(pa.array(present)).cast(pa.large_binary()))
    if not good.all():
        index = np.flatnonzero(present)[np.flatnonzero(~good)[0]]
        text = _text(rows, column, index)
        raise rows.error(index, column, f"not a hexadecimal number of at most {_MAX_DIGITS} digits: {text}")
    return values, present


def _parse_hexadecimal(texts: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Values of hexadecimal texts that are not empty, and which of them are well formed."""
    count = len(texts)
    _, offset_buffer, data_buffer = texts.buffers()
    if count == 0:
        return np.empty(0, np.uint64), np.empty(0, np.bool_)
    offsets = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + count + 1]
    digits = _DIGITS[np.frombuffer(data_buffer, np.uint8)]
    lengths = np.diff(offsets)
    good = lengths <= _MAX_DIGITS
    values = np.zeros(count, np.uint64)
    for place in range(min(int(lengths.max()), _MAX_DIGITS)):
        here = lengths > place
        digit = np.where(here, digits[np.maximum(offsets[1:] - 1 - place, 0)], 0)
        good &= digit != _BAD_DIGIT
        values |= digit.astype(np.uint64) << np.uint64(4 * place)
    return values, good


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _text(rows: Rows, column: str, index: int) -> str:
    value = rows.columns.column(column)[int(index)].as_py()
    return "missing" if value is None or value == "" else repr(value)
