# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does with modules and their parameters, done to modules that hold tables."""

import copy
import pickle
from typing import Any

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import saving

IDS = (torch.tensor([1, 2, 1]), torch.tensor([0, 2, 3]))


class Model(torch.nn.Module):
    """A table, tables in a stack and dense layers."""

    def __init__(self):
        super().__init__()
        self.items = sok.Variable(shape=(10, 4), name="items")
        self.bags = sok.EmbeddingBagCollection({"a": (7, 4), "b": (9, 4)})
        self.top = torch.nn.Linear(12, 1)

    def forward(self, ids):
        bags = self.bags({"a": ids, "b": ids})
        return self.top(torch.cat([sok.lookup_sparse(self.items, ids), *bags.values()], dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seen", [False, True])
def test_share_memory(dtype, seen):
    table = sok.Variable(torch.arange(8.0).view(4, 2), dtype=dtype)
    module: Any = torch.nn.Module()
    module.table = table
    ids = (torch.tensor([1, 3, 1]), torch.tensor([0, 2, 3]))
    sok.lookup_sparse(table, ids, combiners="sum").sum().backward()
    if seen:
        assert table.grad is not None
    gradient = module.share_memory().table.grad
    assert module.table is table and table.is_shared() and gradient.is_shared()
    assert gradient.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    sok.lookup_sparse(table, ids, combiners="sum").sum().backward()
    sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.5)).step()
    assert table.is_shared()
    assert table.detach().tolist() == [[0, 1], [0, 1], [4, 5], [5, 6]]


def test_share_memory_with_a_dense_gradient():
    table = sok.Variable(torch.zeros(2, 2))
    (sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum() + 2 * table.sum()).backward()
    table.grad.share_memory_()
    assert table.grad.is_shared() and table.grad.to_dense().tolist() == [[2, 2], [3, 3]]


def test_dynamic_tables_are_not_shared():
    table = sok.DynamicVariable(2, "ones", name="items")
    sok.lookup_sparse(table, IDS).sum().backward()
    module = torch.nn.Module()
    module.table = table
    with pytest.raises(RuntimeError, match="dynamic table 'items' cannot be in memory that processes share"):
        module.share_memory()
    sok.OptimizerWrapper(torch.optim.SGD([table], lr=0.5)).step()
    assert not table.is_shared() and sorted(sok.export(table)[1][:, 0].tolist()) == [0.25, 0.75]


def on_meta():
    with torch.device("meta"):
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def kinds(model):
    return [(name, type(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()]


def trained(model):
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS).pow(2).sum().backward()
        optimizer.step()
    return [table.plain if isinstance(table, saving.TableShard) else table for table in model.state_dict().values()]


@pytest.mark.parametrize("copied", [False, True])
def test_made_on_the_meta_device(copied):
    wanted, model = Model(), on_meta()
    model = (copy.deepcopy(model) if copied else model).to_empty(device="cpu")
    assert kinds(model) == kinds(wanted)
    model.items.reset_parameters()
    model.bags.reset_parameters()
    model.top.load_state_dict(wanted.top.state_dict())
    for mine, theirs in zip(trained(model), trained(wanted), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("assign", [True, False])
def test_made_on_the_meta_device_and_loaded(assign):
    wanted, model = Model(), on_meta()
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(copy.deepcopy(wanted.state_dict()), assign=assign)
    assert kinds(model) == kinds(wanted)
    for mine, theirs in zip(trained(model), trained(wanted), strict=True):
        assert torch.equal(mine, theirs)


def test_a_part_of_a_stack_is_assigned():
    model, other = Model(), Model()
    with torch.no_grad():
        model.bags.tables["a"].weight.fill_(7)
    state = {name: value for name, value in other.state_dict().items() if name != "bags.tables.a"}
    with pytest.raises(RuntimeError, match=r"bags\.tables\.a"):
        model.load_state_dict(state, assign=True)
    assert (model.bags.tables["a"].weight == 7).all()
    assert torch.equal(model.bags.tables["b"].weight, other.bags.tables["b"].weight)


def test_initial_rows_that_nobody_knows():
    for table in (sok.Variable(torch.ones(2, 2), name="items"), pickle.loads(pickle.dumps(Model().items))):
        with pytest.raises(RuntimeError, match="table 'items' does not know its initial rows"):
            table.reset_parameters()
    table = sok.Variable(shape=(3, 2), initializer=torch.nn.init.ones_)
    with torch.no_grad():
        table.zero_()
    copy.deepcopy(table).reset_parameters()
    assert not table.detach().any()
    table.reset_parameters()
    assert table.detach().all()
    bags = sok.EmbeddingBagCollection({"d": sok.DynamicVariable(2)})
    bags({"d": IDS})
    bags.reset_parameters()
    assert bags.tables["d"].size == 0
    with pytest.raises(NotImplementedError, match="'items' cannot be made on the meta device"):
        sok.DynamicVariable(2, name="items", device="meta")


def test_functional_call():
    model, other = Model(), Model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    parameters: dict[str, torch.Tensor] = dict(other.named_parameters())
    output = torch.func.functional_call(model, parameters, (IDS,))
    assert torch.equal(output, other(IDS))
    output.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert other.items.grad.to_dense()[1, 0] != 0 and other.bags.tables["a"].stack.grad is not None
    wrong: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"items": other.items.detach()}, r"params\[0\] must be .*copy.deepcopy makes one"),
        ({"bags.tables.a to b": torch.zeros(16, 4)}, "'a to b' of an EmbeddingBagCollection must be a sok.TableStack"),
    ]
    for given, message in wrong:
        with pytest.raises(TypeError, match=message):
            torch.func.functional_call(model, given, (IDS,))


def test_copies_of_modules():
    model = Model()
    model(IDS).sum().backward()
    twin = copy.deepcopy(model)
    assert kinds(twin) == kinds(model) and all(parameter.grad is None for parameter in twin.parameters())
    before = [value.clone() for value in model.state_dict().values()]
    trained(twin)
    for mine, kept in zip(model.state_dict().values(), before, strict=True):
        assert torch.equal(mine, kept)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75))
    average.update_parameters(model)
    wanted = 0.75 * model.items.detach().plain + 0.25 * twin.items.detach().plain
    average.update_parameters(twin)
    averaged: Any = average.module
    torch.testing.assert_close(averaged.items.detach().plain, wanted)


def test_dynamic_tables_in_modules():
    model = sok.EmbeddingBagCollection({"d": sok.DynamicVariable(2, "ones", name="d")})
    model({"d": IDS})
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.tables["d"].detach().mul_(3)
    output = torch.func.functional_call(model, dict(twin.named_parameters()), ({"d": IDS},))
    assert torch.equal(output["d"], torch.full((2, 2), 3.0))
    model.load_state_dict(twin.state_dict(), assign=True)
    assert type(model.tables["d"]) is sok.DynamicVariable
    assert torch.equal(model({"d": IDS})["d"], torch.full((2, 2), 3.0))
    for convert in (torch.nn.Module.half, lambda m: m.to_empty(device="cpu")):
        with pytest.raises(RuntimeError, match="dynamic table 'd' cannot be moved, converted or given other memory"):
            convert(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    model({"d": (torch.tensor([77]), torch.tensor([0, 1]))})
    with pytest.raises(RuntimeError, match="must match the size"):
        average.update_parameters(model)
