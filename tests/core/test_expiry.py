# SPDX-License-Identifier: Apache-2.0
"""Expiry: rows that nothing has used for a while go, whether the table is full or not."""

import itertools
import time

import numpy as np
import pytest

from sparse_operation_kit import core


def insert(table, keys):
    keys = np.asarray(keys, np.int64)
    return core.locate([table.table()], keys, [[len(keys)]], insert=True)


def held(table):
    keys, _, count = table.index.export()
    return set(keys[: count[0]].tolist())


@pytest.mark.parametrize("eviction", (None, "lru", "lfu"))
def test_rows_that_are_not_used_go(eviction):
    now = time.time_ns()
    with core.DynamicTable(100, 1, eviction=eviction, time_to_live=640.0) as table:
        insert(table, [1, 2, 3])
        insert(table, [2])
        table.read([1])  # no use
        table.use_times = [[1, now - 10**12], [2, now]]  # the first call was long ago
        insert(table, [2])
        assert held(table) == {2} and table.counts().expirations == 2
        insert(table, [1])
        assert held(table) == {1, 2} and table.counts().evictions == 0


def test_a_table_without_a_policy_for_when_it_is_full_still_refuses():
    with core.DynamicTable(2, 1, time_to_live=100.0, name="mine") as table:
        insert(table, [1, 2])
        with pytest.raises(MemoryError, match="table 'mine' holds 2 of at most 2"):
            insert(table, [3])
        assert held(table) == {1, 2}


def test_every_row_is_looked_at_in_turn():
    """Calls of one key look at 1024 rows each."""
    with core.DynamicTable(10_000, 1, time_to_live=0.05) as table:
        insert(table, np.arange(10_000))
        time.sleep(0.1)
        insert(table, [0])  # too early a record of the time for what came first
        time.sleep(0.1)
        sizes = []
        for _ in range(12):
            insert(table, [0])
            sizes.append(table.index.size())
        assert all(before - after <= 1024 for before, after in itertools.pairwise(sizes))
        assert sizes[-1] == 1 and held(table) == {0}


def test_rows_go_while_a_table_grows():
    """Each call brings more rows: the old ones come in turn all the same."""
    now = time.time_ns()
    with core.DynamicTable(100_000, 1, time_to_live=640.0) as table:
        insert(table, [-1])
        insert(table, np.arange(5000))
        for last, calls in ((1, range(1, 7)), (2, range(7, 17))):
            table.use_times = [[last, now - 10**12], [last + 1, now]]
            for call in calls:
                insert(table, np.arange(1000) + 10_000 * call)
        assert held(table) == {*(np.arange(1, 17)[:, None] * 10_000 + np.arange(1000)).ravel().tolist()}
        assert table.counts().expirations == 5001


def test_a_gradient_of_a_row_that_expired_is_refused():
    with core.DynamicTable(8, 1, time_to_live=0.05) as table:
        slots, located = insert(table, [1]), table.generation
        time.sleep(0.1)
        insert(table, [2])
        time.sleep(0.1)
        insert(table, [2])
        assert held(table) == {2}
        gradient = core.Gradient(slots, np.ones((1, 1), np.float32), generation=located)
        with pytest.raises(RuntimeError, match="a row of this gradient was erased or evicted"):
            core.apply([core.Update(table.table(), core.Optimizer("sgd", learning_rate=1.0), [gradient])])


def test_the_generation_before_some_seconds():
    with core.DynamicTable(8, 1, time_to_live=6.4) as table:
        assert table.generation_before(0.0) == 0
        insert(table, [1])
        assert table.generation_before(0.0) == 1
        time.sleep(1.0)
        insert(table, [2])
        assert table.generation_before(0.9) == 1 and table.generation_before(10.0) == 0
        last_use = table.scores & 0xFFFFFFFF
        assert (last_use <= table.generation_before(0.9)).tolist() == [True, False]


@pytest.mark.parametrize("seconds", (-1.0, float("inf"), float("nan")))
def test_wrong_times(seconds):
    with pytest.raises(ValueError, match=r"config\.time_to_live is "):
        core.DynamicTable(8, 1, time_to_live=seconds)
