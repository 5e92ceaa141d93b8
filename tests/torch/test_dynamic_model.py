# SPDX-License-Identifier: Apache-2.0
"""A dynamic table that everything is done to that users can do, beside dictionaries that say what it holds."""

import copy
import io
import tempfile

import eviction_model
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import sparse_operation_kit.torch as sok
from sparse_operation_kit.dynamic import Statistics
from sparse_operation_kit.placement import ANY_KEY, Placement
from sparse_operation_kit.torch import runtime

KEYS = st.lists(st.integers(-6, 20) | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12)


class Machine(RuleBasedStateMachine):
    """A table that Adagrad trains. `rows` says which keys it holds, at which slots, and which go next; `values` the row
    and the sum of those that are not as they were made; `born` when each got its slot.
    """

    @initialize(
        dtype=st.sampled_from([torch.float32, torch.float16]),
        strategy=st.sampled_from([*eviction_model.STRATEGIES, None]),
        capacity=st.integers(1, 40),
    )
    def make(self, dtype, strategy, capacity):
        runtime.shutdown()
        sok.init()
        self.dtype = dtype
        self.rows = eviction_model.Model(strategy, capacity)
        self.values, self.born = {}, {}
        self.lookups = self.insertions = 0
        self.table, self.optimizer = self.another()
        self.fresh = sok.DynamicVariable(2, "normal", name="t", dtype=dtype)  # never trained
        self.first = {}  # what is known of it

    def another(self):
        """An empty table like the first, and its optimizer."""
        limits = {"max_capacity": self.rows.capacity, "evict_strategy": self.rows.strategy}
        table = sok.DynamicVariable(2, "normal", name="t", dtype=self.dtype, **limits)
        return table, sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=0.5))

    def of(self, key):
        """(row, sum)"""
        if key in self.values:
            return self.values[key]
        if key not in self.first:
            with torch.no_grad():
                self.first[key] = sok.all2all_dense_embedding(self.fresh, torch.tensor([key]))[0], torch.zeros(2)
        return self.first[key]

    def insert(self, keys, call):
        """Calls what inserts keys, as the model does, and returns the result; None where they do not fit."""
        before = dict(self.rows.rows)
        if not self.rows.insert(keys):
            with pytest.raises(torch.OutOfMemoryError, match="table 't'"):
                call()
            return None
        result = call()
        new = [key for key in dict.fromkeys(keys) if key not in before]
        for key in before.keys() - self.rows.rows.keys():
            self.values.pop(key, None)
        self.born.update(dict.fromkeys(new, self.rows.generation))
        if self.lookups is not None:
            self.lookups, self.insertions = self.lookups + len(keys), self.insertions + len(new)
        return result

    def look(self, keys, combiner="sum"):
        bags = (torch.tensor(keys), torch.tensor([0, len(keys)]))
        return self.insert(keys, lambda: sok.lookup_sparse(self.table, bags, combiners=combiner))

    @rule(keys=KEYS, combiner=st.sampled_from(["sum", "mean"]), others=st.none() | KEYS)
    def train(self, keys, combiner, others):
        """others: are looked up before the step is taken."""
        self.optimizer.zero_grad()
        before = {key: self.of(key)[0] for key in keys}
        output = self.look(keys, combiner)
        if output is None:
            return
        share = 1.0 if combiner == "sum" else 1 / len(keys)
        self.same(output.detach()[0], share * sum(before[key] for key in keys), len(keys))
        output.sum().backward()
        located = self.rows.generation
        if others is not None:
            self.look(others)
        if any(key not in self.rows.rows or self.born[key] > located for key in keys):
            with pytest.raises(RuntimeError, match="table 't': a row of this gradient was erased or evicted"):
                self.optimizer.step()
            self.optimizer.zero_grad()
            return
        self.optimizer.step()
        self.rows.end_step()
        for key in set(keys):
            row, total = self.of(key)
            gradient = torch.full((2,), share * keys.count(key))
            total = total + gradient**2
            stepped = row - 0.5 * gradient / (total.sqrt() + 1e-10)
            self.values[key] = (stepped.to(self.dtype).float(), total)

    @rule(keys=KEYS)
    def look_alone(self, keys):
        self.look(keys)

    @rule(keys=KEYS)
    def assign(self, keys):
        values = torch.arange(2.0 * len(keys)).view(-1, 2)
        before = {key: self.of(key)[1] if key in self.rows.rows else torch.zeros(2) for key in keys}
        self.insert(keys, lambda: sok.assign(self.table, keys, values))
        if all(key in self.rows.rows for key in keys):  # they did fit
            for key, row in zip(keys, values, strict=True):
                self.values[key] = (row, before[key])

    @rule(keys=KEYS)
    def read_and_evict(self, keys):
        values = {key: self.of(key)[0] for key in [*self.rows.rows, *keys]}
        before = dict(self.rows.rows)
        found = self.insert(keys, lambda: sok.sparse_read_and_evict(self.table, keys))
        if found is not None:
            rows, gone, gone_rows = found
            assert sorted(gone.tolist()) == sorted(before.keys() - self.rows.rows.keys())
            for key, row in [*zip(keys, rows, strict=True), *zip(gone.tolist(), gone_rows, strict=True)]:
                self.same(row, values[key])

    @rule(keys=KEYS)
    def evaluate(self, keys):
        bags = (torch.tensor(keys), torch.arange(len(keys) + 1))
        rows = sok.lookup_sparse(self.table, bags, combiners="sum", training=False)
        self.same(rows, torch.stack([self.of(key)[0] for key in keys]))

    @rule(keys=KEYS)
    def erase(self, keys):
        assert self.table.erase(keys) == self.rows.erase(keys)
        for key in keys:
            self.values.pop(key, None)

    @rule()
    def clear(self):
        self.table.clear()
        self.rows.clear()
        self.values = {}

    @precondition(lambda self: (self.rows.strategy or "").startswith("epoch"))
    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        self.table.set_epoch(epoch)
        self.rows.epoch = epoch

    @precondition(lambda self: self.rows.strategy == "customized")
    @rule(keys=KEYS, rank=st.integers(0, 9))
    def set_scores(self, keys, rank):
        keys = list(dict.fromkeys(keys))
        self.table.set_scores(keys, [rank + i for i in range(len(keys))])
        self.rows.end_step()
        for i, key in enumerate(keys):
            if key in self.rows.rows:
                self.rows.rows[key][0] = rank + i
        assert self.table.scores(keys).tolist() == [self.rows.rows.get(key, [-1])[0] for key in keys]

    @rule()
    def dump_and_load(self):
        table, optimizer = self.another()
        with tempfile.TemporaryDirectory() as folder:
            sok.dump(f"{folder}/d", self.table, self.optimizer)
            sok.load(f"{folder}/d", table, optimizer)
        self.goes_on(table, optimizer, compact=True)

    @rule(rank=st.integers(0, 2))
    def load_into_a_rank(self, rank):
        """One of three takes its keys."""
        part = self.another()[0]
        part._placement = Placement(ANY_KEY, 2, -1, 3, rank)
        whole = torch.nn.ParameterDict({"t": self.table}).state_dict()
        torch.nn.ParameterDict({"t": part}).load_state_dict(whole)
        keys, rows = sok.export(part)
        assert sorted(keys.tolist()) == sorted(key for key in self.rows.rows if key % 3 == rank)
        for key, row in zip(keys.tolist(), rows, strict=True):
            self.same(row, self.of(key)[0])

    @rule(how=st.sampled_from(["state_dict", "copy", "states"]))
    def copy(self, how):
        if how == "copy":
            return self.goes_on(*copy.deepcopy((self.table, self.optimizer)))
        table, optimizer = self.another()
        module, other = torch.nn.ParameterDict({"t": self.table}), torch.nn.ParameterDict({"t": table})
        file = io.BytesIO()
        torch.save((module.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        rows, states = torch.load(file, weights_only=True)
        if how == "state_dict":
            other.load_state_dict(rows)
        else:  # where the keys have other slots
            with tempfile.TemporaryDirectory() as folder:
                sok.dump(f"{folder}/d", self.table)
                sok.load(f"{folder}/d", table)
        optimizer.load_state_dict(states)
        return self.goes_on(table, optimizer, compact=how == "states")

    def goes_on(self, table, optimizer, compact=False):
        """From here on with a copy; compact: its slots follow one another."""
        self.table, self.optimizer = table, optimizer
        self.lookups = self.insertions = None
        rows = self.rows
        if compact:
            for slot, row in enumerate(sorted(rows.rows.values(), key=lambda row: row[2])):
                row[2] = slot
            rows.next_slot = len(rows.rows)
        used = {row[2] for row in rows.rows.values()}
        rows.free = sorted(set(range(rows.next_slot)) - used, reverse=True)
        rows.generation = max([row[1] for row in rows.rows.values()], default=0)
        rows.epoch = 0
        rows.end_step()
        rows.evicted = 0
        self.born = dict.fromkeys(rows.rows, 0)

    def same(self, row, expected, times=1):
        """times: so many rows were summed."""
        tolerance = 1e-5 if self.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(row.float(), expected, rtol=tolerance, atol=tolerance * times)

    @invariant()
    def is_the_model(self):
        if not hasattr(self, "rows"):
            return
        keys, slots = self.table._core.held()
        assert dict(zip(keys.tolist(), slots.tolist(), strict=True)) == {k: v[2] for k, v in self.rows.rows.items()}
        assert self.table.shape == (self.rows.next_slot, 2)
        exported, rows = sok.export(self.table)
        assert torch.equal(exported, keys) and torch.equal(self.table.indices, keys)
        sums = self.optimizer.state[self.table].get("sum")
        grows = sums is not None and self.table._core.has(sums)
        if len(keys):
            expected, totals = map(torch.stack, zip(*map(self.of, keys.tolist()), strict=True))
            self.same(rows, expected)
            if grows:
                torch.testing.assert_close(sums[slots], totals, rtol=1e-5, atol=1e-5)
        counts = self.table.statistics()
        assert counts.size == len(keys) and counts.evictions == self.rows.evicted
        if self.lookups is not None:
            assert counts == Statistics.of(
                len(keys), self.rows.capacity, self.lookups, self.insertions, self.rows.evicted, 0, 0
            )


Machine.TestCase.settings = settings(stateful_step_count=20, deadline=None)
test_machine = Machine.TestCase
