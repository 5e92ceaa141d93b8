# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables on a GPU: the slots and rows of the CPU, deferred errors, calls that do not wait, CUDA graphs."""

import numpy as np
import pytest
from gpu_suite import fetched

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=11)
NORMAL = core.Initializer("truncated_normal", 0.5, 2.0, seed=3)


def insert(table, keys, context=None):
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, context=context)


def address(table, number):
    return table.column(number).__cuda_array_interface__["data"][0]


def seen(cupy, column, rows):
    return cupy.asarray(column)[:rows].get()


def test_the_rows_of_the_cpu(cupy, context, record):
    """Over steps that insert, train and erase, two tables in a call, from nothing through several doublings, without a
    wait; and rows read by key, of keys that are there and that are not."""
    rng = np.random.default_rng(1)
    shapes = ((7, np.float32, UNIFORM), (32, np.float16, NORMAL))
    expected, tables = (
        [core.DynamicTable(2**30, d, dtype=t, initializer=i, device=device) for d, t, i in shapes]
        for device in (None, 0)
    )
    for made, where in ((expected, None), (tables, context)):
        for table, width in zip(made, (3, 1), strict=True):
            assert table.add_column(width, initial=0.25, context=where) == 1
            assert table.add_column(1, np.int64, context=where) == 2
    addresses = [[address(table, number) for number in range(3)] for table in tables]
    results = []
    for step in range(30):
        counts = [int(n) for n in rng.integers(0, 40_000, 2)]
        keys = np.where(rng.random(sum(counts)) < 0.5, rng.zipf(1.2, sum(counts)), rng.integers(0, 10**6, sum(counts)))
        keys = (keys % 10**6 + step * 30_000) * 0x1E3779B97F4A7C15
        gone, asked = rng.permutation(keys)[:5_000], rng.permutation(np.r_[keys, ~keys])[:1_000]
        on_device = [cupy.asarray(each) for each in (keys, gone, asked)]
        wanted = [core.locate([t.table() for t in expected], keys, [counts], insert=True)]
        found = [core.locate([t.table() for t in tables], on_device[0], [counts], insert=True, context=context)]
        for into, made, of, where in (
            (wanted, expected, (keys, gone, asked), None),
            (found, tables, on_device, context),
        ):
            updates = []
            begin = 0
            for table, count, width in zip(made, counts, (7, 32), strict=True):
                slots = into[0][begin : begin + count]
                begin += count
                values = np.full((count, width), 1 / 64, np.float32)
                values = values if where is None else cupy.asarray(values)
                updates.append(
                    core.Update(
                        table.table(),
                        core.Optimizer("sgd", 0.5),
                        [core.Gradient(slots, values, generation=table.generation)],
                    )
                )
            core.apply(updates, context=where)
            into.append(made[0].erase(of[1], context=where))
            into.append(made[1].read(of[2], context=where))
        results.append((wanted, found))
    record.check()
    for wanted, found in results:
        for a, b in zip(wanted, found, strict=True):
            assert a.tobytes() == fetched(b).tobytes()
    for a, b, before in zip(expected, tables, addresses, strict=True):
        assert b.index.size(context=context) == a.index.size()
        assert b.index.num_slots == a.index.num_slots > 200_000  # it is known now
        assert [address(b, number) for number in range(3)] == before
        for number in range(3):
            assert a.column(number).tobytes() == seen(cupy, b.column(number), a.index.num_slots).tobytes()
        a.close()
        b.close()


def test_nothing_is_set_where_something_is_recorded(cupy, context, record):
    with core.DynamicTable(1000, 4, initializer=UNIFORM, device=0, name="clicks") as table:
        keys = cupy.arange(2000)
        insert(table, keys[:600], context)
        cupy.asarray(table.column(0))[:] = 5
        insert(table, keys[:1001], context)
        insert(table, keys[600:700], context)
        table.erase(keys[:5], context=context)
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(MemoryError, match="'clicks' holds 600 of at most 1000"):
            record.check()
        assert table.index.size(context=context) == table.index.num_slots == 600
        assert (cupy.asarray(table.column(0)) == 5).all()
        assert insert(table, keys[600:602], context).get().tolist() == [600, 601]
        wanted = core.initialize(UNIFORM, 2, 4, keys=np.array([600, 601]))
        assert seen(cupy, table.column(0), 602)[600:].tobytes() == wanted.tobytes()
        with pytest.raises(MemoryError, match="'clicks' holds 602 of at most 1000"):
            insert(table, keys, core.Context(device=0, empty=cupy.empty))
        record.check()


def test_a_gradient_of_an_erased_row_is_refused(cupy, context, record):
    with core.DynamicTable(100, 4, device=0, name="clicks") as table:
        slots = insert(table, cupy.arange(10), context)
        part = core.Gradient(slots, cupy.ones((10, 4), np.float32), generation=table.generation)
        update = core.Update(table.table(), core.Optimizer("sgd", 1.0), [part])
        core.apply([update], context=context)
        table.erase(cupy.asarray(np.array([4])), context=context)
        insert(table, cupy.asarray(np.array([77])), context)
        update.table = table.table()
        core.apply([update], context=context)
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(RuntimeError, match=r"'clicks': a row .* erased or evicted"):
            record.check()
        rows = fetched(table.read(cupy.asarray(np.array([3, 77])), context=context))
        assert (rows == [[-1] * 4, [0] * 4]).all()


def test_in_a_cuda_graph(cupy, record):
    """Each replay inserts its keys, into memory that there is from the start; what would need more is refused."""
    stream, pool = cupy.cuda.Stream(non_blocking=True), {}

    def allocate(size):
        memory = cupy.cuda.alloc(size)
        pool[memory.ptr] = memory
        return memory.ptr

    keys, slots = cupy.zeros(500, np.int64), cupy.zeros(500, np.int64)
    context = core.Context(
        device=0,
        stream=stream.ptr,
        empty=lambda shape, dtype: slots,
        errors=record,
        allocate=allocate,
        release=lambda _: None,
    )
    with (
        core.DynamicTable(10**6, 1024, device=0, name="clicks", initial_rows=2000, initializer=UNIFORM) as table,
        core.DynamicTable(3000, 1) as expected,
    ):
        room = table.num_bytes
        cupy.cuda.runtime.deviceSynchronize()
        insert(table, keys, context)
        table.clear(context=context)
        assert table.index.size(context=context) == table.index.num_slots == 0
        with stream:
            stream.begin_capture()
            insert(table, keys, context)
            graph = stream.end_capture()
        rng = np.random.default_rng(2)
        for _ in range(6):
            batch = rng.integers(0, 1500, 500)
            keys.set(batch)
            cupy.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(slots.get(), insert(expected, batch))
        record.check()
        assert table.index.size(context=context) == table.index.num_slots == expected.index.size()
        held, places, _ = expected.index.export()
        rows = seen(cupy, table.column(0), len(places))
        assert rows[places].tobytes() == core.initialize(UNIFORM, len(held), 1024, keys=held).tobytes()
        for step in range(10):
            keys.set(10**6 + 500 * step + np.arange(500))
            cupy.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
        with pytest.raises(MemoryError, match=r"'clicks' holds \d+ of at most 2048 keys"):
            record.check()
        assert table.num_bytes == room


def test_the_host_hears_how_many_there_are(cupy, context):
    with core.DynamicTable(10**6, 4, device=0) as table:
        source = "__global__ void spin(long long n) { for (long long t = clock64(); clock64() - t < n;); }"
        spin = cupy.RawKernel(f'extern "C" {source}', "spin")
        keys = cupy.arange(1000)
        insert(table, keys, context)
        spin((1,), (1,), (200_000_000,))
        for _ in range(3):
            insert(table, keys, context)
        assert 1000 < table.index.num_slots <= 4000
        assert table.index.size(context=context) == table.index.num_slots == 1000
        assert table.counts()[:3] == (4000, 1000, 0)
        table.clear(context=context)
        assert table.index.size(context=context) == table.index.num_slots == 0
        assert table.counts().insertions == 1000


def test_calls_of_two_devices(cupy, context):
    with core.DynamicTable(10, 4, device=0, name="there") as there, core.DynamicTable(10, 4, name="here") as here:
        for table, where, keys in ((there, None, np.arange(3)), (here, context, cupy.arange(3))):
            with pytest.raises(ValueError, match="another device"):
                insert(table, keys, where)
            for call in (table.read, table.erase):
                with pytest.raises(ValueError, match="another device"):
                    call(keys, context=where)
            with pytest.raises(ValueError, match="another device"):
                table.add_column(1, context=where)
    with pytest.raises(ValueError, match="no CUDA device"):
        core.DynamicTable(10, 4, device=999)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("num_keys", [1, 1000, 300_000])
def test_any_keys_are_routed_as_on_the_cpu(cupy, context, record, num_keys, num_ranks):
    """With static tables in the same call, localized ones, and keys of 32 bits; every output, and in the same order."""
    rng = np.random.default_rng(num_keys)
    sizes = (core.ANY_KEY, 1000, core.ANY_KEY, 2**40, core.ANY_KEY)
    owners = (-1, -1, num_ranks - 1, -1, 0)
    tables = [
        core.Table(None, size, t + 1, f"t{t}", owner, num_ranks)
        for t, (size, owner) in enumerate(zip(sizes, owners, strict=True))
    ]
    extremes = np.array([-(2**63), 2**63 - 1, 0, -1, 1, -(2**31), 2**31 - 1, 2**32])
    lookups = []
    for number in range(8):
        table = number % len(tables)
        if sizes[table] == core.ANY_KEY:
            keys = np.r_[
                rng.integers(-(2**63), 2**63 - 1, num_keys // 4), rng.integers(-99, 99, num_keys // 4), extremes
            ]
        else:
            keys = rng.integers(0, sizes[table], num_keys // 2)
        keys = keys[rng.integers(0, len(keys), num_keys)] if len(keys) > 0 else keys
        keys = keys.astype(np.int32) if number % 3 == 0 and sizes[table] != 2**40 else keys
        splits = np.sort(np.append(rng.integers(0, len(keys) + 1, 9), [0, len(keys)]))
        lookups.append((keys, table, splits))
    expected = core.route(tables, [core.Lookup(*each) for each in lookups])
    on_device = [core.Lookup(cupy.asarray(keys), table, cupy.asarray(splits)) for keys, table, splits in lookups]
    routing = core.route(tables, on_device, context=context)
    cupy.cuda.runtime.deviceSynchronize()
    record.check()
    end = int(expected.counts.sum())
    for name, size in (("counts", None), ("keys", end), ("inverse", None), ("order", None), ("unique_splits", end + 1)):
        assert np.array_equal(getattr(routing, name).get()[:size], getattr(expected, name)[:size]), name


def test_a_wrong_key_beside_any_keys_is_reported(cupy, context, record):
    tables = [core.Table(None, core.ANY_KEY, 2, "any", -1, 2), core.Table(None, 100, 2, "item", -1, 2)]
    for wrong in (-1, 100, 2**62):
        keys = [cupy.asarray(np.array(each)) for each in ([5, -5, 2**62], [1, wrong, 99])]
        core.route(tables, [core.Lookup(each, t) for t, each in enumerate(keys)], context=context)
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(IndexError, match=rf"table 'item': key {wrong} is outside \[0, 100\)"):
            record.check()


@pytest.mark.parametrize("dimension", (4, 7))
@pytest.mark.parametrize("dtype", (np.float32, np.float16))
def test_shrinks_as_on_the_cpu(cupy, context, record, dimension, dtype):
    """The same slots, rows, other columns and scores, over calls that insert, train and erase in between."""
    rng = np.random.default_rng(6)
    options = {"dtype": dtype, "initializer": UNIFORM, "eviction": "lfu"}
    tables = [core.DynamicTable(300_000, dimension, device=device, **options) for device in (None, 0)]
    on_device = (None, context)
    for table, where in zip(tables, on_device, strict=True):
        table.add_column(3, initial=0.25, context=where)
    for step in range(6):
        keys = rng.zipf(1.1, 60_000) % 10**7
        erased, new = rng.permutation(keys)[:30_000], rng.permutation(keys)[:500]
        for table, where in zip(tables, on_device, strict=True):
            own, gone, late = (keys, erased, new) if where is None else map(cupy.asarray, (keys, erased, new))
            slots = insert(table, own, where)
            values = np.full((len(keys), dimension), 1 / 64, np.float32)
            values = values if where is None else cupy.asarray(values)
            gradient = core.Gradient(slots, values, generation=table.generation)
            core.apply([core.Update(table.table(), core.Optimizer("sgd", 0.5), [gradient])], context=where)
            table.erase(gone, context=where)
            if step % 2:
                before = table.num_bytes
                assert table.shrink(context=where) == before - table.num_bytes > 0
                assert table.index.num_slots == table.index.size(context=where)
            insert(table, late, where)
            table.end_step()
        record.check()
    exported = [table.index.export(context=where) for table, where in zip(tables, on_device, strict=True)]
    count = int(exported[0][2][0])
    assert count == int(exported[1][2][0])
    slots = exported[0][1][:count]
    for wanted, found in zip(exported[0][:2], exported[1][:2], strict=True):
        np.testing.assert_array_equal(wanted[:count], fetched(found[:count]))
    for number in range(2):
        wanted = np.array(tables[0].column(number))[slots]
        assert wanted.tobytes() == cupy.asarray(tables[1].column(number))[cupy.asarray(slots)].get().tobytes()
    np.testing.assert_array_equal(tables[0].scores[slots], cupy.asarray(tables[1].scores).get()[slots])
    assert tables[0].counts() == tables[1].counts()
