# SPDX-License-Identifier: Apache-2.0
"""Eviction: a table of capacity C holds C rows before one goes; which one goes, beside a model that looks at all."""

import heapq
import time

import harness
import numpy as np
import pytest
from eviction_model import STRATEGIES, Model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=5)


def insert(table, keys, context=None):
    keys = np.asarray(keys, np.int64)
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, context=context)


def held(table):
    """{key: slot}"""
    keys, slots, count = table.index.export()
    return dict(zip(keys[: count[0]].tolist(), slots[: count[0]].tolist(), strict=True))


keys_of_few = st.lists(st.integers(-20, 60), max_size=25)


class Machine(RuleBasedStateMachine):
    """A table that evicts or expires rows. `old`: the generation up to which last uses are too long ago; `turn`: the
    slot that expiry looks at next.
    """

    TIME_TO_LIVE = 640.0

    @initialize(
        strategy=st.sampled_from((*STRATEGIES, None)),
        capacity=st.integers(1, 40),
        half_life=st.sampled_from((0, 0, 3)),
        expires=st.booleans(),
    )
    def make(self, strategy, capacity, half_life, expires):
        self.options = {"initializer": UNIFORM, "name": "mine", "eviction": strategy}
        self.options["half_life"] = half_life if "lfu" in (strategy or "") else 0
        self.options["time_to_live"] = self.TIME_TO_LIVE if expires or strategy is None else 0.0
        self.table = core.DynamicTable(capacity, 2, **self.options)
        self.model = Model(strategy, capacity, self.options["half_life"])
        self.old = self.turn = self.expirations = 0

    @rule(keys=keys_of_few, ends=st.booleans())
    def use(self, keys, ends):
        if keys:
            self.expire_old()
        if self.model.insert(keys):
            slots = insert(self.table, keys)
            assert slots.tolist() == [self.model.rows[key][2] for key in keys]
            self.table.column(0)[slots, 0] = keys  # trained
        else:
            message = "this batch has more different keys than its capacity" if self.model.strategy else "holds"
            with pytest.raises(MemoryError, match=f"table 'mine'.* {message}"):
                insert(self.table, keys)
        if ends:
            self.model.step = self.model.generation
            self.table.end_step()

    def expire_old(self):
        """What a call does first that inserts keys: it looks at all slots of so few, from `turn` on."""
        num_slots = self.model.next_slot
        if not self.old or not num_slots:
            return
        first = self.turn if self.turn < num_slots else 0
        self.turn = first or num_slots
        rows = self.model.rows
        for key in sorted(rows, key=lambda key: (rows[key][2] < first, rows[key][2])):
            if rows[key][1] <= self.old:
                self.model.free.append(rows.pop(key)[2])
                self.expirations += 1

    @precondition(lambda self: self.options["time_to_live"] and self.model.generation)
    @rule(data=st.data())
    def grow_old(self, data):
        """What was last used in some generation, or before, was used long ago."""
        self.old = data.draw(st.integers(0, self.model.generation - 1))
        now = time.time_ns()
        self.table.use_times = [[self.old, now - 2 * int(self.TIME_TO_LIVE * 1e9)], [self.old + 1, now]]
        self.model.step = self.model.begun = self.model.generation

    @rule(keys=keys_of_few)
    def erase(self, keys):
        self.model.erase(keys)
        self.table.erase(np.array(keys, np.int64))

    @precondition(lambda self: len(self.model.rows) > 6)
    @rule()
    def clear(self):
        self.model.clear()
        self.table.clear()
        self.old = 0

    @rule()
    def shrink(self):
        self.model.generation += 1
        self.model.compact()
        self.table.shrink()
        self.turn = 0
        assert self.table.index.num_slots == len(self.model.rows)

    @rule()
    def dump_and_load(self):
        """Keys, rows, scores and times, as checkpoints have them, into another table."""
        keys, slots, count = self.table.index.export()
        keys, slots = keys[: count[0]], slots[: count[0]]
        rows, scores, times = self.table.column(0)[slots], self.table.scores[slots], self.table.use_times
        self.table.close()
        self.table = core.DynamicTable(self.model.capacity, 2, **self.options)
        if len(keys):
            places = insert(self.table, keys)
            self.table.column(0)[places] = rows
            self.table.set_scores(places, scores)
        self.table.use_times = times
        self.model.compact()
        self.model.generation = self.model.begun = self.model.step = self.table.generation
        self.model.epoch = self.model.newest_epoch()
        self.model.evicted = self.turn = self.expirations = 0

    @rule(first=st.integers(0, 50), n=st.integers(0, 50))
    def export(self, first, n):
        keys, slots, count = self.table.index.export(first, n)
        found = dict(zip(keys[: count[0]].tolist(), slots[: count[0]].tolist(), strict=True))
        assert found == {key: row[2] for key, row in self.model.rows.items() if first <= row[2] < first + n}

    @rule(keys=keys_of_few)
    def read(self, keys):
        self.table.read(np.array(keys, np.int64))

    @precondition(lambda self: (self.model.strategy or "").startswith("epoch"))
    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        self.model.epoch = epoch
        self.table.set_epoch(epoch)

    @precondition(lambda self: self.model.strategy == "customized")
    @rule(keys=keys_of_few, rank=st.integers(0, 9))
    def set_scores(self, keys, rank):
        scores = [rank << 32 | self.model.rows.get(key, [0, 0])[1] for key in keys]
        slots = [self.model.rows[key][2] if key in self.model.rows else -1 for key in keys]
        self.table.set_scores(np.array(slots, np.int64), np.array(scores, np.int64))
        for key in keys:
            if key in self.model.rows:
                self.model.rows[key][0] = rank

    @invariant()
    def holds_what_the_model_does(self):
        if not hasattr(self, "model"):
            return
        rows = self.model.rows
        assert self.table.index.size() == len(rows)  # and what a device's host knows of slots is up to date
        assert held(self.table) == {key: row[2] for key, row in rows.items()}
        counts = self.table.counts()
        assert (counts.evictions, counts.expirations) == (self.model.evicted, self.expirations)
        assert self.table.generation == self.model.generation
        for key, (rank, used, slot) in rows.items():
            assert self.table.scores[slot] == rank << 32 | used
            assert self.table.column(0)[slot, 0] == key

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()


def test_calls_in_any_order():
    """Random sequences of calls; Hypothesis prints the one that fails."""
    Machine.TestCase.settings = settings(stateful_step_count=25, deadline=None)
    Machine.TestCase().runTest()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_capacity_rows_are_held_before_one_goes(strategy):
    with core.DynamicTable(10_000, 4, initializer=UNIFORM, eviction=strategy) as table:
        for first in range(0, 10_000, 1000):
            insert(table, np.arange(first, first + 1000))
        assert table.index.size() == 10_000 and table.counts()[:5] == (10_000, 10_000, 0, 0, 0)
        insert(table, [10_000])
        assert table.index.size() == 10_000 and table.counts()[:5] == (10_001, 10_001, 1, 0, 0)
        assert 0 not in held(table)


def exact(strategy, batches, capacity):
    """What a table holds that looks at all its rows for each eviction."""
    rows, heap = {}, []  # {key: (rank, last use, slot)}; what stands there no more, or otherwise, is passed over
    for generation, keys in enumerate(batches):
        unique = dict.fromkeys(keys.tolist())
        new = [key for key in unique if key not in rows]
        for key in unique:
            if key in rows:
                rows[key] = (rows[key][0] + (strategy == "lfu"), generation, rows[key][2])
                heapq.heappush(heap, (*rows[key], key))
        for key in new:
            slot = len(rows)
            while len(rows) == capacity:
                *score, gone = heapq.heappop(heap)
                if rows.get(gone) == tuple(score):
                    slot = rows.pop(gone)[2]
            rows[key] = (int(strategy == "lfu"), generation, slot)
        for key in new:  # not before: what this call uses stays
            heapq.heappush(heap, (*rows[key], key))
    return rows


@pytest.mark.parametrize("zipf", (False, True), ids=("uniform", "zipf"))
@pytest.mark.parametrize("strategy", ("lru", "lfu"))
def test_the_top_rows_are_kept(strategy, zipf, pools):
    """Of ten times the capacity at least 98% of what is to be kept is kept, alike for any number of workers."""
    capacity, calls, batch = 6_400, 300, 800
    if harness.under_compute_sanitizer():
        capacity, calls, pools = capacity // 4, calls // 4, pools[:1]
    rng = np.random.default_rng((7, zipf))
    ids = 10 * capacity
    weights = 1 / np.arange(1, ids + 1) ** 0.99 if zipf else np.ones(ids)
    ends = np.cumsum(weights / weights.sum())
    batches = [np.searchsorted(ends, rng.random(batch)) * 7919 for _ in range(calls)]
    found = []
    for context in (None, *pools):
        with core.DynamicTable(capacity, 1, eviction=strategy) as table:
            for keys in batches:
                insert(table, keys, context)
                table.end_step()
            found.append(held(table))
            counts = table.counts()
    assert all(each == found[0] for each in found)
    assert counts.evictions == counts.insertions - capacity > 0
    wanted = exact(strategy, batches, capacity)
    kept = len(wanted.keys() & found[0].keys())
    print(f"{kept} of {capacity} rows, {counts.evictions} evictions")
    assert kept >= 0.98 * capacity


def test_many_rows_are_swept_by_digits():
    """More slots than one task of a sweep has, scores that are equal, and fewer rows that may go than are wanted."""
    capacity = 200_000
    with core.DynamicTable(capacity, 1, eviction="lru") as table:
        insert(table, np.arange(capacity))
        table.end_step()
        stays = np.arange(0, capacity, 2)
        insert(table, stays)
        insert(table, np.arange(capacity, capacity + 50_000))
        now = held(table)
        assert all(key in now for key in stays.tolist())
        assert sorted(set(range(capacity)) - set(now)) == list(range(1, 100_000, 2))
        # Nothing but the running step's rows is left after these: they go only then, the oldest first.
        insert(table, np.arange(capacity + 50_000, capacity + 101_000))
        now = held(table)
        assert len(now) == capacity and all(key not in now for key in range(1, capacity, 2))
        assert sorted(set(stays.tolist()) - set(now)) == stays[:1000].tolist()


def test_rows_of_the_running_step_stay():
    with core.DynamicTable(4, 1, eviction="lfu") as table:
        for _ in range(5):
            insert(table, [1, 2, 3, 4])
        table.end_step()
        insert(table, [5])  # used once, and yet not the next to go in this step
        insert(table, [6])
        assert set(held(table)) == {3, 4, 5, 6}
        gradient = core.Gradient(insert(table, [5, 6]), np.ones((2, 1), np.float32), generation=table.generation)
        core.apply([core.Update(table.table(), core.Optimizer("sgd", learning_rate=1.0), [gradient])])
        insert(table, [7])  # the step is over
        assert set(held(table)) == {3, 4, 6, 7}


def test_scores_end_no_step():
    """Rows that the running step has used stay after scores were given, unless these are of later generations."""
    with core.DynamicTable(3, 1, eviction="customized") as table:
        insert(table, [1, 2])
        table.end_step()
        slots = insert(table, [3])
        before = table.running_since
        table.set_scores(slots, table.scores[slots])  # ranked lowest, as 1 and 2 are
        table.set_scores(table.index.find([1, 2]), 9 << 32 | table.scores[table.index.find([1, 2])])
        assert table.running_since == before == 1
        insert(table, [4])
        assert set(held(table)) == {2, 3, 4}
        table.set_scores(table.index.find([2]), [9 << 32 | 7])
        assert table.running_since == table.generation == 7
        insert(table, [5])
        assert set(held(table)) == {2, 4, 5}


def test_generations_are_numbered_anew():
    """Where their numbers end: what was used last goes last, and gradients of before know whose rows they are of."""
    most, lower = 2**31 - 3, 2**30
    now = time.time_ns()
    with core.DynamicTable(5, 1, initializer=core.Initializer("constant", 0.0), eviction="lru") as table:
        slots = insert(table, [1, 2, 3, 4, 5])
        ages = np.array([5, lower - 1, most - 9, most - 3, most - 2])
        table.set_scores(slots, ages)
        table.use_times = [[lower - 1, now - 90 * 10**9], [most - 9, now - 50 * 10**9], [most - 1, now]]
        assert table.generation == most - 1
        (kept,), located = insert(table, [5]), table.generation
        assert located == most
        table.end_step()
        (fresh,) = insert(table, [6])
        assert table.generation == most - lower + 1 and set(held(table)) == {2, 3, 4, 5, 6}
        scores = table.scores[[*slots[1:], fresh]]
        assert scores.tolist() == [0, most - 9 - lower, most - 3 - lower, most - lower, most - lower + 1]
        assert table.generation_before(40.0) == most - 9 - lower and table.generation_before(80.0) == 0
        insert(table, [7, 8])
        assert set(held(table)) == {4, 5, 6, 7, 8}  # 2 and 3 had not been used for longest
        one = np.ones((1, 1), np.float32)

        def step(slot):
            gradient = core.Gradient([slot], one, generation=located)
            core.apply([core.Update(table.table(), core.Optimizer("sgd", learning_rate=1.0), [gradient])])

        step(kept)
        assert table.column(0)[kept, 0] == -1
        with pytest.raises(RuntimeError, match="a row of this gradient was erased or evicted"):
            step(fresh)  # which was another key's when the gradient's slots were located


def test_rows_used_between_steps_go_before_those_of_the_step():
    """By read_and_evict, which uses them as an assignment does: often, and before the table's first step."""
    with core.DynamicTable(4, 1, eviction="lfu") as table:
        for step in range(2):
            for _ in range(5):
                table.read_and_evict([1, 2])
            insert(table, [3, 4])
            table.read_and_evict([4])  # belongs to the step that runs
            slots, located = insert(table, [5, 6]), table.generation
            assert set(held(table)) == {3, 4, 5, 6}, step
            gradient = core.Gradient(slots, np.ones((2, 1), np.float32), generation=located)
            core.apply([core.Update(table.table(), core.Optimizer("sgd", learning_rate=1.0), [gradient])])


def test_a_gradient_of_an_evicted_row_is_refused():
    with core.DynamicTable(3, 1, eviction="lru", name="mine") as table:
        slots, located = insert(table, [1, 2, 3]), table.generation
        insert(table, [4])
        before = table.column(0).copy()
        update = core.Update(
            table.table(),
            core.Optimizer("sgd", learning_rate=1.0),
            [core.Gradient(slots, np.ones((3, 1), np.float32), generation=located)],
        )
        with pytest.raises(RuntimeError, match="table 'mine': a row of this gradient was erased or evicted"):
            core.apply([update])
        assert harness.same_bytes([table.column(0)], [before])


def test_a_row_that_comes_again_is_as_new():
    with core.DynamicTable(2, 3, initializer=UNIFORM, eviction="lru") as table:
        state = table.add_column(3, initial=0.5)
        insert(table, [1, 2])
        table.column(0)[...] = table.column(state)[...] = 9
        insert(table, [3])
        slot = insert(table, [1])[0]
        wanted = core.initialize(UNIFORM, 1, 3, keys=np.array([1]))
        assert harness.same_bytes([table.column(0)[[slot]]], [wanted])
        assert (table.column(state)[slot] == 0.5).all()


def test_a_call_that_fails_takes_evictions_back():
    """Two tables in a call: what one has evicted comes back, with its score, where the other has no room."""
    with core.DynamicTable(4, 1, eviction="lru") as one, core.DynamicTable(2, 1, name="other") as other:
        insert(one, [1, 2, 3, 4])
        one.end_step()
        one.column(0)[:, 0] = [1, 2, 3, 4]
        before, scores = held(one), one.scores.copy()
        with pytest.raises(MemoryError, match="table 'other' holds 0 of at most 2"):
            core.locate([one.table(), other.table()], np.array([7, 8, 9, 1, 2, 3]), [[3, 3]], insert=True)
        assert held(one) == before and one.counts().evictions == 0
        assert (one.scores == scores).all() and one.column(0)[:, 0].tolist() == [1, 2, 3, 4]
        insert(one, [5])
        assert held(one) == {5: 0, 2: 1, 3: 2, 4: 3}


@pytest.mark.parametrize("dtype", (np.float32, np.float16))
def test_read_and_evict(dtype):
    with core.DynamicTable(4, 2, initializer=UNIFORM, dtype=dtype, eviction="lru") as table:
        slots = insert(table, [1, 2, 3, 4])
        table.column(0)[slots] = np.array([[1], [2], [3], [4]], dtype)
        insert(table, [1])
        rows, gone, values = table.read_and_evict([9, 4, 8, 9])
        new = core.initialize(UNIFORM, 2, 2, keys=np.array([9, 8]), dtype=dtype)
        assert harness.same_bytes([rows], [np.stack([new[0], np.full(2, 4, dtype), new[1], new[0]])])
        assert gone.tolist() == [2, 3] and values.tolist() == [[2, 2], [3, 3]]
        assert set(held(table)) == {1, 4, 8, 9}
        with pytest.raises(MemoryError, match="more different keys than its capacity"):
            table.read_and_evict(np.arange(5))
        assert set(held(table)) == {1, 4, 8, 9}
        rows, gone, values = table.read_and_evict([1])
        assert rows.tolist() == [[1, 1]] and gone.size == values.size == 0
    with core.DynamicTable(4, 2) as table:
        assert [array.tolist() for array in table.read_and_evict([5])] == [[[0, 0]], [], []]


@pytest.mark.parametrize("dtype", (np.float32, np.float16))
@pytest.mark.parametrize("dimension", (3, 64))
@pytest.mark.parametrize("eviction", (None, "lru"))
def test_find_or_insert(dtype, dimension, eviction):
    with core.DynamicTable(1000, dimension, initializer=UNIFORM, dtype=dtype, eviction=eviction) as table:
        state = table.add_column(2, initial=0.5)
        known = np.arange(0, 900, 3)
        slots = insert(table, known)
        table.column(0)[slots] = 7
        table.column(state)[slots] = 3
        asked = np.random.default_rng(5).integers(0, 300, 2000)
        rows = table.find_or_insert(asked)
        made = core.initialize(UNIFORM, len(asked), dimension, keys=asked, dtype=dtype)
        expected = np.where((asked % 3 == 0)[:, None], np.full_like(made, 7), made)
        assert harness.same_bytes([rows, table.read(asked)], [expected, expected])
        assert set(held(table)) == {*known.tolist(), *asked.tolist()}
        states = table.column(state)[table.index.find(asked)]
        assert (states == np.where(asked % 3 == 0, 3, 0.5)[:, None]).all()
        assert table.find_or_insert([]).shape == (0, dimension)
        if eviction is None:
            with pytest.raises(MemoryError, match="at most 1000"):
                table.find_or_insert(np.arange(2000, 3000))
        else:
            assert (table.find_or_insert(np.arange(2000, 3000)) == table.read(np.arange(2000, 3000))).all()


def test_scores_that_were_kept():
    with core.DynamicTable(4, 1, eviction="lfu") as table, core.DynamicTable(4, 1, eviction="lfu") as loaded:
        for keys in ([1, 2, 3, 4], [1, 2, 4], [1, 4], [4, 1]):
            insert(table, keys)
        keys, slots, _ = table.index.export()
        insert(loaded, keys[::-1].copy())
        loaded.set_scores(np.append(loaded.index.find(keys), -1), np.append(table.scores[slots], 5 << 32))
        for each in (table, loaded):
            insert(each, [5])
            each.end_step()
            insert(each, [6])
        assert set(held(table)) == set(held(loaded)) == {1, 2, 4, 6}
        for scores in ([-1], [2**63 - 1], [2**31 - 1]):
            before = loaded.scores.copy()
            with pytest.raises(ValueError, match=r"scores\[0\] is"):
                loaded.set_scores([1], scores)
            assert (loaded.scores == before).all()
        with pytest.raises(IndexError, match=r"slot 4 is outside \[0, 4\)"):
            loaded.set_scores([0, 4], [1, 1])
        assert (loaded.scores == before).all()
        (slot,) = loaded.erase([6])
        loaded.set_scores([slot], [1])
        assert loaded.scores[slot] == 2**63 - 1
    with core.DynamicTable(4, 1) as table:
        assert table.scores.size == 0
        with pytest.raises(ValueError, match="evicts nothing"):
            table.set_scores([1], [1])


@pytest.mark.parametrize(("strategy", "first"), [("epoch_lru", 5), ("epoch_lfu", (5 << 20) + 1)])
def test_a_loaded_table_goes_on_in_the_newest_epoch(strategy, first):
    with core.DynamicTable(4, 1, eviction=strategy) as table, core.DynamicTable(4, 1, eviction=strategy) as loaded:
        insert(table, [1])
        table.set_epoch(5)
        insert(table, [2])
        keys, slots, _ = table.index.export()

        def rank_of_new(key):
            (slot,) = insert(loaded, [key])
            return loaded.scores[slot] >> 32

        loaded.set_epoch(3)
        loaded.set_scores(insert(loaded, keys), table.scores[slots])
        assert rank_of_new(9) == first
        loaded.set_epoch(7)
        loaded.set_scores(loaded.index.find(keys), table.scores[slots])
        assert rank_of_new(8) == first + (2 if strategy == "epoch_lru" else 2 << 20)
        loaded.set_epoch(1)  # a user may
        assert rank_of_new(7) < first


def test_bad_arguments():
    with pytest.raises(ValueError, match="eviction must be one of"):
        core.DynamicTable(4, 1, eviction="random")
    with pytest.raises(ValueError, match="half_life is -1"):
        core.DynamicTable(4, 1, eviction="lfu", half_life=-1)
    with core.DynamicTable(4, 1, eviction="epoch_lru") as table, pytest.raises(ValueError, match="epoch is -1"):
        table.set_epoch(-1)
