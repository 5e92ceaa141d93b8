# SPDX-License-Identifier: Apache-2.0
"""What was built, and what devices there are. Nothing here starts CUDA on a device."""

from __future__ import annotations

import ctypes
import dataclasses

from sparse_operation_kit.core import _abi, _library


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """name; total_memory in bytes; compute_capability 10 * major + minor; all but the name 0 for the CPU."""

    name: str
    total_memory: int
    compute_capability: int
    multiprocessors: int


def version() -> str:
    """ "MAJOR.MINOR.PATCH" of the library."""
    return str(_abi.library().sok_version().decode())


def build_info() -> str:
    """One line for bug reports: version, compiler, instruction set in use, CUDA version and architectures."""
    return str(_abi.library().sok_build_info().decode())


def built_with_cuda() -> bool:
    """Whether the library was built with CUDA, whether or not this host has a GPU."""
    return bool(_abi.library().sok_built_with_cuda())


def cuda_device_count() -> int:
    """CUDA devices of this host: 0 without CUDA in the build, without a driver, or without a GPU."""
    count = ctypes.c_int32()
    _library.check(_abi.library().sok_cuda_device_count(ctypes.byref(count)))
    return count.value


def device_properties(cuda_device: int | None = None) -> DeviceProperties:
    """Properties of a CUDA device by its number, or of the CPU.

    Raises:
      ValueError: no such device. NotImplementedError: built without CUDA. OSError: the driver does not answer.
    """
    kind = _abi.CPU if cuda_device is None else _abi.CUDA
    struct = _abi.DeviceProperties(struct_size=ctypes.sizeof(_abi.DeviceProperties))
    device = _abi.Device(kind, cuda_device or 0)
    _library.check(_abi.library().sok_device_get_properties(device, ctypes.byref(struct)))
    return DeviceProperties(
        struct.name.decode(), struct.total_memory, struct.compute_capability, struct.multiprocessors
    )
