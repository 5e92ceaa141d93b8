# SPDX-License-Identifier: Apache-2.0
"""The state machine of dynamic_model.py in PyTorch."""

import copy
import io
import tempfile

import dynamic_model
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from torch_harness import has_slots

import sparse_operation_kit.torch as sok
from sparse_operation_kit.placement import ANY_KEY, Placement
from sparse_operation_kit.torch import runtime


class Machine(dynamic_model.Machine):
    sok = sok
    no_room = torch.OutOfMemoryError
    refused = RuntimeError

    def start(self):
        runtime.shutdown()
        sok.init()

    def on_gpu(self):
        return torch.empty(0).device.type == "cuda"

    def make_table(self, **options):
        options["dtype"] = getattr(torch, options["dtype"])
        return sok.DynamicVariable(2, "normal", name="t", **options)

    def make_optimizer(self, table):
        adagrad = torch.optim.Adagrad(
            [table], dynamic_model.RATE, initial_accumulator_value=dynamic_model.START, eps=dynamic_model.EPSILON
        )
        return sok.OptimizerWrapper(adagrad)

    def look_up(self, keys, combiner, trains):
        bags = (torch.tensor(keys), torch.tensor([0, len(keys)]))
        output = sok.lookup_sparse(self.table, bags, combiners=combiner)
        if trains:
            output.sum().backward()
        return self.array(output[0])

    def step(self):
        self.optimizer.step()
        sok.check_errors()
        self.optimizer.zero_grad()

    def forget_gradient(self):
        self.optimizer.zero_grad()

    def read(self, table, keys):
        bags = (torch.tensor(keys), torch.arange(len(keys) + 1))
        return self.array(sok.lookup_sparse(table, bags, combiners="sum", training=False))

    def held(self):
        keys, slots = self.table._core.held()
        return dict(zip(keys.tolist(), slots.tolist(), strict=True))

    def sums(self, slots):
        sums = self.optimizer.state[self.table].get("sum")
        if sums is None or not self.table._core.has(sums):
            return None
        return self.array(sums[torch.tensor(slots)][:, 0])

    def generation(self):
        return self.table._core.generations(0.0)[0]

    def given(self, values):
        return torch.from_numpy(values)

    def array(self, value):
        return value.detach().numpy()

    @invariant()
    def has_the_slots_of_the_model(self):
        if hasattr(self, "first") and not self.threshold:
            assert has_slots(self.table, self.rows.next_slot)

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
            self.same(self.array(row), self.of(key)[0])

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


def test_machine():
    dynamic_model.check(Machine, steps=20)
