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
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from . import columns, fields
from .errors import DataError
from .keyed_ids import KeyedIds
from .layout import Rows

_MAX_DIGITS = 16
_BAD_DIGIT = 255
_DIGITS = np.full(256, _BAD_DIGIT, np.uint8)
for _value, _letters in enumerate(zip("0123456789abcdef", "0123456789ABCDEF", strict=True)):
    for _letter in _letters:
        _DIGITS[ord(_letter)] = _value


@dataclasses.dataclass(frozen=True)
class Features:
    """`labels` [n] and `dense` [n, 13] float32; for each of 26 columns `rows`, the table rows or keys (int64) of the
    fields that are not missing, and `present` [n], which of the n fields those are (bool)."""

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    rows: list[npt.NDArray[np.int64]]
    present: list[npt.NDArray[np.bool_]]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A rank's n rows of global batch `index`, which has `global_rows` rows over all ranks.

    labels [n] float32, dense [n, 13] float32; `ids` of the 26 columns, int64 (table rows, or keys of dynamic tables): a
    bag is empty where the field is missing.
    """

    index: int
    global_rows: int
    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: KeyedIds[npt.NDArray[np.int64]]


@dataclasses.dataclass(frozen=True)
class CriteoLayout:
    """Criteo's columns, for tables of so many rows (None: dynamic). A Layout of Batch."""

    table_rows: tuple[int | None, ...]
    names = columns.ALL
    # A label, the counts, and of each category an id and an offset.
    row_bytes = 4 + 4 * len(columns.DENSE) + 16 * len(columns.CATEGORICAL)

    def extract(self, rows: Rows) -> Features:
        """See Layout."""
        return extract(rows, self.table_rows)

    def batch(self, index: int, global_rows: int, parts: Sequence[Features]) -> Batch:
        """See Layout."""
        parts = parts or [_nothing(len(self.table_rows))]
        places = range(len(self.table_rows))
        labels = np.concatenate([part.labels for part in parts])
        values = np.concatenate([part.rows[place] for place in places for part in parts])
        bags = len(places) * labels.size
        if values.size == bags:  # an id in each, and nothing to sum up
            offsets = np.arange(bags + 1, dtype=np.int64)
        else:
            offsets = np.zeros(bags + 1, np.int64)
            np.cumsum(np.concatenate([part.present[place] for place in places for part in parts]), out=offsets[1:])
        ends = [0, *np.cumsum([sum(part.rows[place].size for part in parts) for place in places]).tolist()]
        dense = np.concatenate([part.dense for part in parts])
        return Batch(index, global_rows, labels, dense, KeyedIds(columns.CATEGORICAL, values, offsets, ends))


def extract(rows: Rows, table_rows: Sequence[int | None]) -> Features:
    """Converts rows; of a dynamic table the rows are None. Raises DataError for the first malformed field found."""
    labels = fields.labels(rows, columns.LABEL)
    dense = np.empty((labels.size, len(columns.DENSE)), np.float32)
    for place, column in enumerate(columns.DENSE):
        dense[:, place] = np.log1p(np.fmax(fields.numbers(rows, column), 0.0))  # of NaN and 0: 0
    keys = []
    present = []
    for column, size in zip(columns.CATEGORICAL, table_rows, strict=True):
        ids, column_present = _ids(rows, column)
        keys.append(ids.view(np.int64) if size is None else _rows_of(ids, size))
        present.append(column_present)
    return Features(labels, dense, keys, present)


def _rows_of(ids: npt.NDArray[Any], size: int) -> npt.NDArray[np.int64]:
    if ids.size and (ids.min() < 0 or ids.max() >= size):  # looking takes a tenth of the time of dividing
        # NumPy's remainder has the sign of the divisor: negative ids are fine.
        ids = ids % ids.dtype.type(size)
    return ids.view(np.int64)


def _ids(rows: Rows, column: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Ids, int64 or uint64, of the fields that are not missing, and which fields those are."""
    array = rows.columns.column(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        return np.empty(0, np.int64), np.zeros(len(array), np.bool_)
    present = _present(array)
    if pa.types.is_integer(array.type):
        integers = array.drop_null().to_numpy(zero_copy_only=False)
        return integers.astype(np.uint64 if integers.dtype == np.uint64 else np.int64, copy=False), present
    if not fields.is_text(array.type):
        problem = f"integers or hexadecimal text expected, not {array.type}"
        raise DataError(rows.file, problem, column=column)
    present &= pc.not_equal(array.fill_null(""), "").to_numpy(zero_copy_only=False)
    values, good = _parse_hexadecimal(array.filter(pa.array(present)).cast(pa.large_binary()))
    if not good.all():
        index = np.flatnonzero(present)[np.flatnonzero(~good)[0]]
        text = fields.text(rows, column, index)
        raise rows.error(index, column, f"not a hexadecimal number of at most {_MAX_DIGITS} digits: {text}")
    return values, present


def _present(array: pa.Array) -> npt.NDArray[np.bool_]:
    """[n], which fields are not null."""
    if array.null_count == 0:  # Arrow's own way takes five times as long
        return np.ones(len(array), np.bool_)
    present: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return present


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


def _nothing(categories: int) -> Features:
    return Features(
        labels=np.empty(0, np.float32),
        dense=np.empty((0, len(columns.DENSE)), np.float32),
        rows=[np.empty(0, np.int64)] * categories,
        present=[np.empty(0, np.bool_)] * categories,
    )
