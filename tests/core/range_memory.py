# SPDX-License-Identifier: Apache-2.0
"""Where reserved ranges lie, for tests that run on each kind of device: how bytes are seen and how many there are."""

import contextlib
import ctypes
import os
import pathlib
import resource

import numpy as np

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _library


class Host:
    """The CPU's memory."""

    device: int | None = None
    page = os.sysconf("SC_PAGE_SIZE")
    zeroed = True
    """Whether bytes that become backed are 0."""
    limits_host = True
    """Whether limited() is of the host's memory too."""

    def range(self, num_bytes, **more):
        return core.ReservedRange(num_bytes, device=self.device, **more)

    def array(self, values):
        """NumPy's values as an array of the device."""
        return values

    def seen(self, array):
        """What ReservedRange.array returned, as an array to compute with."""
        return array

    def view(self, range):
        """The backed bytes."""
        return self.seen(range.array(range.backed_bytes, np.uint8))

    def finish(self):
        """Waits for what was written: a range with work pending must not be closed."""

    def used(self):
        """Bytes that this process has taken."""
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * self.page

    @contextlib.contextmanager
    def limited(self, num_bytes):
        """Within the block there is no memory for more than so many bytes."""
        status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(status["VmData"].split()[0]) * 1024 + num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


class FakeDevice(Host):
    """The core's own code for CUDA over fakes/virtual_memory.cc."""

    device = 0
    page = 2 << 20
    zeroed = False

    def __init__(self, library, monkeypatch):
        self.fake = ctypes.CDLL(str(library))
        for name, (result, parameters) in _abi.PROTOTYPES.items():
            getattr(self.fake, name).restype = result
            getattr(self.fake, name).argtypes = parameters
        self.fake.fake_memory_limit.argtypes = [ctypes.c_int64]
        self.fake.fake_memory_used.restype = ctypes.c_int64
        self.fake.fake_host_memory_used.restype = ctypes.c_int64
        self.fake.fake_stream_create.restype = ctypes.c_void_p
        self.fake.fake_stream_sleep.argtypes = [ctypes.c_void_p, ctypes.c_double]
        self.fake.fake_stream_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        monkeypatch.setattr(_abi, "library", lambda: self.fake)
        monkeypatch.setattr(_library, "load", lambda: self.fake)

    def seen(self, array):
        array.__array_interface__ = array.__cuda_array_interface__  # its memory is the host's
        return np.asarray(array)

    def used(self):
        return self.fake.fake_memory_used()

    @contextlib.contextmanager
    def limited(self, num_bytes):
        self.fake.fake_memory_limit(self.used() + num_bytes)
        try:
            yield
        finally:
            self.fake.fake_memory_limit(1 << 40)


class Gpu(Host):
    """A GPU's memory, through CuPy."""

    device = 0
    page = 2 << 20
    zeroed = False
    limits_host = False

    def __init__(self):
        import cupy

        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        some = cupy.zeros(8, np.uint8)  # kernels are loaded when they are first used, which takes memory
        some[::2] = self.array(np.arange(4, dtype=np.uint8))
        assert (some == some).all() and some.get() is not None

    def array(self, values):
        return self.cupy.asarray(values)

    def seen(self, array):
        return self.cupy.asarray(array)

    def finish(self):
        self.runtime.deviceSynchronize()

    def used(self):
        self.cupy.get_default_memory_pool().free_all_blocks()  # what computing with views has left
        free, total = self.runtime.memGetInfo()
        return total - free

    @contextlib.contextmanager
    def limited(self, num_bytes):
        self.used()
        free, _ = self.runtime.memGetInfo()
        taken = self.runtime.malloc(free - num_bytes)
        try:
            yield
        finally:
            self.runtime.free(taken)
