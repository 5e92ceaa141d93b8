# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does with modules and their parameters, done to modules that hold tables."""

import pytest
import torch

import sparse_operation_kit.torch as sok

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
    module = torch.nn.Module()
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
