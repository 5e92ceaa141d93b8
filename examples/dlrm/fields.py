# SPDX-License-Identifier: Apache-2.0
"""Fields of a column that are numbers or text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import DataError
from .layout import Rows


def labels(rows: Rows, column: str) -> npt.NDArray[np.float32]:
    """A column of labels. Raises DataError for the first that is not 0 or 1."""
    values = numbers(rows, column)
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if wrong.size:
        raise rows.error(wrong[0], column, f"a label is 0 or 1, not {text(rows, column, wrong[0])}")
    return values.astype(np.float32)


def numbers(rows: Rows, column: str) -> npt.NDArray[np.float64]:
    """A column as float64, missing fields NaN."""
    array = rows.columns.column(column)
    if pa.types.is_integer(array.type) and array.null_count == 0:
        return np.asarray(array.to_numpy(), np.float64)
    if is_text(array.type):
        array = pc.if_else(pc.equal(array, ""), None, array)
    try:
        values = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise _not_a_number(rows, column, array) from None
    except pa.ArrowNotImplementedError:
        raise DataError(rows.file, f"numbers expected, not {array.type}", column=column) from None
    found: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    infinite = np.flatnonzero(np.isinf(found))
    if infinite.size:
        raise rows.error(infinite[0], column, "a number must be finite")
    return found


def _not_a_number(rows: Rows, column: str, array: pa.Array) -> DataError:
    for index, value in enumerate(array.to_pylist()):
        try:
            pc.cast(pa.scalar(value, array.type), pa.float64())
        except pa.ArrowInvalid:
            return rows.error(index, column, f"not a number: {value!r}")
    return DataError(rows.file, "not numbers", column=column)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def text(rows: Rows, column: str, index: int) -> str:
    """A field, as a message shows it."""
    value = rows.columns.column(column)[int(index)].as_py()
    return "missing" if value is None or value == "" else repr(value)
