# SPDX-License-Identifier: Apache-2.0
"""A dynamic table that everything is done to that users can do, beside dictionaries that say what it holds: the state
machine of both frontends.
"""

import tempfile
from typing import Any

import eviction_model
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

from sparse_operation_kit.dynamic import Statistics

KEYS = st.lists(st.integers(-6, 20) | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12)
RATE, START, EPSILON = 0.5, 0.25, 1e-10  # of Adagrad
ROOM = 1000
"""A capacity that no sequence fills."""


class Machine(RuleBasedStateMachine):
    """A table that Adagrad trains. `rows` says which keys it holds, at which slots, and which go next; `values` the row
    and the sum of those that are not as they were made; `born` when each got its slot; `waits` which keys wait for a
    row, and how often they were looked up.

    A frontend's test derives from it and says how calls are made.
    """

    sok: Any = None
    no_room: Any = ()
    """What a full table raises."""
    refused: Any = ()
    """What a step raises whose rows have gone."""

    def start(self):
        """Before the first table is made."""

    def on_gpu(self):
        """Whether tables are on one."""
        raise NotImplementedError

    def make_table(self, **options):
        """A table of dimension 2 of the name "t"."""
        raise NotImplementedError

    def make_optimizer(self, table):
        """Adagrad, of rows or elements, which are all alike here, with RATE, START and EPSILON."""
        raise NotImplementedError

    def look_up(self, keys, combiner, trains):
        """The vector of a bag, of NumPy; trains: `step` takes a step on its sum."""
        raise NotImplementedError

    def step(self):
        """The step of the last `look_up` that trains."""
        raise NotImplementedError

    def forget_gradient(self):
        """After a step that was refused."""

    def read(self, table, keys):
        """Rows of keys, which are not inserted, of NumPy."""
        raise NotImplementedError

    def held(self):
        """{key: slot}"""
        raise NotImplementedError

    def sums(self, slots):
        """[n] Adagrad's sums at slots, or None where there are none yet."""
        raise NotImplementedError

    def generation(self):
        """How often the table has changed."""
        raise NotImplementedError

    def given(self, values):
        """NumPy's values, as calls take them."""
        return values

    def array(self, value):
        """What a call gave, as NumPy's array."""
        return np.asarray(value)

    # ------------------------------------------------------------------------------------------------------------------

    @initialize(
        dtype=st.sampled_from(["float32", "float16"]),
        strategy=st.sampled_from([*eviction_model.STRATEGIES, None]),
        capacity=st.integers(1, 40),
        threshold=st.sampled_from([0, 0, 2, 3]),
    )
    def make(self, dtype, strategy, capacity, threshold):
        self.start()
        self.dtype, self.threshold = dtype, threshold
        # Which slots guests take is not modelled, and it decides between rows of equal scores.
        self.rows = eviction_model.Model(strategy, ROOM if threshold else capacity)
        self.values, self.born, self.waits = {}, {}, {}
        self.lookups = self.insertions = self.refusals = 0
        self.table, self.optimizer = self.another()
        self.fresh = self.make_table(dtype=dtype, max_capacity=ROOM)  # never trained
        self.first = {}  # what is known of it

    def another(self):
        """An empty table like the first, and its optimizer."""
        options = {"max_capacity": self.rows.capacity, "evict_strategy": self.rows.strategy}
        if self.threshold:
            options["admission_threshold"] = self.threshold
        table = self.make_table(dtype=self.dtype, **options)
        return table, self.make_optimizer(table)

    def of(self, key):
        """(row, sum)"""
        if key in self.values:
            return self.values[key]
        if key not in self.first:
            self.first[key] = self.read(self.fresh, [key])[0], START
        return self.first[key]

    def guests(self, keys):
        """The keys of a call that get no row in it; it counts."""
        found = set()
        for key in dict.fromkeys(keys) if self.threshold else ():
            if key not in self.rows.rows:
                self.waits[key] = self.waits.get(key, 0) + 1
                if self.waits[key] < self.threshold:
                    found.add(key)
                else:
                    del self.waits[key]
        return found

    def insert(self, keys, call, guests=frozenset(), beside=False):
        """Calls what inserts keys but guests, as the model does, and returns the result; None: they do not fit."""
        before = dict(self.rows.rows)
        if not self.rows.insert(keys, guests, beside):
            with pytest.raises(self.no_room, match="table 't'"):
                call()
            if self.on_gpu():  # which has counted the lookups when it is refused
                self.lookups = None
            return None
        result = call()
        new = [key for key in dict.fromkeys(keys) if key not in before and key not in guests]
        for key in before.keys() - self.rows.rows.keys():
            self.values.pop(key, None)
        self.born.update(dict.fromkeys(new, self.rows.generation))
        if self.lookups is not None:
            self.lookups, self.insertions = self.lookups + len(keys), self.insertions + len(new)
            self.refusals += len(guests)
        return result

    def look(self, keys, combiner="sum", trains=False):
        return self.insert(keys, lambda: self.look_up(keys, combiner, trains), self.guests(keys))

    @rule(keys=KEYS, combiner=st.sampled_from(["sum", "mean"]), others=st.none() | KEYS)
    def train(self, keys, combiner, others):
        """others: are looked up before the step is taken."""
        before = {key: self.of(key)[0] for key in keys}
        output = self.look(keys, combiner, trains=True)
        if output is None:
            return
        share = 1.0 if combiner == "sum" else 1 / len(keys)
        self.same(output, share * sum(before[key] for key in keys), len(keys))
        located, trained = self.rows.generation, [key for key in keys if key in self.rows.rows]
        if others is not None:
            self.look(others)
        if any(key not in self.rows.rows or self.born[key] > located for key in trained):
            with pytest.raises(self.refused, match="table 't': a row of this gradient was erased or evicted"):
                self.step()
            self.forget_gradient()
            if self.on_gpu():  # which refuses it when the host has ended the step
                self.rows.end_step()
            return
        self.step()
        self.rows.end_step()
        for key in set(trained):
            row, total = self.of(key)
            gradient = share * keys.count(key)
            total = total + gradient**2
            stepped = row - np.float32(RATE * gradient / (total**0.5 + EPSILON))
            self.values[key] = (stepped.astype(self.dtype).astype(np.float32), total)

    @rule(keys=KEYS)
    def look_alone(self, keys):
        self.look(keys)

    @rule(keys=KEYS)
    def assign(self, keys):
        values = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
        before = {key: self.of(key)[1] if key in self.rows.rows else START for key in keys}
        found = self.insert(
            keys, lambda: (self.sok.assign(self.table, self.given(np.array(keys)), self.given(values)), 1), beside=True
        )
        if found is not None:
            for key, row in zip(keys, values, strict=True):
                self.values[key] = (row, before[key])

    @rule(keys=KEYS)
    def read_and_evict(self, keys):
        values = {key: self.of(key)[0] for key in [*self.rows.rows, *keys]}
        before = dict(self.rows.rows)
        found = self.insert(
            keys, lambda: self.sok.sparse_read_and_evict(self.table, self.given(np.array(keys))), beside=True
        )
        if found is not None:
            rows, gone, gone_rows = map(self.array, found)
            assert sorted(gone.tolist()) == sorted(before.keys() - self.rows.rows.keys())
            for key, row in [*zip(keys, rows, strict=True), *zip(gone.tolist(), gone_rows, strict=True)]:
                self.same(row, values[key])

    @rule(keys=KEYS)
    def evaluate(self, keys):
        self.same(self.read(self.table, keys), np.stack([self.of(key)[0] for key in keys]))

    @rule(keys=KEYS)
    def erase(self, keys):
        assert self.table.erase(self.given(np.array(keys))) == self.rows.erase(keys)
        for key in keys:
            self.values.pop(key, None)

    @precondition(lambda self: len(self.rows.rows) > 2)
    @rule(first=st.integers(0, 2))
    def erase_some(self, first):
        """Every third of the keys that are held."""
        self.erase(sorted(self.rows.rows)[first::3])

    @rule(by=st.sampled_from(["predicate", "min_norm", "min_score", "max_idle"]), keys=KEYS, number=st.integers(0, 6))
    def expire(self, by, keys, number):
        """Of rows that go by a number the keys do not count."""
        keeps_uses = self.rows.strategy is not None
        held = sorted(self.rows.rows.items(), key=lambda item: item[1][2])
        limit: Any = number
        if by == "predicate":
            limit = lambda found, rows, scores: np.isin(found, keys) & ((scores is None) != keeps_uses)  # noqa: E731
            gone = [key for key, _ in held if key in keys]
        elif by == "min_norm":
            norms = {key: float(np.linalg.norm(self.of(key)[0])) for key, _ in held}
            if any(abs(norm - number) < 0.01 for norm in norms.values()):
                return
            gone = [key for key, _ in held if norms[key] < number]
        elif not keeps_uses:
            with pytest.raises(ValueError, match="does not keep how its rows were used"):
                self.sok.expire(self.table, **{by: number})
            return
        elif by == "min_score":
            gone = [key for key, (rank, _, _) in held if rank < number]
        else:
            gone = [key for key, (_, used, _) in held if used <= self.rows.generation - number]
        assert sorted(self.sok.expire(self.table, **{by: limit}).tolist()) == sorted(gone)
        if gone:
            self.rows.erase(gone)
        for key in gone:
            self.values.pop(key, None)

    @precondition(lambda self: len(self.rows.rows) > 6)
    @rule()
    def clear(self):
        self.table.clear()
        self.rows.clear()
        self.values, self.waits = {}, {}

    @rule()
    def shrink(self):
        assert self.table.shrink() >= 0
        self.rows.generation += 1
        self.rows.compact()

    @precondition(lambda self: (self.rows.strategy or "").startswith("epoch"))
    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        self.table.set_epoch(epoch)
        self.rows.epoch = epoch

    @precondition(lambda self: self.rows.strategy == "customized")
    @rule(keys=KEYS, rank=st.integers(0, 9))
    def set_scores(self, keys, rank):
        keys = list(dict.fromkeys(keys))
        self.table.set_scores(self.given(np.array(keys)), [rank + i for i in range(len(keys))])
        for i, key in enumerate(keys):
            if key in self.rows.rows:
                self.rows.rows[key][0] = rank + i
        found = self.array(self.table.scores(self.given(np.array(keys)))).tolist()
        assert found == [self.rows.rows.get(key, [-1])[0] for key in keys]

    @rule()
    def dump_and_load(self):
        """Into a table that holds something else."""
        table, optimizer = self.another()
        with tempfile.TemporaryDirectory() as folder:
            self.sok.dump(f"{folder}/d", self.table, self.optimizer)
            self.sok.assign(table, self.given(np.array([3])), self.given(np.ones((1, 2), np.float32)))
            self.sok.load(f"{folder}/d", table, optimizer)
        self.goes_on(table, optimizer, compact=True)

    def goes_on(self, table, optimizer, compact=False, has_sums=True):
        """From here on with a copy; compact: its slots follow one another."""
        self.table, self.optimizer = table, optimizer
        self.lookups = self.insertions = self.refusals = None
        rows = self.rows
        if compact:
            rows.compact()
        used = {row[2] for row in rows.rows.values()}
        rows.free = sorted(set(range(rows.next_slot)) - used, reverse=True)
        rows.generation = self.generation()
        rows.epoch, rows.evicted = rows.newest_epoch(), 0
        rows.end_step()
        self.born = dict.fromkeys(rows.rows, 0)
        if not has_sums:
            self.values = {key: (row, START) for key, (row, _) in self.values.items()}

    def same(self, rows, expected, times=1):
        """times: so many rows were summed."""
        tolerance = 1e-5 if self.dtype == "float32" else 2e-3
        np.testing.assert_allclose(rows.astype(np.float32), expected, tolerance, tolerance * times)

    @invariant()
    def is_the_model(self):
        if not hasattr(self, "first"):
            return
        counts, slots = self.table.statistics(), self.held()
        if self.threshold:
            assert slots.keys() == self.rows.rows.keys()
        else:
            assert slots == {key: row[2] for key, row in self.rows.rows.items()}
        assert self.generation() == self.rows.generation
        keys, rows = map(self.array, self.sok.export(self.table))
        assert keys.tolist() == list(slots) and self.array(self.table.indices).tolist() == list(slots)
        if slots:
            expected, totals = zip(*map(self.of, slots), strict=True)
            self.same(rows, np.stack(expected))
            sums = self.sums(list(slots.values()))
            if sums is not None:
                np.testing.assert_allclose(sums, totals, 1e-5, 1e-5)
        assert (counts.size, counts.evictions) == (len(slots), self.rows.evicted)
        if self.lookups is not None:
            happened = (self.lookups, self.insertions, self.rows.evicted, self.refusals, 0)
            assert counts == Statistics.of(len(slots), self.rows.capacity, *happened)


def check(machine, steps):
    """Runs a machine; a sequence has so many steps."""
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=steps, deadline=None))
