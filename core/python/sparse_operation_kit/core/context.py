# SPDX-License-Identifier: Apache-2.0
"""How a call runs: its threads and where its temporary memory comes from."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import final

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library


@final
class ThreadPool:
    """A pool of native threads; the calling thread is one of its workers.

    Args:
      num_threads: how many work at once; 0 means one for each CPU that this process may run on.

    Close it, or use it as a context manager, when no call uses it any more. Threads may share it: their calls take
    turns. After fork() the child may go on using it.
    """

    def __init__(self, num_threads: int = 0) -> None:
        self._handle = ctypes.c_void_p()
        _library.check(_abi.library().sok_thread_pool_create(num_threads, ctypes.byref(self._handle)))
        self.executor = _abi.Executor()
        _library.check(_abi.library().sok_thread_pool_executor(self._handle, ctypes.byref(self.executor)))

    @property
    def num_threads(self) -> int:
        """Threads that work at once."""
        return int(self.executor.num_workers)

    def close(self) -> None:
        """Ends the threads. Calling it again does nothing."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _library.check(_abi.library().sok_thread_pool_destroy(handle))

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


@final
class ErrorRecord:
    """What a CUDA device found wrong in the contents of arrays, for contexts whose calls shall not wait.

    Until the record is checked, `apply` and `assign` with it change nothing. Close it when no work with it is pending.
    """

    def __init__(self, device: int = 0) -> None:
        self.handle = ctypes.c_void_p()
        create = _abi.library().sok_error_record_create
        _library.check(create(_abi.Device(_abi.CUDA, device), ctypes.byref(self.handle)))

    def check(self) -> None:
        """Raises what the device has reported so far, once, as a call on the CPU would have. Does not wait."""
        _library.check(_abi.library().sok_error_record_check(self.handle))

    def close(self) -> None:
        """Frees the record. Calling it again does nothing."""
        handle, self.handle = self.handle, ctypes.c_void_p()
        _library.check(_abi.library().sok_error_record_destroy(handle))


class Context:
    """What a stage runs with. Without one, a stage runs on the calling thread and takes memory from the C library.

    Args:
      threads: the pool that shares the work, or None for the calling thread alone. Results do not depend on it.
      device: a CUDA device to run on: arrays are then of any kind that has `__cuda_array_interface__` (CuPy's,
        PyTorch's), and calls return before the work is done. None: the CPU.
      stream: the address of the device's stream (0: the legacy default stream).
      empty: empty(shape, dtype) makes the arrays that a stage returns; needed with `device` (cupy.empty, for example).
      errors: where work on a device reports wrong keys and slots; None: each call waits, and raises as on the CPU.
      allocate, release: temporary memory instead of the library's own. `allocate(bytes)` returns an address aligned to
        64 bytes, or 0 when there is no memory (the stage then raises MemoryError and changes nothing);
        `release(address)` takes it back. Both are called from the thread of the call only, and every address comes back
        before it returns.

    `struct` is the sok_context that is passed on. One context may be used by one thread at a time.
    """

    def __init__(
        self,
        threads: ThreadPool | None = None,
        *,
        device: int | None = None,
        stream: int = 0,
        empty: _arrays.Make | None = None,
        errors: ErrorRecord | None = None,
        allocate: Callable[[int], int] | None = None,
        release: Callable[[int], None] | None = None,
    ) -> None:
        self._threads = threads
        self.struct = _abi.Context(struct_size=ctypes.sizeof(_abi.Context), device=_abi.Device(_abi.CPU, 0))
        self.struct.executor.num_workers = 1
        if threads is not None:
            self.struct.executor = threads.executor
        self.empty: _arrays.Make = np.empty if empty is None else empty
        if device is not None:
            if empty is None:
                raise ValueError("a context of a CUDA device needs `empty`, which makes arrays on that device")
            self.struct.device = _abi.Device(_abi.CUDA, device)
            self.struct.stream = stream
        self._errors = errors
        if errors is not None:
            self.struct.errors = errors.handle
        if (allocate is None) != (release is None):
            raise ValueError("allocate and release come together")
        if allocate is not None and release is not None:
            give, take = allocate, release
            self.struct.allocator.allocate = _abi.ALLOCATE(lambda _, size: give(size))
            self.struct.allocator.release = _abi.RELEASE(lambda _, memory: take(memory))

    def flag_errors(self, flags: _arrays.Array) -> None:
        """Writes 1 to every element of `flags` [n] int64 if the error record holds something at this point of the
        stream, else 0. On a device it is enqueued: nothing waits. Without a record, and on the CPU, it writes 0.
        """
        flags = _arrays.written(flags, "flags")
        _library.check(_abi.library().sok_error_record_flag(ctypes.byref(self.struct), _arrays.view(flags)))


def empty(context: Context | None, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> _arrays.Array:
    """A new array where the stage of `context` writes its results."""
    make: _arrays.Make = np.empty if context is None else context.empty
    result: _arrays.Array = make(shape, dtype)
    return result


def pointer(context: Context | None) -> object:
    """The argument to pass for `context`."""
    return ctypes.byref((context or Context()).struct)
