# SPDX-License-Identifier: Apache-2.0
"""What OptimizerWrapper remembers of the states of tables from step to step, and when it must look again."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch_harness as harness

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import table_step

OPTIMIZERS = {
    "adagrad": lambda tables: sok.OptimizerWrapper(torch.optim.Adagrad(tables, lr=0.1)),
    "adam": lambda tables: sok.OptimizerWrapper(torch.optim.Adam(tables, lr=0.1)),
    "rowwise_adagrad": lambda tables: sok.RowWiseAdagrad(0.1).attach(tables),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Model:
    def __init__(self, name, dense=False):
        self.tables = [sok.Variable(np.full((6, 3), 0.5 + i, np.float32), name=f"states{i}") for i in range(3)]
        self.dense = [torch.nn.Parameter(torch.ones(2))] if dense else []
        self.optimizer = OPTIMIZERS[name]([*self.dense, *self.tables])

    def step(self, order=(0, 1, 2)):
        ids = [(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 4])) for _ in order]
        out = sok.lookup_sparse([self.tables[i] for i in order], ids, combiners="sum", concat=True)
        (out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum().backward()
        for parameter in self.dense:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, i):
        return self.optimizer.state[self.tables[i]]

    def everything(self):
        states = [
            {k: harness.by_key(table, v.clone()) if v.dim() else v.clone() for k, v in self.state(i).items()}
            for i, table in enumerate(self.tables)
        ]
        return list(map(harness.rows_of, self.tables)), states


def assert_equal(some, others):
    torch.testing.assert_close(some, others, rtol=0, atol=0)


def key_of(model):
    """The name of a state that is no step count."""
    return next(key for key in model.state(0) if key != "step")


@each_optimizer
def test_a_state_that_is_replaced_is_seen(name):
    model, other = Model(name), Model(name)
    for each in (model, other):
        each.step()
        each.step()
    key = key_of(model)
    model.state(1)[key] = model.state(1)[key] + 7
    other.state(1)[key].add_(7)
    for each in (model, other):
        each.step()
    assert_equal(model.everything(), other.everything())


@each_optimizer
def test_a_state_dict_that_is_loaded_is_seen(name):
    model, other = Model(name), Model(name)
    model.step()
    saved, tables = copy.deepcopy(model.optimizer.state_dict()), [t.detach().clone() for t in model.tables]
    for _ in range(3):
        other.step()
        model.step()
    other.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for table, rows in zip(other.tables, tables, strict=True):
            table.copy_(rows)
    other.step()
    other.step()
    other.step()
    assert_equal(model.everything(), other.everything())


@each_optimizer
@pytest.mark.parametrize("dense", [False, True])
def test_orders_of_tables_take_turns(name, dense):
    model, other = Model(name, dense), Model(name, dense)
    for order in [(0, 1, 2), (2, 0, 1), (2, 0, 1), (0, 1, 2), (1, 2, 0)]:
        model.step(order)
        table_step._known.pop(getattr(other.optimizer, "optimizer", other.optimizer), None)
        other.step(order)
    assert_equal(model.everything(), other.everything())
    assert {int(model.state(i)["step"]) for i in range(3) if "step" in model.state(i)} <= {5}


@each_optimizer
def test_old_states_are_not_kept_alive(name):
    model = Model(name)
    model.step()
    model.step()
    key = key_of(model)
    old = weakref.ref(model.state(0)[key])
    model.state(0)[key] = model.state(0)[key].clone()
    gc.collect()
    assert old() is None
    model.step()


@each_optimizer
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_state_that_no_longer_fits_is_refused(name, change):
    model = Model(name)
    model.step()
    model.step()
    state = model.state(2)[key_of(model)]
    state.data = state.data[:4] if change == "shape" else state.data.double()
    before = model.everything()
    with pytest.raises(ValueError, match="optimizer state"):
        model.step()
    assert_equal(model.everything(), before)


@each_optimizer
def test_a_step_count_that_is_changed_is_seen(name):
    model = Model(name)
    model.step()
    model.step()
    for i in range(3):
        model.state(i)["step"] = torch.tensor(41.0)
    model.step()
    assert [float(model.state(i)["step"]) for i in range(3)] == [42.0] * 3
