# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer, broadcast_variables and communication in a process alone; several ranks: tests/distributed."""

from typing import Any

import pytest
import torch

import sparse_operation_kit.torch as sok


def test_distributed_optimizer_alone():
    table, weight = sok.Variable(torch.zeros(4, 2)), torch.zeros(2, requires_grad=True)
    optimizer = sok.DistributedOptimizer(torch.optim.SGD([table, weight], lr=1.0))
    assert isinstance(optimizer, sok.OptimizerWrapper) and "DistributedOptimizer" in repr(optimizer)
    (sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum() + weight.sum()).backward()
    optimizer.step()
    assert table.detach()[1].tolist() == [-1, -1] and weight.tolist() == [-1, -1]


@pytest.mark.parametrize("own", [False, True])
def test_distributed_optimizer_over_this_package_s(own):
    table, weight = sok.Variable(torch.zeros(4, 2)), torch.zeros(2, requires_grad=True)
    plain = sok.SGD(1.0).attach([table, weight]) if own else torch.optim.SGD([table, weight], lr=1.0)
    optimizer = sok.DistributedOptimizer(plain if own else sok.OptimizerWrapper(plain))
    (sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum() + weight.sum()).backward()
    optimizer.step()
    assert table.detach()[1].tolist() == [-1, -1] and weight.tolist() == [-1, -1]
    with pytest.raises(TypeError, match="already"):
        sok.DistributedOptimizer(optimizer)


def test_broadcast_alone():
    weight = torch.ones(2)
    sok.broadcast_variables([weight])
    sok.broadcast_variables({"weight": weight}.items())
    with pytest.raises(ValueError, match=r"root_rank is 1.*\[0, 1\)"):
        sok.broadcast_variables([weight], root_rank=1)


def test_communication_alone():
    value = torch.arange(6.0).view(3, 2)
    for result in (
        sok.communication.alltoall(value),
        sok.communication.alltoall(value, [3]),
        sok.communication.allreduce(value, "average"),
        sok.communication.allgather(value),
        sok.communication.broadcast(value, 0),
    ):
        assert torch.equal(result, value) and result.data_ptr() != value.data_ptr()
    with pytest.raises(ValueError, match="splits"):
        sok.communication.alltoall(value, [2])
    with pytest.raises(ValueError, match="dimension"):
        sok.communication.alltoall(torch.tensor(1))
    with pytest.raises(ValueError, match="unknown op"):
        sok.communication.allreduce(value, "mean")


def test_functions_of_pytorch_are_wrapped_once():
    import importlib

    from sparse_operation_kit.torch import whole_modules

    constructor, apply = torch.nn.parallel.DistributedDataParallel.__init__, torch.nn.Module._apply
    function: Any = constructor
    importlib.reload(whole_modules)
    assert torch.nn.parallel.DistributedDataParallel.__init__ is constructor and torch.nn.Module._apply is apply
    assert "module" in function.__wrapped__.__code__.co_varnames
