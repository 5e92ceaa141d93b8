# SPDX-License-Identifier: Apache-2.0
"""Hash indices against a dictionary: slots, free slots, growth, errors that change nothing, several indices a call."""

import itertools
import os

import hash_keys
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparse_operation_kit import core

COLLIDING = hash_keys.of_one_bucket(60)


class Model:
    """What an index is: a dictionary, and which slots are free."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.slots, self.free, self.num_slots = {}, [], 0

    def find(self, keys):
        return [self.slots.get(int(key), -1) for key in keys]

    def find_or_insert(self, keys):
        """(slots, is_new), or None where there is no room."""
        keys = [int(key) for key in keys]
        if len(self.slots.keys() | set(keys)) > self.capacity:
            return None
        slots, are_new = [], []
        for key in keys:
            are_new.append(int(key not in self.slots))
            if key not in self.slots:
                if not self.free:
                    self.free.append(self.num_slots)
                    self.num_slots += 1
                self.slots[key] = self.free.pop()
            slots.append(self.slots[key])
        return slots, are_new

    def erase(self, keys):
        slots = [self.slots.pop(int(key), -1) for key in keys]
        self.free += [slot for slot in slots if slot >= 0]
        return slots

    def clear(self):
        self.slots, self.free, self.num_slots = {}, [], 0


def exported(index, *span):
    keys, slots, count = index.export(*span)
    return keys[: count[0]], slots[: count[0]]


def check(index, model):
    """That the index holds what the model does, and gives out the same slots."""
    assert index.size() == len(model.slots)
    keys, slots = exported(index)
    assert np.array_equal(slots, sorted(model.slots.values()))
    assert dict(zip(keys.tolist(), slots.tolist(), strict=True)) == model.slots


MOST_ROWS = int(os.environ.get("SOK_TEST_MOST_ROWS", 2**40))
"""Fewer where there are not so many addresses."""

keys_of_any_kind = st.lists(
    st.one_of(
        st.sampled_from(hash_keys.EXTREMES),
        st.integers(-20, 20),
        st.sampled_from(COLLIDING.tolist()),
        st.integers(-(2**63), 2**63 - 1),
    ),
    max_size=40,
).map(lambda keys: np.array(keys, np.int64))


class Machine(RuleBasedStateMachine):
    """Two indices and their models; calls with one of them, with both, and with one of them twice."""

    device = None

    @initialize(capacities=st.tuples(st.integers(1, 60), st.integers(1, MOST_ROWS)), rows=st.integers(0, 1))
    def make(self, capacities, rows):
        self.indices = [core.HashIndex(c, initial_rows=rows, device=self.device, name=f"t{c}") for c in capacities]
        self.models = [Model(capacity) for capacity in capacities]

    @rule(requests=st.lists(st.tuples(st.integers(0, 1), keys_of_any_kind), max_size=3))
    def insert(self, requests):
        calls = [core.HashRequest(self.indices[t], keys) for t, keys in requests]
        wanted = [set(model.slots) for model in self.models]
        for t, keys in requests:
            wanted[t] |= set(keys.tolist())
        if any(len(each) > model.capacity for each, model in zip(wanted, self.models, strict=True)):
            with pytest.raises(MemoryError, match="no room"):
                core.find_or_insert(calls)
            return
        found = core.find_or_insert(calls)
        for (t, keys), (slots, are_new) in zip(requests, found, strict=True):
            expected, expected_new = self.models[t].find_or_insert(keys)
            assert slots.tolist() == expected
            assert are_new.tolist() == expected_new

    @rule(requests=st.lists(st.tuples(st.integers(0, 1), keys_of_any_kind), max_size=3))
    def find(self, requests):
        found = core.find([core.HashRequest(self.indices[t], keys) for t, keys in requests])
        for (t, keys), slots in zip(requests, found, strict=True):
            assert slots.tolist() == self.models[t].find(keys)

    @rule(requests=st.lists(st.tuples(st.integers(0, 1), keys_of_any_kind), max_size=3))
    def erase(self, requests):
        found = core.erase([core.HashRequest(self.indices[t], keys) for t, keys in requests])
        for (t, keys), slots in zip(requests, found, strict=True):
            assert slots.tolist() == self.models[t].erase(keys)

    @precondition(lambda self: any(model.slots for model in self.models))
    @rule(data=st.data(), t=st.integers(0, 1))
    def erase_held(self, data, t):
        held = sorted(self.models[t].slots)
        keys = data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([]))
        assert self.indices[t].erase(np.array(keys, np.int64)).tolist() == self.models[t].erase(keys)

    @rule(t=st.integers(0, 1))
    def clear(self, t):
        self.indices[t].clear()
        self.models[t].clear()

    @rule(t=st.integers(0, 1), rows=st.integers(0, 60))
    def reserve(self, t, rows):
        self.indices[t].reserve(min(rows, self.models[t].capacity))

    @rule(t=st.integers(0, 1), first=st.integers(0, 70), n=st.integers(0, 70))
    def export(self, t, first, n):
        keys, slots = exported(self.indices[t], first, n)
        held = {slot: key for key, slot in self.models[t].slots.items()}
        expected = [slot for slot in sorted(held) if first <= slot < first + n]
        assert slots.tolist() == expected
        assert keys.tolist() == [held[slot] for slot in expected]

    @invariant()
    def holds_the_same(self):
        for index, model in zip(getattr(self, "indices", ()), getattr(self, "models", ()), strict=True):
            check(index, model)

    def teardown(self):
        for index in getattr(self, "indices", ()):
            index.close()


def test_calls_in_any_order(device_of_index):
    """Random sequences of calls; Hypothesis prints the one that fails."""

    class MachineOfTheDevice(Machine):
        device = device_of_index

    MachineOfTheDevice.TestCase.settings = settings(
        max_examples=2 * settings().max_examples, stateful_step_count=30, deadline=None
    )
    MachineOfTheDevice.TestCase().runTest()


def test_an_empty_index(device_of_index):
    with core.HashIndex(5, device=device_of_index) as index:
        assert index.capacity == 5
        assert index.size() == index.num_slots == 0
        assert index.find(hash_keys.EXTREMES).tolist() == [-1] * len(hash_keys.EXTREMES)
        for call in (index.find, index.erase, lambda keys: index.find_or_insert(keys)[0]):
            assert call(np.zeros(0, np.int64)).size == 0
        assert core.find([]) == core.erase([]) == core.find_or_insert([]) == []
        assert exported(index)[0].size == 0


def test_no_key_is_reserved(device_of_index):
    with core.HashIndex(100, device=device_of_index) as index:
        for number, key in enumerate(hash_keys.EXTREMES):
            assert index.find([key]).tolist() == [-1]
            slots, are_new = index.find_or_insert([key, key])
            assert slots.tolist() == [number, number]
            assert are_new.tolist() == [1, 0]
        assert index.find(np.array([0, -1, 2**31 - 1], np.int32)).tolist() == index.find([0, -1, 2**31 - 1]).tolist()


def test_slots_by_first_occurrence(device_of_index):
    with core.HashIndex(100, device=device_of_index) as index:
        slots, are_new = index.find_or_insert([7, 3, 7, 5, 3, 7])
        assert slots.tolist() == [0, 1, 0, 2, 1, 0]
        assert are_new.tolist() == [1, 1, 0, 1, 0, 0]
        assert index.erase([5, 9, 7, 5]).tolist() == [2, -1, 0, -1]
        slots, _ = index.find_or_insert([1, 2, 3, 4])  # the slot erased last comes first
        assert slots.tolist() == [0, 2, 1, 3]


def test_a_full_index(device_of_index):
    """It takes as many keys as it promises, and a batch that is too large changes none of the indices of the call."""
    rng = np.random.default_rng(1)
    for capacity in (1, 2, 4096, 4097, 30_000):
        keys = rng.permutation(10 * capacity).astype(np.int64)
        with (
            core.HashIndex(capacity, device=device_of_index, name="clicks") as index,
            core.HashIndex(10, device=device_of_index) as other,
        ):
            half = capacity // 2
            index.find_or_insert(keys[:half])
            index.erase(keys[: half // 2])
            before = exported(index)
            with pytest.raises(MemoryError, match=f"clicks.*of at most {capacity} keys.*nothing was inserted"):
                core.find_or_insert(
                    [
                        core.HashRequest(other, keys[:1]),
                        core.HashRequest(index, keys[: half + 1]),
                        core.HashRequest(index, keys[half + 1 : capacity + 1]),
                    ]
                )
            assert other.size() == 0
            assert all(np.array_equal(a, b) for a, b in zip(exported(index), before, strict=True))
            model = Model(capacity)
            model.find_or_insert(keys[:half])
            model.erase(keys[: half // 2])
            slots, _ = index.find_or_insert(np.r_[keys[:capacity], keys[:capacity]])
            assert np.array_equal(slots, model.find_or_insert(np.r_[keys[:capacity], keys[:capacity]])[0])
            check(index, model)
            with pytest.raises(MemoryError):
                index.find_or_insert(keys[: capacity + 1])
            index.erase(keys[:1])
            index.find_or_insert(keys[capacity : capacity + 1])
            assert index.size() == capacity


def test_keys_of_one_bucket(device_of_index):
    """They fill the segment, and one more is refused; erasing some lets others be found and inserted."""
    keys = hash_keys.of_one_bucket(4200)
    with core.HashIndex(100_000, initial_rows=100_000, device=device_of_index) as index:
        for first in range(0, 4000, 400):
            index.find_or_insert(keys[first : first + 400])
            assert (index.find(keys[first + 400 :]) == -1).all()
            assert np.array_equal(index.find(keys[: first + 400]), np.arange(first + 400))
        with pytest.raises(MemoryError, match="nearly the same"):
            index.find_or_insert(keys)
        assert index.size() == 4000
        assert (index.find(keys[4000:]) == -1).all()
        index.find_or_insert(keys[:4096])
        assert np.array_equal(index.find(keys[:4096]), np.arange(4096))
        with pytest.raises(MemoryError):
            index.find_or_insert(keys[4096:4097])
        index.erase(keys[:4096:2])
        assert np.array_equal(index.find(keys[1:4096:2]), np.arange(1, 4096, 2))
        assert (index.find(keys[:4096:2]) == -1).all()
        index.find_or_insert(keys[4096:])
        assert (index.find(keys[4096:]) >= 0).all()
        index.erase(keys)
        assert index.size() == 0
        assert (index.find(keys) == -1).all()


def test_it_grows(device_of_index):
    """From nothing to a million keys in steps, in any order of insertion and erasure."""
    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 1_000_000))
    rng.shuffle(keys)
    with core.HashIndex(2**40, device=device_of_index) as index:
        bounds = np.r_[0, np.cumsum(rng.integers(1, 60_000, 60))]
        bounds = np.r_[bounds[bounds < len(keys)], len(keys)]
        for begin, end in itertools.pairwise(bounds):
            assert np.array_equal(index.find_or_insert(keys[begin:end])[0], np.arange(begin, end))
            probe = rng.integers(0, len(keys), 500)
            assert np.array_equal(index.find(keys[probe]), np.where(probe < end, probe, -1))
        assert np.array_equal(index.find(keys), np.arange(len(keys)))
        held, slots = exported(index)
        assert np.array_equal(held, keys) and np.array_equal(slots, np.arange(len(keys)))
        assert index.num_bytes <= 40 * len(keys)
        with core.HashIndex(2**40, initial_rows=len(keys), device=device_of_index) as other:
            assert np.array_equal(other.find_or_insert(keys)[0], np.arange(len(keys)))


@pytest.mark.parametrize("rows", [1, 5000, 40_000, 100_000])
def test_initial_rows_fit_before_it_grows(rows, device_of_index):
    with core.HashIndex(2**40, initial_rows=rows, device=device_of_index) as index:
        num_bytes = index.num_bytes
        index.find_or_insert(np.arange(rows))
        assert index.num_bytes == num_bytes


def test_churn_takes_no_more_memory(device_of_index):
    """Keys come and go at capacity: no memory is taken, and what is held stays found."""
    capacity, step = 20_000, 500
    rng = np.random.default_rng(4)
    with core.HashIndex(capacity, initial_rows=capacity, device=device_of_index) as index:
        held = np.arange(capacity, dtype=np.int64)
        index.find_or_insert(held)
        fresh = capacity
        for number in range(300):
            gone = rng.choice(capacity, step, replace=False)
            index.erase(held[gone])
            held[gone] = np.arange(fresh, fresh + step)
            fresh += step
            index.find_or_insert(held[gone])
            if number == 0:
                num_bytes = index.num_bytes
        assert index.num_bytes == num_bytes
        assert index.num_slots == capacity
        assert len(np.unique(index.find(held))) == capacity
        assert (index.find(np.arange(fresh, fresh + 10_000)) == -1).all()


def test_workers_do_not_change_a_slot(pools, device_of_index):
    rng = np.random.default_rng(5)
    batches = [rng.integers(-3000, 3000, 70_000) ** 3 for _ in range(3)]
    results = []
    for context in [None, *pools]:
        with (
            core.HashIndex(2**20, device=device_of_index) as first,
            core.HashIndex(2**30, device=device_of_index) as second,
        ):
            for batch in batches:
                made = core.find_or_insert(
                    [
                        core.HashRequest(first, batch),
                        core.HashRequest(second, -batch),
                        core.HashRequest(first, batch + 1),
                    ],
                    context=context,
                )
                gone = core.erase([core.HashRequest(first, batch[::7]), core.HashRequest(second, -batch[::5])])
                results.append(np.concatenate([*(slots for slots, _ in made), *(new for _, new in made), *gone]))
            keys, slots, _ = first.export(context=context)
            results.append(np.r_[keys[: first.size()], slots[: first.size()]])
    alone = results[: len(results) // 4]
    for number, result in enumerate(results):
        assert np.array_equal(result, alone[number % len(alone)])


def test_locate_asks_it(device_of_index):
    """Tables with hash indices, and static ones, in one call: evaluation inserts nothing."""
    names = ("static", "user", "item")
    with (
        core.HashIndex(100, device=device_of_index, name="user") as user,
        core.HashIndex(2, device=device_of_index, name="item") as item,
    ):
        tables = [
            core.Table(None, 50, 4, names[0]),
            core.Table(None, core.ANY_KEY, 4, names[1], index=user),
            core.Table(None, core.ANY_KEY, 4, names[2], index=item),
        ]
        keys, counts = np.array([3, -5, 8, -5, 2**62]), np.array([[1, 3, 1]])
        assert core.locate(tables, keys, counts).tolist() == [3, -1, -1, -1, -1]
        assert user.size() == item.size() == 0
        assert core.locate(tables, keys, counts, insert=True).tolist() == [3, 0, 1, 0, 0]
        assert core.locate(tables, keys, counts).tolist() == [3, 0, 1, 0, 0]
        with pytest.raises(MemoryError, match="'item' holds 1 of at most 2"):
            core.locate(tables, np.array([3, 9, 1, 2]), np.array([[1, 1, 2]]), insert=True)
        assert (user.size(), item.size()) == (2, 1)
