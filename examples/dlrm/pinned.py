# SPDX-License-Identifier: Apache-2.0
"""Keeps memory in place for a GPU, so that it copies from there at full speed and while it computes.

By the driver's own library, since the frameworks can do so for memory of their own alone, or not at all (TensorFlow).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: for every context of the process."""


@contextlib.contextmanager
def pinned(memory: mmap.mmap, gpu: int) -> Iterator[None]:
    """Within this context the memory is page-locked. gpu: by its number among those that the process sees."""
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    with _context(driver, gpu):
        _check(driver, driver.cuMemHostRegister_v2(address, ctypes.c_size_t(len(memory)), ctypes.c_uint(_PORTABLE)))
    try:
        yield
    finally:
        with _context(driver, gpu):
            _check(driver, driver.cuMemHostUnregister(address))


@contextlib.contextmanager
def _context(driver: Any, gpu: int) -> Iterator[None]:
    """The GPU's primary context, which the frameworks use too, is this thread's."""
    device, context, before = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, driver.cuInit(0))
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(gpu)))
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        _check(driver, driver.cuCtxPushCurrent_v2(context))
        try:
            yield
        finally:
            _check(driver, driver.cuCtxPopCurrent_v2(ctypes.byref(before)))
    finally:
        _check(driver, driver.cuDevicePrimaryCtxRelease_v2(device))


def _check(driver: Any, status: int) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()} ({status})")
