# SPDX-License-Identifier: Apache-2.0
"""Memory that grows and shrinks in place (core/include/sok/reserved_range.h)."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _library
from sparse_operation_kit.core.context import Context, pointer


@final
class ReservedRange:
    """Addresses for `num_bytes`, and memory behind the first of them, as many as `grow` and `shrink` say.

    Args:
      num_bytes: the most it may ever hold; rounded up to whole pages of the device.
      device: the CUDA device whose memory it is; None: the CPU's.
      device_bytes: how many bytes from its start on are in the device's memory, in whole pages; what is beyond is in
        the host's, which the device reads and writes too. 0: all.
      name: what it is called in messages.

    How many bytes more than asked for become backed, and what that costs, is in the C header. One thread at a time may
    grow or shrink it. Close it, or use it as a context manager, when nothing uses the memory any more.

    Raises:
      ValueError: no such device, or a size that is not positive. MemoryError: so many addresses are not free.
      NotImplementedError: the core was built without CUDA.
    """

    def __init__(
        self, num_bytes: int, *, device: int | None = None, device_bytes: int = 0, name: str = "range"
    ) -> None:
        self._handle = ctypes.c_void_p()
        self._device = device
        where = _abi.Device(_abi.CPU, 0) if device is None else _abi.Device(_abi.CUDA, device)
        size = ctypes.sizeof(_abi.ReservedRangeConfig)
        config = _abi.ReservedRangeConfig(size, where, num_bytes, name.encode(), device_bytes)
        _library.check(_abi.library().sok_reserved_range_create(ctypes.byref(config), ctypes.byref(self._handle)))

    @property
    def data(self) -> int:
        """The address where it begins; 0 once it is closed."""
        return _abi.library().sok_reserved_range_data(self._handle) or 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes that it has addresses for."""
        return int(_abi.library().sok_reserved_range_reserved_bytes(self._handle))

    @property
    def backed_bytes(self) -> int:
        """Bytes that have memory behind them."""
        return int(_abi.library().sok_reserved_range_backed_bytes(self._handle))

    @property
    def host_bytes(self) -> int:
        """Of those, bytes in the host's memory, where it is on a GPU."""
        return int(_abi.library().sok_reserved_range_host_bytes(self._handle))

    def grow(self, num_bytes: int) -> None:
        """Backs at least the first `num_bytes`. What becomes backed is 0 on the CPU and undefined on a GPU.

        Raises:
          MemoryError: there is no memory for it, or not so many addresses; as much is backed as before.
        """
        _library.check(_abi.library().sok_reserved_range_grow(self._handle, num_bytes))

    def shrink(self, num_bytes: int, *, context: Context | None = None) -> None:
        """Gives memory behind the first `num_bytes` back to the system, in whole pages (on a GPU: chunks).

        Arrays of what is given back may not be touched again. On a GPU it waits for the stream of `context` first, or
        without one for the legacy default stream.
        """
        if context is None and self._device is not None:
            context = Context(device=self._device, empty=np.empty)
        _library.check(_abi.library().sok_reserved_range_shrink(pointer(context), self._handle, num_bytes))

    def array(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """The first bytes as an array, without a copy: a NumPy array, or on a GPU an object with
        `__cuda_array_interface__`, which the stages take and `cupy.asarray` too. It may be used until these bytes are
        given back or the range is closed.

        Raises:
          ValueError: so many bytes are not backed.
        """
        memory = Memory(self.data, shape, np.dtype(dtype), on_device=self._device is not None)
        if memory.num_bytes > self.backed_bytes:
            raise ValueError(f"{self.backed_bytes} bytes are backed, the array has {memory.num_bytes}; grow the range")
        return memory if self._device is not None else np.asarray(memory)

    def close(self) -> None:
        """Gives memory and addresses back. Calling it again does nothing."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        _library.check(_abi.library().sok_reserved_range_destroy(handle))

    def __enter__(self) -> ReservedRange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class Memory:
    """An array at an address, for whoever reads array interfaces. It keeps `owner` alive."""

    def __init__(
        self,
        address: int,
        shape: int | tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        on_device: bool = False,
        owner: object = None,
    ) -> None:
        self.owner = owner
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        self.shape, self.dtype = sizes, dtype
        self.num_bytes = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
        interface = {"data": (address, False), "shape": sizes, "typestr": dtype.str, "version": 3}
        if on_device:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface
