# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables on a GPU: beside static ones of the same name, and while the host only guesses the number of slots."""

import pytest
import torch

import sparse_operation_kit.torch as sok

GPU = torch.device("cuda", 0)
OPTIMIZERS = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=0.1),
    "adam": lambda tables: torch.optim.Adam(tables, lr=0.1),
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1, initial_accumulator_value=0.25),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_a_static_table_does(name):
    generator = torch.Generator().manual_seed(1)
    static = sok.Variable(shape=(5000, 16), name="t", device=GPU)
    dynamic = sok.DynamicVariable(16, name="t", var_type="hbm", device=GPU, init_capacity=64)
    optimizers = [sok.OptimizerWrapper(OPTIMIZERS[name]([table])) for table in (static, dynamic)]
    splits = torch.arange(0, 3001, 3, device=GPU)
    for _ in range(12):
        ids = torch.randint(0, 5000, (3000,), generator=generator).to(GPU)
        outputs = []
        for table, optimizer in zip((static, dynamic), optimizers, strict=True):
            outputs.append(sok.lookup_sparse(table, (ids, splits), combiners="mean"))
            outputs[-1].pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*outputs)
    keys, rows = sok.export(dynamic)
    assert len(keys) == int(dynamic.size) > 4000
    assert torch.equal(sok.export(static)[1][keys], rows)


def test_evaluation_inserts_nothing():
    table = sok.DynamicVariable(4, name="t", var_type="hbm", device=GPU)
    ids = torch.tensor([-5, 7, 10**12], device=GPU), torch.arange(4, device=GPU)
    static = sok.Variable(shape=(8, 4), name="t", device=GPU)
    found = sok.lookup_sparse(table, ids, combiners="sum", training=False)
    assert int(table.size) == 0 and torch.equal(found[1], static[7])
    assert torch.equal(sok.lookup_sparse(table, ids, combiners="sum"), found)
    assert int(table.size) == 3


def test_keys_that_are_there_grow_no_state():
    """Many steps with the same keys: the host counts each of them as new until it hears otherwise, and rows and states
    have the same number of slots at every step."""
    table = sok.DynamicVariable(8, name="t", var_type="hbm", device=GPU, max_capacity=1 << 20)
    optimizer = sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1))
    ids = torch.arange(20_000, device=GPU), torch.arange(20_001, device=GPU)
    for _ in range(40):
        sok.lookup_sparse(table, ids, combiners="sum").sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states = [value for value in optimizer.state[table].values() if torch.is_tensor(value) and value.dim()]
        assert {len(state) for state in states} == {len(table)}
    assert int(table.size) == 20_000
