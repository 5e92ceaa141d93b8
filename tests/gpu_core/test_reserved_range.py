# SPDX-License-Identifier: Apache-2.0
"""Reserved ranges on a GPU: the tests of tests/core, and what takes a device: kernels that run meanwhile."""

import pathlib

import gpu_suite
import numpy as np
import pytest

from sparse_operation_kit import core

gpu_suite.adopt(globals(), pathlib.Path(__file__).parents[1] / "core" / "test_reserved_range.py", {})

MB = 1 << 20


def test_more_than_the_device_has(memory, cupy):
    """Addresses are reserved for it, memory is refused, and nothing of what was taken meanwhile stays."""
    _, total = cupy.cuda.runtime.memGetInfo()
    with memory.range(4 * total) as column:
        column.grow(64 * MB)
        memory.view(column)[:] = 9
        used = memory.used()
        with pytest.raises(MemoryError, match="bytes free"):
            column.grow(2 * total)
        assert memory.used() == used
        assert (memory.view(column)[: 64 * MB] == 9).all()


def test_it_grows_while_kernels_use_it(memory, cupy):
    """Kernels of another stream add to what is backed, before, while and after it grows."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with memory.range(1 << 40) as column:
        column.grow(256 * MB)
        first = memory.seen(column.array(64 * MB, np.int32))
        first[:] = 0
        cupy.cuda.runtime.deviceSynchronize()
        rounds = 0
        for size in range(512 * MB, 4096 * MB, 512 * MB):
            with stream:
                for _ in range(20):
                    first += 1
                    rounds += 1
            column.grow(size)
            column.array((size // 4,), np.int32)
        stream.synchronize()
        assert (first == rounds).all()


def test_shrinking_waits_for_the_stream(memory, cupy):
    """What is given back was used until then, and its memory may be another's afterwards."""
    stream = cupy.cuda.Stream(non_blocking=True)
    context = core.Context(device=0, stream=stream.ptr, empty=cupy.empty)
    with memory.range(1 << 40) as column:
        for _ in range(5):
            column.grow(512 * MB)
            backed = column.backed_bytes
            column.grow(1024 * MB)
            values = memory.seen(column.array(256 * MB, np.int32))
            with stream:
                values[:] = 1
                for _ in range(20):
                    values += 1
                kept = values[: 128 * MB].sum(dtype=np.int64)
            column.shrink(backed, context=context)
            assert column.backed_bytes == backed
            assert stream.done
            assert int(kept) == 21 * 128 * MB


def test_stages_in_ranges(memory, cupy):
    """A table whose rows and states lie in ranges, as it grows, against one that lies in NumPy arrays."""
    context = core.Context(device=0, empty=cupy.empty, stream=cupy.cuda.get_current_stream().ptr)
    chosen = np.random.default_rng(3)
    expected, expected_state = np.zeros((0, 32), np.float32), np.zeros((0, 32), np.float32)
    with memory.range(1 << 40) as rows, memory.range(1 << 40) as states:
        for num_rows in (5, 30_000, 100_000, 1_000_000):
            more = chosen.normal(size=(num_rows - len(expected), 32)).astype(np.float32)
            rows.grow(num_rows * 128)
            states.grow(num_rows * 128)
            weight, state = (memory.seen(column.array((num_rows, 32), np.float32)) for column in (rows, states))
            weight[len(expected) :] = cupy.asarray(more)
            state[len(expected) :] = 0
            expected = np.concatenate([expected, more])
            expected_state = np.concatenate([expected_state, np.zeros_like(more)])
            keys = chosen.integers(0, num_rows, 1000)
            values = chosen.normal(size=(1000, 32)).astype(np.float32)
            optimizer = core.Optimizer("adagrad", 0.1)
            core.apply([core.Update(core.Table(expected), optimizer, [core.Gradient(keys, values)], [expected_state])])
            gradient = core.Gradient(cupy.asarray(keys), cupy.asarray(values))
            core.apply([core.Update(core.Table(weight), optimizer, [gradient], [state])], context=context)
            assert np.allclose(weight.get(), expected, rtol=1e-5, atol=1e-6)


def test_a_range_of_each_device(memory, cupy):
    """Whichever device is current."""
    ranges = [core.ReservedRange(1 << 40, device=device) for device in range(core.cuda_device_count())]
    for device, column in enumerate(ranges):
        column.grow(MB)
        with cupy.cuda.Device(device):
            memory.seen(column.array(MB, np.uint8))[:] = device
            cupy.cuda.runtime.deviceSynchronize()
    for device, column in enumerate(ranges):
        with cupy.cuda.Device(device):
            assert (memory.seen(column.array(MB, np.uint8)) == device).all()
        column.close()
