# SPDX-License-Identifier: Apache-2.0
"""A dynamic table that is trained, assigned to, read, erased, evicted, dumped and loaded, beside a dictionary that says
what each key has: the state machine of both frontends.
"""

import itertools
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

KEYS = st.lists(st.integers(-6, 12) | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=14)
RATE, START, EPSILON = 0.5, 0.25, 1e-10  # of row-wise Adagrad, which has the same formula in both frontends
CAPACITY = {None: 40, "lru": 12}


class Machine(RuleBasedStateMachine):
    """A table that row-wise Adagrad trains, and its model: for each key its row, its sum and when it was last used.

    A frontend's test derives from it and says how calls are made. Everything given and returned is NumPy's.
    """

    sok: Any = None
    no_room: Any = ()
    """What a full table raises."""

    def make_table(self, **options):
        """A table of dimension 2 of the name "t"."""
        raise NotImplementedError

    def make_optimizer(self, table):
        """RowWiseAdagrad(RATE, START, EPSILON)."""
        raise NotImplementedError

    def look_up(self, keys, combiner):
        """The vector of a bag, which is trained by `step`."""
        raise NotImplementedError

    def step(self):
        """A step on the sum of what `look_up` gave."""
        raise NotImplementedError

    def read(self, table, keys):
        """Rows of keys, which are not inserted, float32."""
        raise NotImplementedError

    def exported(self):
        """(keys, rows float32)."""
        raise NotImplementedError

    def sums(self, keys):
        """The optimizer's state of keys that are held, or None where there is none yet."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------------------

    @initialize(dtype=st.sampled_from(["float32", "float16"]), evicts=st.booleans())
    def make(self, dtype, evicts):
        strategy = "lru" if evicts else None
        self.dtype, self.strategy, self.capacity = dtype, strategy, CAPACITY[strategy]
        self.tolerance = 1e-5 if dtype == "float32" else 4e-3
        self.start()
        self.fresh = self.make_table(dtype=dtype, max_capacity=40)  # never trained
        self.begin()
        self.model, self.clock = {}, itertools.count()

    def start(self):
        """Before the first table is made."""

    def begin(self):
        options = {"max_capacity": self.capacity, "evict_strategy": self.strategy}
        self.table = self.make_table(dtype=self.dtype, **options)
        self.optimizer = self.make_optimizer(self.table)

    def of(self, key):
        """(row, sum)"""
        row = self.read(self.fresh, [key])[0]
        return self.model.get(key, (row, START, None))[:2]

    def round(self, row):
        return np.asarray(row, self.dtype).astype(np.float32)

    def fits(self, keys):
        needed = set(keys) if self.strategy else self.model.keys() | set(keys)
        return len(needed) <= self.capacity

    def insert(self, keys, call):
        """What a call gives that inserts keys, or None where it has to be refused; the model gives up what goes."""
        now = next(self.clock)
        if not self.fits(keys):
            with pytest.raises(self.no_room):
                call()
            for key in self.model.keys() & set(keys):
                self.model[key] = (*self.model[key][:2], now)
            return None
        result = call()
        held = set(self.exported()[0].tolist())
        gone = self.model.keys() - held
        assert len(gone) == max(0, len(self.model.keys() | set(keys)) - self.capacity) and not gone & set(keys)
        if gone:
            latest = max(self.model[key][2] for key in gone)
            assert all(used >= latest for key, (_, _, used) in self.model.items() if key not in gone | set(keys))
        self.gone = {key: self.model.pop(key) for key in gone}
        for key in keys:
            self.model[key] = (*self.of(key), now)
        return result

    @rule(keys=KEYS, combiner=st.sampled_from(["sum", "mean"]))
    def train(self, keys, combiner):
        share = 1.0 if combiner == "sum" else 1 / len(keys)
        expected = share * sum(self.of(key)[0] for key in keys)
        output = self.insert(keys, lambda: self.look_up(keys, combiner))
        if output is None:
            return
        if not self.gone.keys() & set(keys):
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
        self.step()
        for key in set(keys):
            row, total, used = self.model[key]
            gradient = share * keys.count(key)
            total = total + gradient**2
            self.model[key] = (self.round(row - RATE * gradient / (total**0.5 + EPSILON)), total, used)

    @rule(keys=KEYS)
    def assign(self, keys):
        values = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
        if self.insert(keys, lambda: (self.sok.assign(self.table, np.array(keys), values), 1)) is None:
            return
        for key, row in zip(keys, values, strict=True):
            self.model[key] = (row, *self.model[key][1:])

    @rule(keys=KEYS)
    def evaluate(self, keys):
        for key, row in zip(keys, self.read(self.table, keys), strict=True):
            self.same(row, self.of(key)[0])

    @rule(keys=KEYS)
    def read_and_evict(self, keys):
        expected = [self.of(key)[0] for key in keys]
        found = self.insert(keys, lambda: self.sok.sparse_read_and_evict(self.table, np.array(keys)))
        if found is None:
            return
        rows, gone, gone_rows = (np.asarray(value) for value in found)
        assert sorted(gone.tolist()) == sorted(self.gone)
        for row, wanted in zip(rows, expected, strict=True):
            self.same(row, wanted)
        for key, row in zip(gone.tolist(), gone_rows, strict=True):
            self.same(row, self.gone[key][0])

    @rule(keys=KEYS)
    def erase(self, keys):
        assert self.table.erase(np.array(keys)) == len(self.model.keys() & set(keys))
        for key in keys:
            self.model.pop(key, None)

    @precondition(lambda self: len(self.model) > 6)
    @rule()
    def clear(self):
        self.table.clear()
        self.model = {}

    @rule()
    def shrink(self):
        assert self.table.shrink() >= 0

    @rule()
    def dump_and_load(self):
        """Into a table that holds something else."""
        with tempfile.TemporaryDirectory() as folder:
            self.sok.dump(f"{folder}/d", self.table, self.optimizer)
            self.begin()
            self.sok.assign(self.table, np.array([3, 99]), np.ones((2, 2), np.float32))
            self.sok.load(f"{folder}/d", self.table, self.optimizer)

    def same(self, row, expected):
        row = np.asarray(row, np.float32)
        np.testing.assert_allclose(row, expected, rtol=self.tolerance, atol=self.tolerance)

    @invariant()
    def is_the_model(self):
        if not hasattr(self, "clock"):
            return
        keys, rows = self.exported()
        assert sorted(keys.tolist()) == sorted(self.model)
        found = self.table.statistics()
        assert (found.size, found.capacity) == (len(self.model), self.capacity)
        sums = self.sums(keys)
        for i, key in enumerate(keys.tolist()):
            self.same(rows[i], self.model[key][0])
            if sums is not None:
                np.testing.assert_allclose(sums[i], self.model[key][1], rtol=1e-5, atol=1e-5)


def check(machine):
    """Runs a machine."""
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=12, deadline=None))
