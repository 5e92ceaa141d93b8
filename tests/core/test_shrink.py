# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables that give memory back, and what is kept of times: what a table goes on from after a restore."""

import time

import harness
import numpy as np
import pytest

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=11)
SECOND = 10**9


def insert(table, keys, **options):
    keys = np.asarray(keys, np.int64)
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, **options)


def content(table, columns):
    """{key: (score, values)}"""
    keys, slots, count = table.index.export()
    keys, slots = keys[: count[0]], slots[: count[0]]
    scores = table.scores[slots].tolist() if len(table.scores) else [None] * len(slots)
    values = [np.array(table.column(number))[slots] for number in range(columns)]
    return {
        key: (score, *(v[i].tobytes() for v in values)) for i, (key, score) in enumerate(zip(keys, scores, strict=True))
    }


@pytest.mark.parametrize("eviction", (None, "lfu"))
@pytest.mark.parametrize("dtype", (np.float32, np.float16))
def test_memory_comes_back(eviction, dtype):
    rng = np.random.default_rng(5)
    keys = rng.permutation(60_000) * 0x1E3779B97F4A7C15
    with core.DynamicTable(1 << 20, 33, dtype=dtype, initializer=UNIFORM, eviction=eviction) as table:
        table.add_column(2, initial=0.5)
        slots = insert(table, keys)
        table.column(1)[:] = rng.random((60_000, 2))
        insert(table, keys[:700])  # used more often
        staying = np.r_[keys[:1000], keys[-500:]]
        table.erase(keys[1000:-500])
        table.erase([7])
        before, counts = content(table, 2), table.counts()
        located, full = table.generation, table.num_bytes
        freed = table.shrink()
        kept = getattr(table, "page", 0)  # of the rows' memory: on a device one of its pages at least
        assert freed > 0.9 * 60_000 * 33 * table.dtype.itemsize - kept and table.num_bytes == full - freed
        assert content(table, 2) == before and table.counts() == counts
        assert table.index.num_slots == table.index.size() == 1500
        if eviction:  # what it gives up first is not another
            assert table.scores.max() >> 32 == 2
        # A row that was located before is somewhere else.
        gradient = core.Gradient(slots[:1], np.ones((1, 33), np.float32), generation=located)
        with pytest.raises(RuntimeError, match="erased or evicted after the lookup"):
            core.apply([core.Update(table.table(), core.Optimizer("sgd", learning_rate=1.0), [gradient])])
        insert(table, staying)  # held
        assert table.index.size() == table.index.num_slots == 1500
        again = insert(table, keys[1000:30_000])
        assert sorted(again.tolist()) == list(range(1500, 30_500))
        fresh = core.initialize(UNIFORM, 29_000, 33, keys=keys[1000:30_000], dtype=dtype)
        assert np.array(table.column(0))[again].tobytes() == fresh.tobytes()
        assert (np.array(table.column(1))[again] == 0.5).all()
        assert table.counts().insertions == counts.insertions + 29_000


def test_an_empty_table_and_one_that_is_full():
    with core.DynamicTable(100, 2, initial_rows=100, initializer=UNIFORM) as table:
        table.shrink()
        insert(table, range(100))
        rows = np.array(table.column(0))
        table.shrink()
        assert np.array_equal(table.column(0), rows)
        with pytest.raises(MemoryError, match="holds 100 of at most 100"):
            insert(table, [100])
        table.clear()
        assert table.shrink() >= 0 and table.index.num_slots == 0
        assert insert(table, [5, 6]).tolist() == [0, 1]


def test_a_table_that_evicts_and_admits_goes_on():
    """It gives up the rows that it would have given up, and counts on for those that wait."""
    results = []
    capacity, steps, evictions = (16, 600, 10) if harness.under_compute_sanitizer() else (64, 3000, 50)
    for shrinks in (False, True):
        with core.DynamicTable(capacity, 1, eviction="lfu", admission=core.Admission(2)) as table:
            rng = np.random.default_rng(3)
            for step in range(steps):
                insert(table, np.minimum(rng.zipf(1.3, 1), 300), admit=True)  # one: of equal scores the lower slot goes
                table.end_step()
                if step % 170 == 50:
                    table.erase(rng.integers(1, 300, 20))
                    if shrinks:
                        table.shrink()
            ranks = {key: score >> 32 for key, (score,) in content(table, 0).items()}
            results.append((ranks, table.counts()))
    assert results[0] == results[1] and results[0][1].evictions > evictions and results[0][1].refusals > 50


def test_times_of_generations_are_kept():
    now = time.time_ns()
    with core.DynamicTable(8, 1, eviction="lru", time_to_live=64.0) as table:
        assert table.use_times.shape == (0, 2)
        slots = insert(table, [1, 2, 3])
        ((generation, began),) = table.use_times.tolist()
        assert generation == 1 and now <= began <= time.time_ns()
        # Rows of another table that were used 100, 50 and 0 seconds ago.
        table.set_scores(slots, [5, 9, 12])
        table.use_times = [[5, now - 100 * SECOND], [9, now - 50 * SECOND], [12, now]]
        assert table.generation_before(99.0) == 5 and table.generation_before(49.0) == 9
        assert table.generation_before(1000.0) == 0
        insert(table, [4])
        assert sorted(content(table, 0)) == [2, 3, 4] and table.counts().expirations == 1
        assert table.use_times[-1, 0] == table.generation
        table.clear()
        assert len(table.use_times) == 0


def test_times_closer_than_a_64th_of_the_life_are_one_and_no_row_becomes_older():
    now = time.time_ns()
    with core.DynamicTable(100, 1, time_to_live=64.0) as table:
        times = np.array([[i, now - (100 - i) * SECOND // 10] for i in range(100)])
        table.use_times = times
        kept = table.use_times
        assert len(kept) == 11 and np.isin(kept[:, 0], times[:, 0]).all()
        for generation, at in times.tolist():
            later = kept[kept[:, 0] >= generation][0]
            assert 0 <= later[1] - at <= SECOND
        table.use_times = kept
        assert np.array_equal(table.use_times, kept)


def test_a_pause_makes_no_row_younger_that_was_used_before_it():
    now = time.time_ns()
    with core.DynamicTable(100, 1, time_to_live=64.0) as table:
        table.use_times = [[1, now - 60 * SECOND], [2, now - 60 * SECOND + 5], [9, now - 2 * SECOND], [10, now]]
        assert table.generation_before(50.0) == 2 and table.generation_before(1.0) == 9
        assert table.use_times[:, 0].tolist() == [1, 2, 9, 10]


@pytest.mark.parametrize("ahead", (-50, 0, 50))
def test_a_table_goes_on_from_times_of_another(ahead):
    """Whose rows may all have gone, and whose clock may be ahead."""
    latest = time.time_ns() + ahead * SECOND
    with core.DynamicTable(8, 1, eviction="lru") as table, core.DynamicTable(8, 1, eviction="lru") as copy:
        table.use_times = [[5, latest - SECOND], [9, latest]]
        for key in (1, 2):
            insert(table, [key])
            copy.use_times = table.use_times
            assert np.array_equal(copy.use_times, table.use_times)
            assert table.use_times[-1, 0] == table.generation == 8 + key + 1


@pytest.mark.parametrize("times", ([[2, 5], [2, 6]], [[2, 5], [3, 4]], [[-1, 5]], [[1, 5], [2**31 - 2, 6]]))
def test_wrong_times(times):
    with core.DynamicTable(8, 1, eviction="lru") as table:
        table.use_times = [[1, 1]]
        with pytest.raises(ValueError, match=r"times\[\d\] (does not ascend|is of generation)"):
            table.use_times = times
        assert table.use_times.tolist() == [[1, 1]]
    with (
        core.DynamicTable(8, 1, name="plain") as table,
        pytest.raises(ValueError, match="'plain' keeps no last uses"),
    ):
        table.use_times = [[1, 1]]
