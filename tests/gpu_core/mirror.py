# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays through the device: the binding's calls get copies in GPU memory, which are copied back afterwards.

So the tests of the core run unchanged. Each copy lies between guards that no stage may touch, at the alignment that the
array has on the host; temporary memory is handed out full of garbage and must come back. Dynamic tables are on the
device, and their columns are arrays on the host, which every call brings there and back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from typing import Any

import numpy as np

from sparse_operation_kit import core
from sparse_operation_kit.core import (
    _abi,
    _arrays,
    _library,
    context,
    coordinates,
    dynamic_table,
    gradient,
    hash_index,
    initializer,
    lookup,
    table,
)

GUARD = 256
GARBAGE = 0xAB


class Device:
    """The copies of the arrays of the call that is being put together, and the context that it runs with."""

    def __init__(self):
        import cupy

        self.cupy = cupy
        self.pending = {}
        self.live = {}
        self.tables = weakref.WeakSet()
        self.is_called = False
        self.struct = _abi.Context(struct_size=ctypes.sizeof(_abi.Context), device=_abi.Device(_abi.CUDA, 0))
        self.struct.executor.num_workers = 1
        self.struct.allocator.allocate = _abi.ALLOCATE(lambda _, size: self._allocate(size))
        self.struct.allocator.release = _abi.RELEASE(lambda _, memory: self._release(memory))

    def _allocate(self, size):
        assert size > 0
        array = self.cupy.full(size + 256, GARBAGE, self.cupy.uint8)
        address = array.data.ptr + -array.data.ptr % 256
        self.live[address] = array
        return address

    def _release(self, address):
        del self.live[address]

    def view(self, array):
        """As _arrays.view, of a copy on the device."""
        if array is None:
            return _arrays.absent()
        if hasattr(array, "__cuda_array_interface__"):
            return _view(array)
        for held in self.tables:
            address = held.address_of(array)
            if address is not None:
                tensor = _view(array)
                tensor.data = address
                return tensor
        whole = _whole(array) if _arrays.rows_apart(array) else array
        address, size = _address(whole), whole.nbytes
        key = (address, size)
        if key not in self.pending:
            start = GUARD + address % 16
            host = np.full(start + size + GUARD, GARBAGE, np.uint8)
            host[start : start + size] = np.frombuffer(ctypes.string_at(address, size), np.uint8)
            self.pending[key] = (whole, start, size, self.cupy.asarray(host))
        tensor = _view(array)
        tensor.data = self.pending[key][3].data.ptr + self.pending[key][1] + (_address(array) - address)
        return tensor

    def locate(self, _, num_requests, requests, flags):
        """Asks the indices, which are Python's: the keys come to the host, the slots go back."""
        memcpy, to_device, to_host = self.cupy.cuda.runtime.memcpy, 1, 2
        for request in requests[:num_requests]:
            index = ctypes.cast(request.index.contents.self, ctypes.py_object).value
            keys = np.empty(request.keys.shape[0], np.int64 if request.keys.dtype == _abi.INT64 else np.int32)
            memcpy(keys.ctypes.data, request.keys.data, keys.nbytes, to_host)
            try:
                slots = np.ascontiguousarray(index.find(keys, bool(flags & _abi.LOCATE_INSERT)), np.int64)
            except MemoryError:
                return _library.RESOURCE_EXHAUSTED
            memcpy(ctypes.cast(request.slots, ctypes.c_void_p).value, slots.ctypes.data, slots.nbytes, to_device)
        return _library.OK

    def begin(self, _):
        """The context of a call, which finds in its tables what the host has written."""
        self.is_called = True
        for held in self.tables:
            held.send()
        return ctypes.byref(self.struct)

    def finish(self):
        """Copies everything back and looks at the guards."""
        pending, self.pending = self.pending, {}
        for array, start, size, copy in pending.values():
            host = copy.get()
            end = start + size
            assert (host[:start] == GARBAGE).all() and (host[end:] == GARBAGE).all(), "written outside an array"
            if array.flags.writeable:
                ctypes.memmove(_address(array), host[start:end].ctypes.data, size)
        assert not self.live, "temporary memory did not come back"
        is_called, self.is_called = self.is_called, False
        for held in self.tables if is_called else ():
            held.fetch()


class Table(core.DynamicTable):  # type: ignore[misc]  # final: users are not to derive from it
    """A dynamic table on the device. A column is a range of the host that grows with it."""

    page = 2 << 20  # what memory of the device comes in multiples of

    def __init__(self, device, *arguments, **more):
        super().__init__(*arguments, device=0, **more)
        self.join(device)

    def join(self, device):
        self.to, self.memcpy, self.copies = device, device.cupy.cuda.runtime.memcpy, {}
        self.waiting = []  # tables of candidates, which are gone with this one
        device.tables.add(self)

    @property
    def candidates(self):
        table: Any = super().candidates
        if table is not None:
            table.__class__ = Table
            table.join(self.to)
            self.waiting.append(table)
        return table

    def column(self, number):
        memory = super().column(number)
        if number not in self.copies:
            slots = self.index.capacity + max(self.index.capacity, 1 << 20)  # guests have some too
            whole = slots * memory.shape[1] * memory.dtype.itemsize
            copy = self.copies[number] = core.ReservedRange(whole)
            weakref.finalize(self, _abi.library().sok_reserved_range_destroy, copy._handle)
            self.fetch(number)
        return self.copies[number].array(memory.shape, memory.dtype)

    @property
    def scores(self):
        memory = super().scores
        if memory.shape[0] == 0:
            return np.zeros(0, np.int64)
        return self.to.cupy.asarray(memory).get()

    def address_of(self, array):
        for number, copy in self.copies.items():
            offset = _address(array) - copy.data
            if 0 <= offset < copy.reserved_bytes:
                return self.held(number)[0] + offset
        return None

    def held(self, number):
        """(address, bytes) of a column on the device."""
        memory = super().column(number)
        return memory.__cuda_array_interface__["data"][0], memory.num_bytes

    def send(self):
        for number, copy in self.copies.items():
            address, size = self.held(number)
            self.memcpy(address, copy.data, size, 1)

    def fetch(self, *numbers):
        for number in numbers or self.copies:
            address, size = self.held(number)
            self.copies[number].grow(size)
            self.memcpy(self.copies[number].data, address, size, 2)

    def close(self):
        self.to.tables.difference_update([self, *self.waiting])
        super().close()


_view = _arrays.view


def _address(array):
    return array.__array_interface__["data"][0]


def _whole(array):
    """The array that owns the memory: views of its columns lie between each other's rows, so it is copied as one."""
    while array.base is not None:
        array = array.base
    return array


@contextlib.contextmanager
def installed():
    """Within the block the stages of sparse_operation_kit.core run on the device."""
    device = Device()
    check = _library.check

    def check_after(status):
        device.finish()
        check(status)

    patches = [(_arrays, "view", device.view), (_library, "check", check_after)]
    patches.append((table, "_LOCATE", _abi.LOCATE(device.locate)))
    patches.append((core, "DynamicTable", functools.partial(Table, device)))
    for module in (context, coordinates, dynamic_table, gradient, hash_index, initializer, lookup, table):
        if hasattr(module, "pointer"):
            patches.append((module, "pointer", device.begin))
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield device
    finally:
        for module, name, value in before:
            setattr(module, name, value)
