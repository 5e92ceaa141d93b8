# SPDX-License-Identifier: Apache-2.0
"""Memory that grows and shrinks in place: contents and addresses against a model, memory that is given back or is not
there. On the CPU, and as CUDA's over a fake driver; tests/gpu_core runs it on a GPU."""

import itertools
import random

import harness
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MB = 1 << 20
GB = 1 << 30
range_of = range  # in the tests a range is one of memory


def pattern(begin, end):
    """What the tests write to the bytes [begin, end)."""
    return (np.arange(begin, end, dtype=np.int64) * 2654435761 >> 7).astype(np.uint8)


def host(array):
    """A NumPy array of an array that may be on a device."""
    return array if isinstance(array, np.ndarray) else array.get()


def write(memory, range, begin, end):
    memory.view(range)[begin:end] = memory.array(pattern(begin, end))
    memory.finish()


def holds(memory, range, begin, end):
    return np.array_equal(host(memory.view(range)[begin:end]), pattern(begin, end))


def test_a_new_range_is_empty(memory):
    with memory.range(3 * memory.page - 1) as range:
        assert range.data % memory.page == 0 or memory.device is None
        assert range.data % 4096 == 0 and range.data != 0
        assert range.reserved_bytes == 3 * memory.page
        assert range.backed_bytes == 0
        range.grow(0)
        range.shrink(0)
        assert range.backed_bytes == 0


def test_far_more_addresses_than_memory(memory):
    with memory.range(8 << 40) as range:
        range.grow(5 * MB)
        write(memory, range, 0, 5 * MB)
        assert holds(memory, range, 0, 5 * MB)


def test_it_grows_in_place(memory):
    with memory.range(64 * GB) as range:
        data, asked = range.data, 0
        for _ in range_of(30):
            before = range.backed_bytes
            asked += 333_333
            range.grow(asked)
            assert range.data == data
            assert asked <= range.backed_bytes <= range.reserved_bytes
            assert range.backed_bytes % memory.page == 0
            assert range.backed_bytes - asked < max(before / 8, memory.page)
            if memory.zeroed:
                assert not memory.view(range)[before:].any()
            write(memory, range, before, range.backed_bytes)
            assert holds(memory, range, 0, range.backed_bytes)


def test_steps_of_one_row_ask_the_system_seldom(memory):
    """As often as the policy says: 8 chunks for each doubling."""
    with memory.range(64 * GB) as range:
        chunks, before = 0, 0
        for size in range_of(memory.page, 4096 * memory.page, memory.page):
            range.grow(size)
            chunks += range.backed_bytes != before
            before = range.backed_bytes
        assert chunks <= 8 * 12
        assert before < 4096 * memory.page * 9 / 8


def test_growing_to_less_changes_nothing(memory):
    with memory.range(GB) as range:
        range.grow(40 * MB)
        backed = range.backed_bytes
        for size in (0, 1, 40 * MB, backed):
            range.grow(size)
            assert range.backed_bytes == backed
        range.shrink(backed)
        range.shrink(GB)
        assert range.backed_bytes == backed


def test_all_addresses_can_be_used(memory):
    with memory.range(33 * MB) as range:
        range.grow(30 * MB)
        range.grow(range.reserved_bytes)
        assert range.backed_bytes == range.reserved_bytes
        write(memory, range, 0, range.backed_bytes)
        assert holds(memory, range, 0, range.backed_bytes)


def test_memory_is_given_back(memory):
    before = memory.used()
    range = memory.range(4 * GB)
    assert memory.used() - before < 8 * MB
    range.grow(64 * MB)
    backed = range.backed_bytes  # where a chunk ends
    range.grow(72 * MB)
    write(memory, range, 0, 72 * MB)
    assert memory.used() - before > 70 * MB
    range.shrink(backed)
    assert range.backed_bytes == backed
    assert holds(memory, range, 0, 64 * MB)
    assert 62 * MB < memory.used() - before < 70 * MB
    range.shrink(0)
    assert range.backed_bytes == 0
    assert memory.used() - before < 8 * MB
    range.grow(64 * MB)
    write(memory, range, 0, 64 * MB)
    range.close()
    assert memory.used() - before < 8 * MB


def test_what_grew_at_once_shrinks_to_any_size(memory):
    """The CPU gives back whole pages. A device gives back whole chunks, and keeps an eighth more at most."""
    with memory.range(4 * GB) as range:
        range.grow(GB)
        write(memory, range, 0, 250 * MB)
        for size in (800 * MB + 5, 250 * MB, 42 * MB - 1, 5 * MB, MB):
            range.shrink(size)
            pages = -(-size // memory.page) * memory.page
            assert pages <= range.backed_bytes <= (pages if memory.device is None else max(pages, size * 9 // 8))
            assert holds(memory, range, 0, min(size, 250 * MB))
        range.grow(30 * MB)
        write(memory, range, 0, 30 * MB)
        assert holds(memory, range, 0, 30 * MB)


STEPS = st.lists(st.tuples(st.sampled_from(["grow", "grow", "shrink"]), st.integers(0, 24 * MB)), max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_random_steps(memory, steps):
    with memory.range(24 * MB) as range:
        data, filled = range.data, 0
        for step, size in steps:
            backed = range.backed_bytes
            getattr(range, step)(size)
            if step == "grow":
                assert max(size, backed) <= range.backed_bytes
            else:
                assert min(size, backed) <= range.backed_bytes <= backed
            if memory.zeroed and range.backed_bytes > backed:
                assert not memory.view(range)[backed:].any()
            filled = min(filled, range.backed_bytes)
            write(memory, range, filled, range.backed_bytes)
            filled = range.backed_bytes
            assert range.data == data
            assert holds(memory, range, 0, filled)


def test_a_long_run(memory):
    """Thousands of steps, after each of which every page holds its number."""
    chosen = random.Random(7)
    pages = 200
    steps = 500 if harness.under_compute_sanitizer() else 20000 if memory.device is None else 4000
    numbers = memory.array(np.arange(pages, dtype=np.uint8))
    with memory.range(pages * memory.page) as range:
        data, marked = range.data, 0
        for _ in range_of(steps):
            size = chosen.randrange(pages * memory.page)
            (range.grow if size > range.backed_bytes else range.shrink)(size)
            of_pages = memory.view(range)[:: memory.page]
            marked = min(marked, len(of_pages))
            of_pages[marked:] = numbers[marked : len(of_pages)]
            assert (of_pages == numbers[: len(of_pages)]).all()
            marked = len(of_pages)
        assert range.data == data


def test_many_ranges(memory):
    count = 1000 if memory.device is None else 200
    ranges = [memory.range(GB, name=f"range {i}") for i in range_of(count)]
    for i, range in enumerate(ranges):
        range.grow(1 + i)
        memory.view(range)[0] = i % 256
    places = sorted((range.data, range.reserved_bytes) for range in ranges)
    assert all(data + size <= after for (data, size), (after, _) in itertools.pairwise(places))
    for range in ranges[::2]:
        range.close()
    for i, range in list(enumerate(ranges))[1::2]:
        assert int(memory.view(range)[0]) == i % 256
        range.grow(2 * memory.page)
        range.close()


def test_no_memory(memory):
    with memory.range(64 * GB, name="table 'user': m") as range:
        range.grow(16 * MB)
        write(memory, range, 0, 16 * MB)
        data = range.data
        with memory.limited(5 * GB // 2):
            used = memory.used()
            with pytest.raises(MemoryError, match=r"table 'user': m: no memory for") as error:
                range.grow(6 * GB)
            assert str(6 * GB - 16 * MB) in str(error.value) and str(16 * MB) in str(error.value)
            words = ("ulimit", "overcommit") if memory.device is None else ("bytes free", "TF_FORCE_GPU_ALLOW_GROWTH")
            assert all(word in str(error.value) for word in words)
            assert (range.data, range.backed_bytes) == (data, 16 * MB)
            assert memory.used() - used < 8 * MB  # also what came before it failed has been given back
            range.grow(2 * GB)
        assert holds(memory, range, 0, 16 * MB)
        range.grow(6 * GB)
        assert holds(memory, range, 0, 16 * MB)


def test_two_memories(memory):
    """Whole pages from the start are the device's, all others the host's; the CPU has one memory."""
    mb = 1 << 20
    with memory.range(64 * GB, device_bytes=5 * mb) as range:
        on_device = 6 * mb if memory.device is not None else 64 * GB  # pages of 2 MiB
        for size in (mb, 5 * mb, 7 * mb, 64 * mb, GB):
            range.grow(size)
            write(memory, range, size - mb, size)
            assert range.host_bytes == max(0, range.backed_bytes - on_device)
            assert range.backed_bytes <= max(size, size * 9 // 8) + 2 * memory.page
            if hasattr(memory, "fake"):
                assert memory.fake.fake_host_memory_used() == range.host_bytes
        assert all(holds(memory, range, size - mb, size) for size in (mb, 5 * mb, 7 * mb, 64 * mb, GB))
        if memory.limits_host:
            with memory.limited(64 * MB), pytest.raises(MemoryError, match="no memory for") as error:
                range.grow(8 * GB)
            assert ("of the host" in str(error.value)) == (memory.device is not None)
        range.shrink(3 * mb)
        assert range.host_bytes == 0 and holds(memory, range, 0, mb)
    with pytest.raises(ValueError, match="device_bytes"):
        memory.range(GB, device_bytes=-1)


def test_where_there_is_memory_for_what_is_lacking_alone(memory):
    """An eighth of what is backed would be more than there is."""
    with memory.range(64 * GB) as range:
        range.grow(GB)
        backed = range.backed_bytes
        with memory.limited(64 * MB):
            range.grow(backed + MB)
            assert backed + MB <= range.backed_bytes <= backed + 2 * MB
            with pytest.raises(MemoryError):
                range.grow(backed + 90 * MB)


def test_no_more_than_was_reserved(memory):
    with memory.range(10 * memory.page, name="scores") as range:
        range.grow(memory.page)
        with pytest.raises(MemoryError, match=f"scores: it has addresses for {10 * memory.page} bytes"):
            range.grow(10 * memory.page + 1)
        assert range.backed_bytes == memory.page
        with pytest.raises(MemoryError):
            range.grow(2**63 - 1)
        with pytest.raises(ValueError, match="negative"):
            range.grow(-1)
        with pytest.raises(ValueError, match="negative"):
            range.shrink(-1)


def test_arrays(memory):
    with memory.range(GB) as range:
        range.grow(1000)
        array = memory.seen(range.array((10, 5), np.float32))
        assert array.shape == (10, 5) and array.dtype == np.float32
        array[:] = 3
        assert (host(memory.view(range)[:200]).view(np.float32) == 3).all()
        with pytest.raises(ValueError, match="are backed"):
            range.array((range.backed_bytes // 4 + 1,), np.float32)
    assert range.data == range.backed_bytes == range.reserved_bytes == 0
    with pytest.raises(ValueError, match="NULL"):
        range.grow(1)
    range.close()
