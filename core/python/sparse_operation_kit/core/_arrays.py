# SPDX-License-Identifier: Apache-2.0
"""Arrays as the views that the C interface takes: NumPy's, and on CUDA devices all with `__cuda_array_interface__`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi

Array = npt.NDArray[Any]

BFLOAT16 = np.dtype("V2")
"""bfloat16, which NumPy lacks: raw items of two bytes. Arrays of ml_dtypes.bfloat16 are taken as they are."""

_DTYPES = {
    np.dtype(np.int32): _abi.INT32,
    np.dtype(np.int64): _abi.INT64,
    np.dtype(np.uint32): _abi.UINT32,
    np.dtype(np.uint64): _abi.UINT64,
    np.dtype(np.float16): _abi.FLOAT16,
    np.dtype(np.float32): _abi.FLOAT32,
    np.dtype(np.float64): _abi.FLOAT64,
    BFLOAT16: _abi.BFLOAT16,
    np.dtype(np.uint8): _abi.UINT8,
}


def number_of(dtype: np.dtype[Any]) -> int | None:
    """The sok_dtype, or None when there is none."""
    return _abi.BFLOAT16 if dtype.name == "bfloat16" else _DTYPES.get(dtype)


def _check_dtype(dtype: np.dtype[Any], what: str) -> None:
    if number_of(dtype) is None:
        names = [str(d) for d in _DTYPES if d != BFLOAT16]
        raise ValueError(f"{what}: dtype {dtype}, expected one of {', '.join(names)}, bfloat16")


@dataclasses.dataclass(frozen=True)
class _DeviceFlags:
    c_contiguous: bool
    writeable: bool


class _DeviceArray:
    """What this package reads of a NumPy array, for memory on a CUDA device; keeps the owner of the memory alive."""

    def __init__(self, owner: Any) -> None:
        interface = owner.__cuda_array_interface__
        self.owner = owner
        self.shape = tuple(interface["shape"])
        self.dtype = np.dtype(interface["typestr"])
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        dense: list[int] = []
        step = self.dtype.itemsize
        for extent in reversed(self.shape):
            dense.insert(0, step)
            step *= extent
        strides = interface.get("strides")
        address, read_only = interface["data"]
        self.flags = _DeviceFlags(strides is None or self.size == 0 or tuple(strides) == tuple(dense), not read_only)
        self.__array_interface__ = {"data": (address or 0, read_only)}


def _on_device(value: object) -> Array | None:
    """The view of an array on a CUDA device, or None for anything else."""
    return cast(Array, _DeviceArray(value)) if hasattr(value, "__cuda_array_interface__") else None


Make = Callable[[Any, Any], Any]
"""(shape, dtype) -> a new array, such as numpy.empty or cupy.empty."""


def absent() -> _abi.Tensor:
    """SOK_NO_TENSOR."""
    return _abi.Tensor(None, _abi.INT64, 0)


def read(value: npt.ArrayLike | None, what: str) -> Array | None:
    """`value` as an array that the core can read: itself, or a copy where it is a list or not C-contiguous."""
    if value is None:
        return None
    device_array = _on_device(value)
    array = np.asarray(value) if device_array is None else device_array
    if array.size == 0 and device_array is None and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)  # NumPy makes a float64 array of []
    if array.ndim > 2:
        raise ValueError(f"{what}: has {array.ndim} dimensions, expected at most 2")
    _check_dtype(array.dtype, what)
    if array.flags.c_contiguous:
        return array
    if device_array is not None:
        raise ValueError(f"{what}: expected a C-contiguous array on a CUDA device")
    return np.ascontiguousarray(array)


def rows_apart(array: Array) -> bool:
    """Whether `array` is a view of columns of a wider NumPy array, whose rows the core can step through."""
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.flags.c_contiguous or array.size == 0:
        return False
    step, item = array.strides
    return item == array.itemsize and step % item == 0 and step // item >= array.shape[1]


def read_rows(value: npt.ArrayLike | None, what: str) -> Array | None:
    """As `read`; columns of a wider array stay where they are."""
    return value if isinstance(value, np.ndarray) and rows_apart(value) else read(value, what)


def written_rows(array: Array, what: str) -> Array:
    """As `written`; columns of a wider array will do."""
    return array if rows_apart(array) and array.flags.writeable else written(array, what)


def written(array: Array, what: str) -> Array:
    """Checks that `array` can be changed in place."""
    device_array = _on_device(array)
    if device_array is not None:
        array = device_array
    elif not isinstance(array, np.ndarray):
        raise TypeError(f"{what}: expected a NumPy array, which is changed in place, not {type(array).__name__}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError(f"{what}: expected a C-contiguous, writable array, which is changed in place")
    if array.ndim > 2:
        raise ValueError(f"{what}: has {array.ndim} dimensions, expected at most 2")
    _check_dtype(array.dtype, what)
    return array


def view(array: Array | None) -> _abi.Tensor:
    """A view of what `read`, `written` and the like returned; the array must outlive it."""
    if array is None:
        return absent()
    array = _on_device(array) or array
    tensor = _abi.Tensor(array.__array_interface__["data"][0], number_of(array.dtype), array.ndim)
    tensor.shape[: array.ndim] = array.shape
    tensor.row_stride = array.strides[0] // array.itemsize if rows_apart(array) else 0
    return tensor


def views(arrays: Sequence[Array | None]) -> Any:
    """A C array of views."""
    return (_abi.Tensor * len(arrays))(*map(view, arrays))
