# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables whose rows lie in two memories, beside the same tables in one: rows move, nothing else changes."""

import harness
import numpy as np
import pytest
from gpu_suite import fetched

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=5)
SEED = 20


def insert(table, keys, context):
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, context=context)


def train(cupy, table, keys, values, context, states=1):
    """A step of Adagrad, or SGD where there are no states."""
    slots = insert(table, keys, context)
    gradient = core.Gradient(slots, values, generation=table.generation)
    optimizer = core.Optimizer("adagrad", 0.5) if states else core.Optimizer("sgd", 0.5)
    columns = [table.column(1 + i) for i in range(states)]
    core.apply([core.Update(table.table(), optimizer, [gradient], columns)], context=context)
    return slots


def held(table, context):
    """(keys, slots) on the device."""
    keys, slots, count = table.index.export(context=context)
    return keys[: int(count[0])], slots[: int(count[0])]


def content(cupy, table, context):
    """Key -> row and states, as bytes."""
    keys, slots = held(table, context)
    columns = [cupy.asarray(table.column(i))[slots].get() for i in range(2)]
    rows = np.concatenate([each.reshape(len(each), -1).astype(np.float32).view(np.uint8) for each in columns], axis=1)
    return {int(key): row.tobytes() for key, row in zip(keys.get(), rows, strict=True)}


@pytest.mark.parametrize(
    ("dimension", "dtype"), [(16, np.float32), (7, np.float32), (33, np.float16), (3, np.float16), (256, np.float32)]
)
@pytest.mark.parametrize("ahead", (False, True), ids=("asked", "prefetched"))
def test_rows_move_and_nothing_changes(cupy, context, record, dimension, dtype, ahead):
    """Two tables a call, more rows than fit the device's part, steps of several lookups, erased keys, new ones, calls
    with more keys than the device's part has rows; compared bit for bit with tables in one memory."""
    rng, device_rows = np.random.default_rng(SEED + dimension), 1000
    make = {"dtype": dtype, "initializer": UNIFORM, "device": 0, "eviction": "lru"}
    with (
        core.DynamicTable(10**6, dimension, **make) as expected,
        core.DynamicTable(10**6, dimension, device_rows=device_rows, **make) as table,
        core.DynamicTable(10**6, 4, device_rows=10, **make) as other,
    ):
        for each in (expected, table):
            assert each.add_column(dimension, initial=0.1, context=context) == 1
        later = None
        for step in range(60):
            count = 5000 if step % 20 == 7 else 300
            keys = later if later is not None else rng.zipf(1.2, count) % 20_000
            later = rng.zipf(1.2, 300) % 20_000
            values = cupy.asarray(rng.normal(size=(len(keys), dimension)).astype(np.float32))
            on_device = cupy.asarray(keys)
            if step % 3 == 0:  # a step of two lookups, the first of which has other keys too
                for each in (expected, table):
                    insert(each, cupy.asarray(keys[:50] + 7), context)
            for each in (expected, table):
                train(cupy, each, on_device, values, context)
            insert(other, on_device[:40], context)
            other.end_step()
            if ahead:
                core.prefetch(
                    [table, other, table, expected],
                    [cupy.asarray(later), on_device[:40], cupy.asarray(later[:9] + 10**7), on_device],
                    context=context,
                )
            if step % 10 == 9:
                gone = cupy.asarray(np.unique(keys)[:100])
                for each in (expected, table):
                    each.erase(gone, context=context)
        record.check()
        assert content(cupy, table, context) == content(cupy, expected, context)
        counts = table.counts()
        assert counts[:5] == expected.counts()[:5]
        assert counts.moves > 1000 and counts.device_hits > counts.host_hits > 0
        assert counts.device_hits + counts.host_hits == counts.lookups
        assert expected.counts().moves == expected.host_bytes == 0
        assert (table.host_bytes > 0) == (table.index.num_slots * dimension * dtype().itemsize > 2 << 20)  # whole pages
        record.check()


def test_it_is_the_same_every_time(cupy, context, record):
    """The same calls leave every key at the same slot."""
    found = []
    for _ in range(2):
        rng = np.random.default_rng(SEED)
        with core.DynamicTable(10**5, 8, device=0, device_rows=500, initializer=UNIFORM, eviction="lru") as table:
            table.add_column(8, context=context)
            for _ in range(30):
                keys = cupy.asarray(rng.zipf(1.1, 800) % 5000)
                train(cupy, table, keys, cupy.ones((800, 8), np.float32), context)
                core.prefetch([table], [cupy.asarray(rng.zipf(1.1, 800) % 5000)], context=context)
            keys, slots = held(table, context)
            found.append((keys.get(), slots.get(), cupy.asarray(table.scores)[slots].get()))
    record.check()
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)


def test_what_is_asked_for_often_stays(cupy, context, record):
    """A hundred keys of every call, beside others that never come again, are on the device after their first."""
    with core.DynamicTable(10**6, 4, device=0, device_rows=2000, eviction="lru") as table:
        table.add_column(4, context=context)
        hot = np.arange(10**6, 10**6 + 100)
        for step in range(40):
            keys = np.concatenate([np.arange(step * 500, step * 500 + 500), hot])
            slots = train(cupy, table, cupy.asarray(keys), cupy.ones((600, 4), np.float32), context)
            record.check()
            assert step == 0 or (slots[500:].get() < 2000).all()
        rows = fetched(table.read(cupy.asarray(hot), context=context))
    assert (rows == rows[0]).all() and rows[0, 0] < 0


def test_prefetching_brings_rows(cupy, context, record):
    """What was prefetched is on the device when it is asked for; keys that the table lacks are not inserted."""
    with core.DynamicTable(10**6, 4, device=0, device_rows=1000, eviction="lru") as table:
        for first in range(0, 10_000, 500):
            insert(table, cupy.arange(first, first + 500), context)
            table.end_step()
        table.index.size(context=context)  # the host has heard of all that has happened then
        before = table.counts()
        wanted = cupy.arange(0, 2000, 4)
        keys, slots = held(table, context)
        wanted_in_host = int((slots[cupy.isin(keys, wanted)] >= 1000).sum())
        assert 0 < wanted_in_host <= 500
        core.prefetch([table], [cupy.concatenate([wanted, cupy.arange(10**7, 10**7 + 50)])], context=context)
        slots = insert(table, wanted, context)
        record.check()
        assert (slots.get() < 1000).all()
        assert table.index.size(context=context) == 10_000
        after = table.counts()
        assert after.moves - before.moves == wanted_in_host
        assert (after.device_hits - before.device_hits, after.host_hits - before.host_hits) == (500, 0)


def test_rows_of_the_running_step_stay(cupy, context, record):
    """A step with more rows than the device's part has: those that were located keep their slots until it is over."""
    with core.DynamicTable(10**5, 2, device=0, device_rows=64, eviction="lru") as table:
        insert(table, cupy.arange(1000), context)
        table.end_step()
        first = insert(table, cupy.arange(500, 600), context)
        generation = table.generation
        insert(table, cupy.arange(300), context)
        core.prefetch([table], [cupy.arange(500, 900)], context=context)
        again = insert(table, cupy.arange(500, 600), context)
        assert (first == again).all()
        gradient = core.Gradient(first, cupy.ones((100, 2), np.float32), generation=generation)
        core.apply([core.Update(table.table(), core.Optimizer("sgd", 1.0), [gradient])], context=context)
        record.check()
        rows = fetched(table.read(cupy.arange(1000), context=context))
        assert (rows[500:600] == -1).all() and not rows[:500].any() and not rows[600:].any()
        assert (first.get() < 64).sum() == 64


def test_an_old_gradient_is_refused(cupy, context, record):
    """Slots of a step that is over may be others' rows since."""
    with core.DynamicTable(10**5, 2, device=0, device_rows=64, eviction="lru", name="clicks") as table:
        slots = insert(table, cupy.arange(64), context)
        gradient = core.Gradient(slots, cupy.ones((64, 2), np.float32), generation=table.generation)
        table.end_step()
        insert(table, cupy.arange(64, 200), context)
        table.end_step()
        insert(table, cupy.arange(64, 200), context)
        core.apply([core.Update(table.table(), core.Optimizer("sgd", 1.0), [gradient])], context=context)
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(RuntimeError, match="'clicks': a row"):
            record.check()
        assert not fetched(table.read(cupy.arange(200), context=context)).any()


@pytest.mark.parametrize("strategy", ("lru", "lfu", "customized"))
def test_the_same_rows_are_evicted(cupy, context, record, strategy):
    """A full table gives up the rows that it would give up in one memory, wherever they are. A key a call: of rows that
    were used in one call the lowest slot goes first, and slots are what differs."""
    rng = np.random.default_rng(SEED)
    make = {"initializer": UNIFORM, "device": 0, "eviction": strategy}
    size = 20 if harness.under_compute_sanitizer() else 100
    with (
        core.DynamicTable(3 * size, 4, **make) as expected,
        core.DynamicTable(3 * size, 4, device_rows=size * 2 // 5, **make) as table,
    ):
        for each in (expected, table):
            each.add_column(4, context=context)
        values = cupy.asarray(rng.normal(size=(1, 4)).astype(np.float32))
        for key in rng.zipf(1.05, 30 * size) % (15 * size):
            for each in (expected, table):
                train(cupy, each, cupy.asarray(np.array([key])), values, context)
        record.check()
        assert content(cupy, table, context) == content(cupy, expected, context)
        assert table.counts()[:5] == expected.counts()[:5]
        assert table.counts().evictions > 5 * size and table.counts().moves > 5 * size


def test_shrinking(cupy, context, record):
    """Rows that stay keep what they hold; the host's memory is given back first."""
    with core.DynamicTable(10**6, 512, device=0, device_rows=10_000, eviction="lru", initializer=UNIFORM) as table:
        table.add_column(512, context=context)
        insert(table, cupy.arange(50_000), context)
        rows = table.read(cupy.arange(5000), context=context)
        assert table.host_bytes > 0
        table.end_step()
        table.erase(cupy.arange(5000, 50_000), context=context)
        core.prefetch([table], [cupy.arange(5000)], context=context)
        assert table.shrink(context=context) > 0
        assert table.host_bytes == 0
        assert (table.read(cupy.arange(5000), context=context) == rows).all()
        record.check()


def test_ranges_in_two_memories(cupy):
    """One array to kernels and copies, across the border."""
    mb = 1 << 20
    with core.ReservedRange(1 << 40, device=0, device_bytes=5 * mb) as column:
        column.grow(4 * mb)
        assert column.host_bytes == 0
        column.grow(64 * mb)
        assert column.host_bytes == column.backed_bytes - 6 * mb  # whole pages of 2 MiB
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(column.data, 64 * mb, column), 0)
        seen = cupy.ndarray((16 * mb,), np.float32, pointer)
        seen[:] = cupy.arange(16 * mb, dtype=np.float32)
        assert (seen.get() == np.arange(16 * mb, dtype=np.float32)).all()
        assert float((seen * 2).max()) == 2 * (16 * mb - 1)
        column.shrink(6 * mb, context=core.Context(device=0, empty=cupy.empty))
        assert column.host_bytes == 0 and (seen[: 6 * mb // 4].get() == np.arange(6 * mb // 4)).all()
