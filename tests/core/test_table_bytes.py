# SPDX-License-Identifier: Apache-2.0
"""What a dynamic table on the CPU takes beside rows and states, and that churn takes no more.

docs/DYNAMIC_TABLES.md, "Memory", has these numbers.
"""

import numpy as np
import pytest
import range_memory

from sparse_operation_kit import core

GROWS, FULL, MADE_FULL = 43, 41, 39
"""Bytes a row, all told, while a table with scores grows, at capacity, and where it was made for all of it."""
SCORE = 8
AHEAD = 2 << 20
"""Backed ahead in each array at most; an eighth of it where that is less."""
MEMORY = range_memory.Host()


def insert(table, keys, **options):
    slots = core.locate([table.table()], keys, [[len(keys)]], insert=True, **options)
    table.column(0)[slots] = 1
    table.end_step()
    return slots


def make(capacity, dimension, eviction, states=1, **options):
    """(table, bytes of a row and its states, bytes beside them where it is full, while it grows, made full)"""
    table = core.DynamicTable(capacity, dimension, eviction=eviction, **options)
    for _ in range(states):
        table.add_column(dimension)
    without = 0 if eviction else SCORE
    return table, 4 * dimension * (1 + states), *(number - without for number in (FULL, GROWS, MADE_FULL))


def ahead(rows, row_bytes, states):
    """What is backed and not in use: of entries, keys, generations, scores and columns, besides pages."""
    sizes = [rows * each for each in (23, 8, 4, 8, *[row_bytes // (1 + states)] * (1 + states))]
    return sum(min(size / 8, AHEAD) + MEMORY.page for size in sizes)


@pytest.mark.parametrize("eviction", (None, "lru"))
@pytest.mark.parametrize("dimension", (1, 16, 64))
def test_a_table_that_grows(dimension, eviction):
    """Of the default capacity, from 100,000 rows on, at every step."""
    batch, before = 4000, MEMORY.used()
    table, row_bytes, _, grows, _ = make(1 << 26, dimension, eviction)
    with table:
        most = 0
        for rows in range(batch, 600_000, batch):
            insert(table, np.arange(rows - batch, rows) * 7919)
            if rows < 100_000:
                continue
            allowed = (rows + batch) * (row_bytes + grows) + ahead(rows, row_bytes, 1)
            assert table.num_bytes <= allowed
            assert MEMORY.used() - before <= allowed + (4 << 20)
            most = max(most, table.num_bytes - rows * row_bytes)
        assert table.index.size() == rows
        assert most > 30 * rows  # it has counted something


@pytest.mark.parametrize("made_full", (False, True))
@pytest.mark.parametrize("eviction", (None, "lru"))
@pytest.mark.parametrize("dimension", (1, 64))
@pytest.mark.parametrize("capacity", (455_808, 455_809))
def test_a_table_at_capacity(capacity, dimension, eviction, made_full):
    """A capacity that fills the index, and one of a row more, which leaves most of it empty."""
    options = {"initial_rows": capacity} if made_full else {}
    table, row_bytes, full, _, least = make(capacity, dimension, eviction, **options)
    with table:
        for first in range(0, capacity, 5000):
            insert(table, np.arange(first, min(first + 5000, capacity)) * 7919)
        for first in range(0, 100_000 if eviction else 0, 5000):
            insert(table, np.arange(first, first + 5000) - 10**9)
        assert table.index.size() == capacity
        assert table.num_bytes <= capacity * (row_bytes + (least if made_full else full)) + 8 * MEMORY.page


def test_guests_and_candidates():
    """Guests have slots of their own; candidates are rows of one column."""
    capacity, waiting, batch = 100_000, 50_000, 5000
    admission = core.Admission(2, max_candidates=waiting)
    table, row_bytes, full, _, _ = make(capacity, 16, "lru", admission=admission)
    with table:
        for first in range(0, 2 * capacity, batch):
            for _ in range(2):
                insert(table, np.arange(first, first + batch), admit=True)
        for first in range(0, 4 * waiting, batch):
            insert(table, np.arange(first, first + batch) - 10**9, admit=True)
        candidates = table.candidates
        assert table.index.size() == capacity and candidates.index.size() == waiting
        assert candidates.num_bytes <= waiting * (4 + FULL) + 8 * MEMORY.page
        slots = capacity + 2 * batch
        own = table.num_bytes - candidates.num_bytes
        assert own <= slots * (row_bytes + full) + ahead(slots, row_bytes, 1)


@pytest.mark.parametrize("eviction", ("lru", pytest.param("lfu", marks=pytest.mark.slow)))
def test_ten_thousand_steps_take_no_more_memory(eviction):
    """Training steps of Adam on keys that drift; rows are evicted, and some are erased."""
    capacity, batch, rng = 4000, 150, np.random.default_rng(3)
    adam = core.Optimizer("adam", learning_rate=0.01, beta1=0.9, beta2=0.99, epsilon=1e-7)
    with core.DynamicTable(capacity, 8, eviction=eviction) as table:
        states = [table.add_column(8) for _ in range(2)]
        gradient = np.ones((batch, 8), np.float32)
        for step in range(10_000):
            keys = step * 50 + rng.integers(0, 20_000, batch)
            slots = core.locate([table.table()], keys, [[batch]], insert=True)
            given = core.Gradient(slots, gradient, generation=table.generation)
            core.apply([core.Update(table.table(), adam, [given], [table.column(number) for number in states])])
            if step % 10 == 9:
                table.erase(keys[:20])
            if step == 1000:
                num_bytes, used = table.num_bytes, MEMORY.used()
        assert table.num_bytes == num_bytes and MEMORY.used() - used < 1 << 20
        assert table.counts().evictions > 100 * capacity and table.index.num_slots == capacity
