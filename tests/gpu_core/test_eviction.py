# SPDX-License-Identifier: Apache-2.0
"""Eviction on a GPU: the rows that the CPU evicts, in calls that do not wait."""

import time

import numpy as np
import pytest
from gpu_suite import fetched

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=11)
STRATEGIES = ("lru", "lfu", "epoch_lru", "epoch_lfu", "customized")


def insert(table, keys, context=None):
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, context=context)


def held(table, context=None):
    """(keys, slots), ascending by slot."""
    keys, slots, count = table.index.export(context=context)
    if context is not None:
        keys, slots, count = keys.get(), slots.get(), count.get()
    return keys[: count[0]], slots[: count[0]]


@pytest.mark.parametrize("waits", (False, True), ids=("deferred", "waiting"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_rows_of_the_cpu_go(cupy, context, record, strategy, waits):
    """Beside another table of the call that evicts nothing: small and large calls, steps of one call and of several,
    erased keys, epochs, scores of the user, counts that are halved, generations that are numbered anew. Slots, scores,
    rows and what is held at the end.
    """
    capacity, rng = 40_000, np.random.default_rng(STRATEGIES.index(strategy))
    half_life = 40 if strategy in ("lfu", "epoch_lfu") else 0
    make = {"initializer": UNIFORM, "eviction": strategy, "half_life": half_life}
    with (
        core.DynamicTable(capacity, 3, **make) as expected,
        core.DynamicTable(10**7, 2, initializer=UNIFORM) as expected_other,
        core.DynamicTable(capacity, 3, device=0, **make) as table,
        core.DynamicTable(10**7, 2, initializer=UNIFORM, device=0) as other,
    ):
        pairs = []
        for call in range(150):
            count = int(rng.integers(1, 60) ** 2.4)  # up to half the capacity
            keys = np.where(rng.random(count) < 0.6, rng.zipf(1.1, count), rng.integers(0, 2**40, count)) % 10**5
            more = rng.integers(0, 10**4, 100)
            both = np.concatenate([keys, more])
            counts = [count, 100]
            pairs.append(
                (
                    core.locate([expected.table(), expected_other.table()], both, [counts], insert=True),
                    core.locate(
                        [table.table(), other.table()], cupy.asarray(both), [counts], insert=True, context=context
                    ),
                )
            )
            for each, where in ((expected, None), (table, context)):
                if call % 3 != 0:
                    each.end_step()
                if call % 17 == 5:
                    gone = keys[:200]
                    each.erase(gone if where is None else cupy.asarray(gone), context=where)
                if call == 75:
                    each.use_times = [[2**31 - 23, time.time_ns()]]
                if call % 20 == 0 and strategy.startswith("epoch"):
                    each.set_epoch(call // 20)
            if call % 10 == 9 and strategy == "customized":
                slots = np.unique(pairs[-1][0][:count])
                slots = slots[expected.scores[slots] != 2**63 - 1]
                ranked = expected.scores[slots] % 2**32 | rng.integers(0, 50, len(slots)) << 32
                expected.set_scores(slots, ranked)
                table.set_scores(cupy.asarray(slots), cupy.asarray(ranked), context=context)
            if waits:
                assert table.index.size(context=context) == expected.index.size()
        record.check()
        assert table.generation == expected.generation < 2**30 + 1000
        for wanted, found in pairs:
            assert np.array_equal(wanted, fetched(found))
        assert table.index.size(context=context) == capacity
        assert table.counts() == expected.counts() and table.counts().evictions > 5 * capacity
        for a, b in zip(held(expected), held(table, context), strict=True):
            assert np.array_equal(a, b)
        assert np.array_equal(expected.scores, cupy.asarray(table.scores).get())
        keys = held(expected)[0]
        assert expected.read(keys).tobytes() == fetched(table.read(cupy.asarray(keys), context=context)).tobytes()


def test_a_large_sweep(cupy, context, record):
    """Several blocks' slots, one score for most rows, more wanted than a share, and rows of the running step."""
    capacity = 3_000_000
    with (
        core.DynamicTable(capacity, 1, eviction="lru") as expected,
        core.DynamicTable(capacity, 1, eviction="lru", device=0) as table,
    ):
        batches = [np.arange(first, first + 500_000) for first in range(0, capacity, 500_000)]
        batches += [np.arange(0, capacity, 5), np.arange(capacity, capacity + 300_000)]  # a step of two calls
        batches += [np.arange(2 * capacity, 2 * capacity + 2_500_000)]
        for number, keys in enumerate(batches):
            wanted, found = insert(expected, keys), insert(table, cupy.asarray(keys), context)
            assert np.array_equal(wanted, fetched(found))
            if number != 6:
                expected.end_step()
                table.end_step()
        record.check()
        for a, b in zip(held(expected), held(table, context), strict=True):
            assert np.array_equal(a, b)


def test_more_keys_than_the_capacity(cupy, context, record):
    """Nothing but the uses of keys that are there has happened, also in the other table of the call; and nothing at
    all where an error was recorded before."""
    with (
        core.DynamicTable(100, 1, eviction="lfu", device=0, name="one") as one,
        core.DynamicTable(300, 1, eviction="lru", device=0, name="other") as other,
    ):
        tables = [one.table(), other.table()]
        core.locate(tables, cupy.arange(400), [[100, 300]], insert=True, context=context)
        for table in (one, other):
            table.end_step()
            cupy.asarray(table.column(0))[:, 0] = cupy.arange(table.column(0).shape[0])
        before = [held(table, context) for table in (one, other)]
        core.locate(tables, cupy.arange(100, 400 + 101), [[101 + 50, 250]], insert=True, context=context)
        scores = [cupy.asarray(table.scores).get() for table in (one, other)]
        assert (scores[0] == 1 << 32 | 1).all()
        assert sorted(set(scores[1].tolist())) == [1, 2]
        insert(one, cupy.arange(50), context)  # is not done: something is recorded
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(MemoryError, match="table 'one': this batch has more different keys than its capacity, 100"):
            record.check()
        for table, keys, score in zip((one, other), before, scores, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(keys, held(table, context), strict=True))
            assert np.array_equal(cupy.asarray(table.scores).get(), score)
            assert (cupy.asarray(table.column(0))[:, 0] == cupy.arange(table.column(0).shape[0])).all()
            assert table.index.size(context=context) == len(keys[0]) and table.counts().evictions == 0
        insert(one, cupy.arange(100, 150), context)
        record.check()
        assert set(held(one, context)[0].tolist()) == {*range(50, 150)}


def test_a_gradient_of_an_evicted_row_is_refused(cupy, context, record):
    """Though the host does not know whether any was; one of rows that stay is not."""
    with core.DynamicTable(1000, 4, eviction="lru", device=0, name="clicks") as table:
        insert(table, cupy.arange(900), context)
        table.end_step()
        stays = insert(table, cupy.arange(10), context)
        located = table.generation
        insert(table, cupy.arange(900, 1000), context)  # fits, as far as the host knows perhaps not
        insert(table, cupy.arange(1000, 1300), context)
        ones = cupy.ones((10, 4), np.float32)
        update = core.Update(
            table.table(), core.Optimizer("sgd", 1.0), [core.Gradient(stays, ones, generation=located)]
        )
        before = cupy.asarray(table.column(0)).copy()
        core.apply([update], context=context)
        record.check()
        assert (cupy.asarray(table.column(0))[:10] == before[:10] - 1).all()
        insert(table, cupy.arange(2000, 3000), context)
        update.table = table.table()
        before = cupy.asarray(table.column(0)).copy()
        core.apply([update], context=context)
        cupy.cuda.runtime.deviceSynchronize()
        with pytest.raises(RuntimeError, match="table 'clicks': a row of this gradient was erased or evicted"):
            record.check()
        assert (cupy.asarray(table.column(0)) == before).all()


def test_scores_that_are_none(cupy, context, record):
    with core.DynamicTable(10, 1, eviction="lfu", device=0, name="clicks") as table:
        insert(table, cupy.arange(10), context)
        before = cupy.asarray(table.scores).get()
        for slots, scores, message in (
            ([0, 1], [5 << 32, -1], r"table 'clicks': scores\[1\] is -1"),
            ([0, 10], [5 << 32, 1], r"table 'clicks': slot 10 is outside \[0, 10\)"),
        ):
            arguments = [cupy.asarray(np.array(each)) for each in (slots, scores)]
            table.set_scores(*arguments, context=context)
            with pytest.raises((ValueError, IndexError), match=message):
                record.check()
            assert np.array_equal(cupy.asarray(table.scores).get(), before)


def test_no_insertion_is_captured(cupy, record):
    stream = cupy.cuda.Stream(non_blocking=True)
    context = core.Context(device=0, stream=stream.ptr, empty=cupy.empty, errors=record)
    with core.DynamicTable(1000, 4, eviction="lru", device=0, initial_rows=1000, name="clicks") as table:
        keys = cupy.arange(100)
        insert(table, keys, context)
        with stream:
            stream.begin_capture()
            with pytest.raises(RuntimeError, match=r"table 'clicks': .* evict or refuse rows cannot be captured in"):
                insert(table, keys, context)
            stream.end_capture()
        assert table.index.size(context=context) == 100


def test_capacities_of_32_bits():
    with pytest.raises(ValueError, match="below 2\\^32"):
        core.DynamicTable(2**32, 1, eviction="lru", device=0)
    core.DynamicTable(2**32, 1, device=0).close()
