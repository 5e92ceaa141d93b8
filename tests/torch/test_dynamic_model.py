# SPDX-License-Identifier: Apache-2.0
"""A dynamic table that is trained, assigned to and evaluated, beside a dictionary that says what each key has."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import runtime

KEYS = st.lists(st.integers(-6, 12) | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12)


class Machine(RuleBasedStateMachine):
    """A table that Adagrad trains, and its model: a dictionary of rows and sums."""

    @initialize(dtype=st.sampled_from([torch.float32, torch.float16]))
    def make(self, dtype):
        runtime.shutdown()
        sok.init()
        self.table = sok.DynamicVariable(2, "normal", name="t", dtype=dtype, max_capacity=40, evict_strategy=None)
        self.fresh = sok.DynamicVariable(2, "normal", name="t", dtype=dtype)  # never trained
        self.optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([self.table], lr=0.5))
        self.model = {}

    def of(self, key):
        with torch.no_grad():
            row = sok.all2all_dense_embedding(self.fresh, torch.tensor([key]))[0]
        return self.model.get(key, (row, torch.zeros(2)))

    def fits(self, keys):
        return len(self.model.keys() | set(keys)) <= 40

    @rule(keys=KEYS, combiner=st.sampled_from(["sum", "mean"]))
    def train(self, keys, combiner):
        bags = (torch.tensor(keys), torch.tensor([0, len(keys)]))
        self.optimizer.zero_grad()
        if not self.fits(keys):
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                sok.lookup_sparse(self.table, bags, combiners=combiner)
            return
        output = sok.lookup_sparse(self.table, bags, combiners=combiner)
        share = 1.0 if combiner == "sum" else 1 / len(keys)
        expected = share * sum(self.of(key)[0] for key in keys)
        torch.testing.assert_close(output.detach()[0], expected, rtol=1e-5, atol=1e-5)
        output.sum().backward()
        self.optimizer.step()
        for key in set(keys):
            row, total = self.of(key)
            gradient = torch.full((2,), share * keys.count(key))
            total = total + gradient**2
            stepped = row - 0.5 * gradient / (total.sqrt() + 1e-10)
            self.model[key] = (stepped.to(self.table.dtype).float(), total)

    @rule(keys=KEYS)
    def assign(self, keys):
        if not self.fits(keys):
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                sok.assign(self.table, keys, torch.zeros(len(keys), 2))
            return
        values = torch.arange(2.0 * len(keys)).view(-1, 2)
        sok.assign(self.table, keys, values)
        for key, row in zip(keys, values, strict=True):
            self.model[key] = (row, self.of(key)[1])

    @rule(keys=KEYS)
    def evaluate(self, keys):
        rows = sok.lookup_sparse(
            self.table, (torch.tensor(keys), torch.arange(len(keys) + 1)), combiners="sum", training=False
        )
        for key, row in zip(keys, rows, strict=True):
            self.same(row, self.of(key)[0])

    def same(self, row, expected):
        tolerance = 1e-5 if self.table.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(row.float(), expected, rtol=tolerance, atol=tolerance)

    @invariant()
    def is_the_model(self):
        if not hasattr(self, "model"):
            return
        keys, rows = sok.export(self.table)
        assert sorted(keys.tolist()) == sorted(self.model) and self.table.shape == (len(self.model), 2)
        sums = self.optimizer.state[self.table].get("sum")
        for i, key in enumerate(keys.tolist()):
            self.same(rows[i], self.model[key][0])
            if sums is not None and len(sums) == len(keys):
                torch.testing.assert_close(sums[i], self.model[key][1], rtol=1e-5, atol=1e-5)


Machine.TestCase.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
test_machine = Machine.TestCase
