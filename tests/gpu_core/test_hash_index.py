# SPDX-License-Identifier: Apache-2.0
"""Hash indices on a GPU: the same slots as on the CPU, errors that come later, calls that do not wait, CUDA graphs."""

import numpy as np
import pytest
from gpu_suite import fetched

from sparse_operation_kit import core


def batches(rng, number, size):
    """Keys that drift, with duplicates."""
    for step in range(number):
        yield (rng.zipf(1.3, size) % 10**6 + step * 20_000) * 0x1E3779B97F4A7C15


def test_the_slots_of_the_cpu(cupy, record):
    """Over steps that insert, look up and erase, the index growing from nothing, without a wait."""
    rng = np.random.default_rng(1)
    context = core.Context(device=0, empty=cupy.empty, errors=record)
    with core.HashIndex(2**40) as expected, core.HashIndex(2**40, device=0) as index:
        results = []
        for keys in batches(rng, 40, 100_000):
            gone = rng.permutation(keys)[:20_000]
            on_device = cupy.asarray(keys), cupy.asarray(gone)
            wanted = [*expected.find_or_insert(keys), expected.erase(gone), expected.find(keys)]
            found = [
                *index.find_or_insert(on_device[0], context=context),
                index.erase(on_device[1], context=context),
                index.find(on_device[0], context=context),
            ]
            results.append((wanted, found))
        record.check()
        for wanted, found in results:
            for a, b in zip(wanted, found, strict=True):
                assert np.array_equal(a, fetched(b))
        assert index.size(context=context) == expected.size()
        keys, slots, count = map(fetched, index.export(context=context))
        held = int(count[0])
        wanted = expected.export()
        assert held == wanted[2][0]
        assert np.array_equal(keys[:held], wanted[0][:held])
        assert np.array_equal(slots[:held], wanted[1][:held])


def test_a_full_index_is_reported(cupy, record):
    """Nothing of the call is inserted, nor of calls that follow, until the record is checked."""
    context = core.Context(device=0, empty=cupy.empty, errors=record)
    with (
        core.HashIndex(1000, device=0, name="clicks") as index,
        core.HashIndex(1000, device=0, name="other") as other,
    ):
        keys = cupy.arange(1001)
        index.find_or_insert(keys[:600], context=context)
        requests = [core.HashRequest(other, keys), core.HashRequest(index, keys)]
        core.find_or_insert([core.HashRequest(other, keys[:5]), core.HashRequest(index, keys)], context=context)
        other.find_or_insert(keys[:5], context=context)
        other.erase(keys[:5], context=context)
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(MemoryError, match="'clicks' holds 600 of at most 1000"):
            record.check()
        assert index.size(context=context) == 600
        assert other.size(context=context) == 0
        with pytest.raises(MemoryError):
            core.find_or_insert(requests, context=core.Context(device=0, empty=cupy.empty))
        assert fetched(other.find_or_insert(keys[:5], context=context)[0]).tolist() == [0, 1, 2, 3, 4]
        record.check()


def test_in_a_cuda_graph(cupy, record):
    """Where room was reserved a call can be captured; the graph sees the keys of each replay."""
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = {}

    def allocate(size):
        memory = cupy.cuda.alloc(size)
        pool[memory.ptr] = memory
        return memory.ptr

    keys = cupy.zeros(5000, np.int64)
    slots, is_new = cupy.zeros(5000, np.int64), cupy.zeros(5000, np.uint8)
    made = {np.int64: slots, np.uint8: is_new}
    context = core.Context(
        device=0,
        stream=stream.ptr,
        empty=lambda shape, dtype: made[dtype],
        errors=record,
        allocate=allocate,
        release=lambda _: None,
    )
    with core.HashIndex(100_000, device=0) as index, core.HashIndex(100_000) as expected:
        index.reserve(100_000, context=context)
        index.find_or_insert(keys, context=context)
        index.clear(context=context)
        stream.synchronize()
        with stream:
            stream.begin_capture()
            index.find_or_insert(keys, context=context)
            graph = stream.end_capture()
        rng = np.random.default_rng(2)
        for _ in range(10):
            batch = rng.integers(0, 60_000, 5000)
            keys.set(batch)
            cupy.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(slots.get(), expected.find_or_insert(batch)[0])
        record.check()
        assert index.size(context=context) == expected.size()
