# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the functions that take no batch, and arrays that the binding cannot pass on."""

import ctypes

import numpy as np
import pytest

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _library

INVALID = _library.INVALID_ARGUMENT


def test_thread_pool_misuse():
    library = _abi.library()
    executor = _abi.Executor()
    assert library.sok_thread_pool_create(1, None) == INVALID
    assert library.sok_thread_pool_executor(None, ctypes.byref(executor)) == INVALID
    handle = ctypes.c_void_p()
    assert library.sok_thread_pool_create(2, ctypes.byref(handle)) == 0
    assert library.sok_thread_pool_executor(handle, None) == INVALID
    assert library.sok_thread_pool_destroy(handle) == 0
    assert library.sok_thread_pool_destroy(None) == 0


def test_error_record_misuse():
    library = _abi.library()
    record = ctypes.c_void_p()
    assert library.sok_error_record_destroy(None) == 0
    assert library.sok_error_record_check(None) == INVALID
    assert library.sok_error_record_create(_abi.Device(_abi.CUDA, 0), None) in (INVALID, _library.UNIMPLEMENTED)
    assert library.sok_error_record_create(_abi.Device(_abi.CPU, 0), ctypes.byref(record)) != 0
    if not core.built_with_cuda():
        made = library.sok_error_record_create(_abi.Device(_abi.CUDA, 0), ctypes.byref(record))
        assert made == _library.UNIMPLEMENTED


def test_device_misuse():
    library = _abi.library()
    properties = _abi.DeviceProperties()
    assert library.sok_cuda_device_count(None) == INVALID
    assert library.sok_device_get_properties(_abi.Device(0, 0), None) == INVALID
    assert library.sok_device_get_properties(_abi.Device(0, 0), ctypes.byref(properties)) == INVALID
    properties.struct_size = ctypes.sizeof(properties)
    for device in [(0, 1), (0, -1), (5, 0), (-1, 0)]:
        assert library.sok_device_get_properties(_abi.Device(*device), ctypes.byref(properties)) == INVALID
    if not core.built_with_cuda():
        status = library.sok_device_get_properties(_abi.Device(1, 0), ctypes.byref(properties))
        assert status == _library.UNIMPLEMENTED


def test_binding_refuses_what_it_cannot_view():
    table = core.Table(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="3 dimensions"):
        core.gather_combine([table], [core.Lookup(np.zeros((1, 1, 1), np.int64))])
    with pytest.raises(ValueError, match="dtype"):
        core.gather_combine([table], [core.Lookup(np.zeros(1, np.complex64))])
    with pytest.raises(ValueError, match="dtype"):
        core.gather_combine([table], [core.Lookup(np.zeros(1, ">i8"))])
    with pytest.raises(ValueError, match="combiner 'max'"):
        core.gather_combine([table], [core.Lookup([0], combiner="max")])
    with pytest.raises(ValueError, match=r"lookups\[0\].table"):
        core.gather_combine([table], [core.Lookup([0], table=3)])
    with pytest.raises(ValueError, match="num_rows and dimension"):
        core.route([core.Table()], [core.Lookup([0])])
    strided = np.arange(8)[::4] // 4
    (output,) = core.gather_combine([core.Table(np.eye(2, dtype=np.float32))], [core.Lookup(strided)])
    assert np.array_equal(output, np.eye(2))
