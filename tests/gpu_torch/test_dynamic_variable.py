# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables on a GPU: beside static ones of the same name, and while the host only guesses the number of slots."""

import copy
import io
from typing import Any

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


def test_a_state_dict_that_torch_load_puts_on_the_gpu():
    """What the host reads of it, when rows were used and which keys wait, comes back to the host."""
    options: dict[str, Any] = {"name": "t", "device": GPU, "admission_threshold": 2, "evict_strategy": "lru"}
    table, other = (sok.DynamicVariable(4, **options) for _ in range(2))
    for keys in ([1, 2], [1, 3]):
        sok.lookup_sparse(table, (torch.tensor(keys, device=GPU), torch.arange(3, device=GPU)))
    file = io.BytesIO()
    torch.save(torch.nn.ParameterDict({"t": table}).state_dict(), file)
    file.seek(0)
    torch.nn.ParameterDict({"t": other}).load_state_dict(torch.load(file, map_location=GPU))
    assert torch.equal(sok.export(other)[0], sok.export(table)[0])
    waiting, wanted = (sorted(each._core.candidates().tolist()) for each in (other, table))
    assert waiting == wanted and len(wanted) == 2
    assert torch.equal(other._core.use_times(), table._core.use_times())


def test_evaluation_inserts_nothing():
    table = sok.DynamicVariable(4, name="t", var_type="hbm", device=GPU)
    ids = torch.tensor([-5, 7, 10**12], device=GPU), torch.arange(4, device=GPU)
    static = sok.Variable(shape=(8, 4), name="t", device=GPU)
    found = sok.lookup_sparse(table, ids, combiners="sum", training=False)
    assert int(table.size) == 0 and torch.equal(found[1], static[7])
    assert torch.equal(sok.lookup_sparse(table, ids, combiners="sum"), found)
    assert int(table.size) == 3


def test_memory_that_pytorch_keeps_is_a_table_s():
    """Where PyTorch's cache has all of the device, growing asks it back; where tensors have it, nothing is inserted."""
    table = sok.DynamicVariable(256, name="t", var_type="hbm", device=GPU)
    sok.lookup_sparse(table, (torch.tensor([-1], device=GPU), torch.tensor([0, 1], device=GPU)))

    def insert(first):  # a GiB of rows
        keys = torch.arange(first, first + (1 << 20), device=GPU)
        return table._core.locate(keys, True)

    def leave(free):
        torch.cuda.synchronize()
        return torch.empty(torch.cuda.mem_get_info(GPU)[0] - free, dtype=torch.uint8, device=GPU)

    insert(0)
    room = leave(1 << 28)
    del room  # PyTorch keeps it
    assert torch.cuda.mem_get_info(GPU)[0] < 1 << 30
    insert(1 << 20)
    assert int(table.size) == (1 << 21) + 1
    room = leave(1 << 28)
    with pytest.raises(torch.OutOfMemoryError, match=r"table 't'.*set_per_process_memory_fraction"):
        insert(1 << 21)
    assert int(table.size) == (1 << 21) + 1
    del room
    insert(1 << 21)
    assert int(table.size) == 3 * (1 << 20) + 1


def test_wrong_row_splits_insert_nothing():
    table = sok.DynamicVariable(4, name="t", var_type="hbm", device=GPU)
    for splits in ([0, 2, 1], [0, 1, 2], [1, 2, 3], [0, 4, 3]):
        with pytest.raises(ValueError, match=r"row.splits"):
            sok.lookup_sparse(table, (torch.arange(3, device=GPU), torch.tensor(splits, device=GPU)))
            sok.check_errors()
        assert int(table.size) == 0


@pytest.mark.parametrize("how", ["copy", "state_dict", "to the host"])
def test_copies_go_on(how):
    """Of a table with free slots between others: its states find their keys."""

    def make(device=GPU):
        table = sok.DynamicVariable(8, name="t", var_type="hbm", device=device)
        return torch.nn.ParameterDict({"t": table}), sok.OptimizerWrapper(torch.optim.Adam([table], lr=0.1))

    def train(module, optimizer, first):
        keys = torch.arange(first, first + 300, device=module["t"].device)
        sok.all2all_dense_embedding(module["t"], keys).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def content(module):
        keys, rows = sok.export(module["t"])
        order = keys.argsort()
        return keys[order], rows[order]

    first = make()
    train(first[0], first[1], 0)
    assert first[0]["t"].erase(torch.arange(0, 400, 3, device=GPU)) == 100
    assert first[0]["t"].statistics().insertions == 300
    if how == "copy":
        second = copy.deepcopy(first)
    else:
        second = make(torch.device("cpu") if how == "to the host" else GPU)
        second[0].load_state_dict(first[0].state_dict())
        second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))  # torch.optim shares the count of steps
    assert all(map(torch.equal, content(first[0]), content(second[0])))
    for module, optimizer in (first, second):
        train(module, optimizer, 150)
    torch.testing.assert_close(content(second[0])[1], content(first[0])[1], rtol=1e-5, atol=1e-6)
    first[0]["t"].clear()
    assert first[0]["t"].statistics().size == 0


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
