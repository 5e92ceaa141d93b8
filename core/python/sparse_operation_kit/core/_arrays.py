# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays as the views that the C interface takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi

Array = npt.NDArray[Any]

_DTYPES = {
    np.dtype(np.int32): _abi.INT32,
    np.dtype(np.int64): _abi.INT64,
    np.dtype(np.uint32): _abi.UINT32,
    np.dtype(np.uint64): _abi.UINT64,
    np.dtype(np.float16): _abi.FLOAT16,
    np.dtype(np.float32): _abi.FLOAT32,
    np.dtype(np.float64): _abi.FLOAT64,
}


def absent() -> _abi.Tensor:
    """SOK_NO_TENSOR."""
    return _abi.Tensor(None, _abi.INT64, 0)


def read(value: npt.ArrayLike | None, what: str) -> Array | None:
    """`value` as an array that the core can read: itself, or a copy where it is a list or not C-contiguous."""
    if value is None:
        return None
    array = np.asarray(value)
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)  # NumPy makes a float64 array of []
    if array.ndim > 2:
        raise ValueError(f"{what}: has {array.ndim} dimensions, expected at most 2")
    if array.dtype not in _DTYPES:
        raise ValueError(f"{what}: dtype {array.dtype}, expected one of {', '.join(str(d) for d in _DTYPES)}")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def written(array: Array, what: str) -> Array:
    """Checks that `array` can be changed in place."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what}: expected a NumPy array, which is changed in place, not {type(array).__name__}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(f"{what}: expected a C-contiguous, writable array, which is changed in place")
    if array.ndim > 2:
        raise ValueError(f"{what}: has {array.ndim} dimensions, expected at most 2")
    if array.dtype not in _DTYPES:
        raise ValueError(f"{what}: dtype {array.dtype}, expected one of {', '.join(str(d) for d in _DTYPES)}")
    return array


def view(array: Array | None) -> _abi.Tensor:
    """A view of what `read` or `written` returned; the array must outlive it."""
    if array is None:
        return absent()
    tensor = _abi.Tensor(array.__array_interface__["data"][0], _DTYPES[array.dtype], array.ndim)
    tensor.shape[: array.ndim] = array.shape
    return tensor


def views(arrays: Sequence[Array | None]) -> Any:
    """A C array of views."""
    return (_abi.Tensor * len(arrays))(*map(view, arrays))


def elements(counts: Array, dimensions: Iterable[int]) -> int:
    """Elements of the flat buffer of rows that `counts` [num_ranks, num_tables] describes."""
    return sum(int(count) * dimension for count, dimension in zip(counts.sum(axis=0), dimensions, strict=True))
