# SPDX-License-Identifier: Apache-2.0
"""Admission: which new keys get rows; what the others read, and what becomes of their gradients."""

import harness
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=5)
SGD = core.Optimizer("sgd", learning_rate=1.0)


def train(table, keys, context=None, **options):
    """Slots, as a lookup that trains has them."""
    keys = np.asarray(keys, np.int64)
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, admit=True, context=context, **options)


def step(table, slots, generation=None):
    """Takes 1 from the rows."""
    gradient = np.ones((len(slots), table.dimension), np.float32)
    generation = table.generation if generation is None else generation
    core.apply([core.Update(table.table(), SGD, [core.Gradient(slots, gradient, generation=generation)])])


def held(table):
    """{key: slot}"""
    keys, slots, count = table.index.export()
    return dict(zip(keys[: count[0]].tolist(), slots[: count[0]].tolist(), strict=True))


def initial(keys, dimension=2):
    return core.initialize(UNIFORM, len(keys), dimension, keys=np.asarray(keys, np.int64))


class Model:
    """Keys with rows, {key: value of the row's first number}; and those that wait, {key: [calls, last call, slot]}."""

    def __init__(self, threshold, max_candidates):
        self.threshold, self.max_candidates = threshold, max_candidates
        self.rows, self.waits, self.free = {}, {}, list(range(max_candidates))[::-1]
        self.generation = self.refusals = 0

    def train(self, keys):
        """Those that are guests."""
        self.generation += 1
        missing = [key for key in keys if key not in self.rows]
        guests = set()
        counted = dict.fromkeys(missing[: self.max_candidates])
        for key in counted:
            if key in self.waits:
                self.waits[key][0] += 1
                self.waits[key][1] = self.generation
        for key in counted:
            if key in self.waits:
                continue
            if len(self.waits) == self.max_candidates:
                others = [other for other in self.waits if self.waits[other][1] < self.generation]
                self.free.append(self.waits.pop(min(others, key=self.waits.__getitem__))[2])
            self.waits[key] = [1, self.generation, self.free.pop()]
        for key in dict.fromkeys(missing):
            if key in self.waits and self.waits[key][0] >= self.threshold:
                self.free.append(self.waits.pop(key)[2])
                self.rows[key] = initial([key])[0, 0]
            else:
                guests.add(key)
        self.refusals += len(guests)
        return guests


class Machine(RuleBasedStateMachine):
    @initialize(threshold=st.integers(2, 4), max_candidates=st.integers(1, 12), evicts=st.booleans())
    def make(self, threshold, max_candidates, evicts):
        admission = core.Admission(threshold, max_candidates)
        eviction = "lru" if evicts else None
        self.table = core.DynamicTable(64, 2, initializer=UNIFORM, admission=admission, eviction=eviction)
        self.model = Model(threshold, max_candidates)

    @rule(keys=st.lists(st.integers(-4, 15), max_size=20), steps=st.booleans())
    def train(self, keys, steps):
        if not keys:
            return
        guests = self.model.train(keys)
        slots = train(self.table, keys)
        now = held(self.table)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            assert (key in guests) == (key not in now)
            assert now.get(key, slot) == slot
        assert len(set(slots.tolist())) == len(set(keys))
        rows = [initial([key])[0, 0] if key in guests else self.model.rows[key] for key in keys]
        assert np.array_equal(self.table.column(0)[slots, 0], np.array(rows, np.float32))
        if steps:
            step(self.table, np.array([slots[keys.index(key)] for key in set(keys)]))
            for key in set(keys) - guests:
                self.model.rows[key] -= np.float32(1)

    @rule(keys=st.lists(st.integers(-4, 15), max_size=5))
    def insert(self, keys):
        """Without admission, as assign does."""
        if keys:
            self.model.generation += 1
            core.locate([self.table.table()], np.array(keys, np.int64), [[len(keys)]], insert=True)
        for key in keys:
            self.model.rows.setdefault(key, initial([key])[0, 0])

    @rule(keys=st.lists(st.integers(-4, 15), max_size=5))
    def erase(self, keys):
        self.model.generation += 1
        self.table.erase(np.array(keys, np.int64))
        for key in keys:
            self.model.rows.pop(key, None)

    @rule()
    def clear(self):
        self.model.generation += 1
        self.table.clear()
        self.model.rows.clear()
        self.model.waits.clear()
        self.model.free = list(range(self.model.max_candidates))[::-1]

    @invariant()
    def holds_what_the_model_does(self):
        if not hasattr(self, "model"):
            return
        assert self.table.generation == self.model.generation
        assert self.table.counts().refusals == self.model.refusals
        assert self.table.index.size() == len(self.model.rows)
        now = held(self.table)
        assert now.keys() == self.model.rows.keys()
        for key, value in self.model.rows.items():
            assert self.table.column(0)[now[key], 0] == value

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=25)


def test_a_key_gets_a_row_in_the_call_of_the_threshold():
    with core.DynamicTable(8, 2, initializer=UNIFORM, admission=core.Admission(3)) as table:
        for call in range(3):
            slots = train(table, [7, 7, -7][: 3 - call % 2])  # often in a call counts once
            assert np.array_equal(table.column(0)[slots], initial([7, 7, -7][: 3 - call % 2]))
            assert set(held(table)) == ({7} if call == 2 else set())
        assert table.counts()[:4] == (8, 1, 0, 4)
        assert np.array_equal(table.read([-7]), initial([-7]))


def test_what_a_step_makes_of_guests_is_lost_and_their_slots_are_used_again():
    admission = core.Admission(filter_ratio=0.0)
    with core.DynamicTable(4, 2, initializer=UNIFORM, admission=admission, eviction="lru") as table:
        state = table.add_column(2, initial=0.5)
        train(table, [1, 2])  # without the filter
        table.end_step()
        for _ in range(10):
            slots = train(table, [5, 1, 6], filter=True)
            assert np.array_equal(table.column(0)[slots[[0, 2]]], initial([5, 6]))
            assert (table.column(state)[slots[[0, 2]]] == 0.5).all()
            table.column(state)[slots[[0, 2]]] = 9
            step(table, slots)
        assert set(held(table)) == {1, 2}
        assert table.index.size() == 2 and table.index.num_slots == 4  # exact after size, on a device too
        assert np.array_equal(table.read([1, 2]), initial([1, 2]) - np.array([[10], [0]], np.float32))
        # A full table gives up nothing for guests, and has room for them.
        train(table, [3, 4])
        train(table, np.arange(100, 150), filter=True)
        assert set(held(table)) == {1, 2, 3, 4} and table.counts().evictions == 0
        table.end_step()
        train(table, [7])
        assert set(held(table)) == {1, 3, 4, 7}


def test_guests_of_several_calls_of_a_step():
    with core.DynamicTable(8, 2, initializer=UNIFORM, admission=core.Admission(2)) as table:
        first, located = train(table, [1, 2]), table.generation
        second = train(table, [2, 3])  # 2 has a row now
        assert set(held(table)) == {2} and len({*first.tolist(), *second.tolist()}) == 4
        step(table, first, located)
        step(table, second)
        assert np.array_equal(table.read([2]), initial([2]) - 1)
        train(table, [4])  # the step is over
        with pytest.raises(RuntimeError, match="a row of this gradient was erased or evicted"):
            step(table, first, located)


def test_steps_that_are_never_taken_leave_no_guests():
    with core.DynamicTable(8, 1, admission=core.Admission(1_000_000)) as table:
        most = 1 << 20
        for first in range(3):
            train(table, np.arange(first * 700_000, (first + 1) * 700_000))
        assert table.column(0).shape[0] <= most + 8 and table.index.size() == 0
        with pytest.raises(MemoryError, match="more different keys that get no row than there are slots for"):
            train(table, np.arange(most + 9))
        assert table.index.size() == 0
        slots = train(table, [1])
        assert table.column(0)[slots].tolist() == [[0]]


@pytest.mark.parametrize("ratio", (0.0, 0.25, 0.75, 1.0))
def test_the_filter_draws_by_seed_key_and_generation(ratio, pools):
    keys = np.arange(20_000)
    found = []
    for context, seed in ((None, 5), *((pool, 5) for pool in pools), (None, 6)):
        start = core.Initializer("uniform", seed=seed)
        with core.DynamicTable(40_000, 1, initializer=start, admission=core.Admission(filter_ratio=ratio)) as table:
            train(table, keys, context, filter=True)
            once = set(held(table))
            table.end_step()
            train(table, keys, context, filter=True)
            found.append((once, set(held(table))))
    assert all(each == found[0] for each in found[:-1])
    assert (found[0] == found[-1]) == (ratio in (0.0, 1.0))
    assert abs(len(found[0][0]) / 20_000 - ratio) < 0.02
    assert abs(len(found[0][1]) / 20_000 - (1 - (1 - ratio) ** 2)) < 0.02


def test_candidates_beyond_their_number_go():
    with core.DynamicTable(8, 1, admission=core.Admission(3, max_candidates=2)) as table:
        for key in (1, 1, 2, 3, 1):  # 3 took the place of 2, which had been asked for less often than 1
            train(table, [key])
        assert set(held(table)) == {1}
        train(table, [2])
        train(table, [2])
        train(table, [2])
        assert set(held(table)) == {1, 2}


def test_candidates_that_were_kept():
    with (
        core.DynamicTable(8, 1, admission=core.Admission(3)) as table,
        core.DynamicTable(8, 1, admission=core.Admission(3)) as loaded,
        core.DynamicTable(8, 1) as other,
    ):
        for keys in ([1, 2], [2, 3], [1, 4], [1, 5]):
            train(table, keys)
        assert set(held(table)) == {1} and other.candidates is None
        keys, slots, count = table.candidates.index.export()
        keys, slots = keys[: count[0]], slots[: count[0]]
        scores = table.candidates.scores[slots]
        assert dict(zip(keys.tolist(), (scores >> 32).tolist(), strict=True)) == {2: 2, 3: 1, 4: 1, 5: 1}
        places = core.locate([loaded.candidates.table()], keys, [[len(keys)]], insert=True)
        loaded.candidates.set_scores(places, scores)
        for each in (table, loaded):
            train(each, [2, 3])
            assert 2 in held(each) and 3 not in held(each)
            train(each, [3])
            assert {2, 3} <= set(held(each)) and each.num_bytes > each.candidates.num_bytes > 0


def test_several_tables_and_requests_of_a_call():
    """What two ranks ask for counts once; tables that admit all are none the wiser."""
    with (
        core.DynamicTable(8, 1, initializer=UNIFORM, admission=core.Admission(2)) as one,
        core.DynamicTable(8, 1, initializer=UNIFORM) as other,
    ):
        tables = [one.table(), other.table()]
        for call in range(2):
            slots = core.locate(tables, np.array([4, 5, 4, 4, 7, 4]), [[2, 1], [2, 1]], insert=True, admit=True)
            assert slots[0] == slots[3] and len(set(slots[[0, 1, 4]].tolist())) == 3 and slots[2] == slots[5] == 0
            assert set(held(one)) == ({4, 5, 7} if call == 1 else set())
            assert set(held(other)) == {4}


def test_what_fails_changes_nothing():
    with (
        core.DynamicTable(8, 1, initializer=UNIFORM, admission=core.Admission(2)) as one,
        core.DynamicTable(2, 1, name="other") as other,
    ):
        train(one, [1, 2])
        one.end_step()
        train(one, [2])
        before = held(one), one.column(0).copy()
        with pytest.raises(MemoryError, match="table 'other' holds 0 of at most 2"):
            core.locate([one.table(), other.table()], np.array([1, 2, 9, 1, 2, 3]), [[3, 3]], insert=True, admit=True)
        assert held(one) == before[0] and harness.same_bytes([one.column(0)[:1]], [before[1][:1]])
        assert one.counts().refusals == 2 and other.index.size() == 0
        slots = train(one, [9, 10])
        assert np.array_equal(one.column(0)[slots], initial([9, 10], 1))


@pytest.mark.parametrize(
    ("field", "value"), (("threshold", -1), ("threshold", 2**31), ("max_candidates", -1), ("filter_ratio", 1.5))
)
def test_wrong_numbers(field, value):
    with pytest.raises(ValueError, match=f"config.admission.{field} is "):
        core.DynamicTable(8, 1, admission=core.Admission(**{field: value}))
