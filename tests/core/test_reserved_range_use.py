# SPDX-License-Identifier: Apache-2.0
"""Reserved ranges in use: tables in them, threads, fork, streams of a fake device, the kernel's limits, misuse."""

import ctypes
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _library

INVALID = _library.INVALID_ARGUMENT
MB = 1 << 20

on_the_fake_gpu = pytest.mark.parametrize("memory", ["fake_gpu"], indirect=True)


def test_a_table_that_grows():
    """Rows stay where they are between steps of an optimizer, and views of before see what later steps write."""
    with core.ReservedRange(1 << 40) as rows, core.ReservedRange(1 << 40) as states:
        total = np.zeros((0, 8), np.float32)
        first = None
        for num_rows in (3, 700, 701, 50_000):
            rows.grow(num_rows * 32)
            states.grow(num_rows * 32)
            weight, accumulator = (column.array((num_rows, 8), np.float32) for column in (rows, states))
            if first is None:
                first = weight
            keys = np.array([0, num_rows - 1, num_rows // 2])
            gradient = core.Gradient(keys, np.ones((3, 8), np.float32))
            update = core.Update(core.Table(weight), core.Optimizer("adagrad", 1.0), [gradient], [accumulator])
            core.apply([update])
            total = np.concatenate([total, np.zeros((num_rows - len(total), 8), np.float32)])
            for key in keys:
                total[key] += 1
            assert np.array_equal(accumulator, total)
            (output,) = core.gather_combine([core.Table(weight)], [core.Lookup(keys)])
            assert np.array_equal(output, weight[keys])
        assert np.array_equal(first, weight[:3])


def test_threads_read_while_it_grows():
    with core.ReservedRange(1 << 36) as column:
        column.grow(MB)
        first = column.array(MB, np.uint8)
        first[:] = 5
        stop, wrong = threading.Event(), []

        def read():
            while not stop.is_set():
                if int(first.astype(np.int64).sum()) != 5 * MB:
                    wrong.append(1)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for size in range(MB, 64 * MB, MB):
            column.grow(size)
            column.array(size, np.uint8)[size - MB :] = 5
        stop.set()
        for reader in readers:
            reader.join()
        assert not wrong
        assert (column.array(63 * MB, np.uint8) == 5).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork():
    """A child has a copy, as of any memory."""
    with core.ReservedRange(1 << 36) as column:
        column.grow(MB)
        values = column.array(MB, np.uint8)
        values[:] = 1
        child = os.fork()
        if child == 0:
            code = 1
            try:
                column.grow(2 * MB)
                values[:] = 2
                column.shrink(0)
                column.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert (values == 1).all() and column.backed_bytes >= MB


@on_the_fake_gpu
def test_shrinking_waits_for_the_stream(memory):
    stream = memory.fake.fake_stream_create()
    context = core.Context(device=0, stream=stream, empty=np.empty)
    with memory.range(1 << 30) as column:
        column.grow(8 * MB)
        memory.fake.fake_stream_sleep(stream, 0.3)
        start = time.monotonic()
        column.grow(100 * MB)
        column.shrink(200 * MB, context=context)
        assert time.monotonic() - start < 0.25
        column.shrink(8 * MB, context=context)
        assert time.monotonic() - start > 0.25
        assert column.backed_bytes == 8 * MB


@on_the_fake_gpu
def test_no_shrinking_in_a_graph(memory):
    stream = memory.fake.fake_stream_create()
    context = core.Context(device=0, stream=stream, empty=np.empty)
    with memory.range(1 << 30) as column:
        column.grow(8 * MB)
        memory.fake.fake_stream_capture(stream, 1)
        column.grow(16 * MB)
        with pytest.raises(RuntimeError, match="captured"):
            column.shrink(0, context=context)
        assert column.backed_bytes == 16 * MB
        memory.fake.fake_stream_capture(stream, 0)
        column.shrink(0, context=context)
        assert column.backed_bytes == 0


@on_the_fake_gpu
def test_devices(memory):
    with memory.range(1 << 30) as column:
        with pytest.raises(ValueError, match="another device"):
            column.shrink(0, context=core.Context())
        with pytest.raises(ValueError, match="another device"):
            column.shrink(0, context=core.Context(device=1, empty=np.empty))
    for device in (-1, 8):
        with pytest.raises(ValueError, match=f"no CUDA device {device}"):
            core.ReservedRange(1, device=device)


def test_more_addresses_than_there_are(memory):
    with pytest.raises(MemoryError, match=r"bytes of addresses for table 'user'"):
        memory.range(1 << 60, name="table 'user'")


def test_a_limit_of_addresses():
    program = """
import resource
from sparse_operation_kit import core
core.ReservedRange(1 << 30).close()
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    core.ReservedRange(4 << 30)
except MemoryError as error:
    print("refused:", error)
with core.ReservedRange(256 << 20) as range:
    range.grow(256 << 20)
"""
    assert "ulimit -v" in refused(program)


def test_as_many_ranges_as_the_kernel_allows():
    """The last ones are refused, and the others go on."""
    program = """
from sparse_operation_kit import core
made = []
try:
    while len(made) < 200_000:
        made.append(core.ReservedRange(1 << 20))
        made[-1].grow(1)
        made[-1].array(1, "u1")[0] = len(made) % 256
except MemoryError as error:
    print("refused:", error)
for _ in range(1000):  # Python needs some memory, too
    made.pop().close()
assert all(one.array(1, "u1")[0] == (i + 1) % 256 for i, one in enumerate(made))
for one in made:
    one.close()
core.ReservedRange(1 << 20).grow(1)
"""
    if int(pathlib.Path("/proc/sys/vm/max_map_count").read_text()) > 100_000:
        pytest.skip("vm.max_map_count is large here")
    assert "vm.max_map_count" in refused(program)


def refused(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "refused:" in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_wrong_arguments():
    library = _abi.library()
    handle = ctypes.c_void_p()
    size = ctypes.sizeof(_abi.ReservedRangeConfig)
    create, cpu = library.sok_reserved_range_create, _abi.Device(_abi.CPU, 0)
    good = _abi.ReservedRangeConfig(size, cpu, 1, None)
    assert create(None, ctypes.byref(handle)) == INVALID
    assert create(ctypes.byref(good), None) == INVALID
    for bad in (
        _abi.ReservedRangeConfig(8, cpu, 1, None),
        _abi.ReservedRangeConfig(size, cpu, 0, None),
        _abi.ReservedRangeConfig(size, cpu, -1, None),
        _abi.ReservedRangeConfig(size, cpu, 2**63 - 1, None),
        _abi.ReservedRangeConfig(size, _abi.Device(_abi.CPU, 1), 1, None),
        _abi.ReservedRangeConfig(size, _abi.Device(7, 0), 1, None),
    ):
        assert create(ctypes.byref(bad), ctypes.byref(handle)) == INVALID
        assert library.sok_last_error_message()
    far = _abi.ReservedRangeConfig(size, _abi.Device(_abi.CUDA, 10_000), 1, None)
    status = create(ctypes.byref(far), ctypes.byref(handle))
    assert status == (INVALID if core.built_with_cuda() else _library.UNIMPLEMENTED)
    assert handle.value is None
    assert library.sok_reserved_range_destroy(None) == 0
    assert library.sok_reserved_range_data(None) is None
    assert library.sok_reserved_range_backed_bytes(None) == library.sok_reserved_range_reserved_bytes(None) == 0
    assert library.sok_reserved_range_grow(None, 1) == INVALID
    assert library.sok_reserved_range_shrink(core.Context().struct, None, 1) == INVALID
    assert create(ctypes.byref(good), ctypes.byref(handle)) == 0
    assert library.sok_reserved_range_shrink(None, handle, 1) == INVALID
    assert library.sok_reserved_range_destroy(handle) == 0
