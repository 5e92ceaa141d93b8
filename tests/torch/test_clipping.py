# SPDX-License-Identifier: Apache-2.0
"""get_total_norm and clip_grad_norm_ in a process alone, where PyTorch's own are the oracle; several ranks are in
tests/distributed/torch_clipping.py.
"""

import math
from typing import Any

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.table_parameter import own_grad

IDS = (torch.tensor([1, 2, 1, 5]), torch.tensor([0, 2, 4]))


def model(dtype=torch.float32):
    """A table, a dense parameter, one without a gradient; and a dense twin of each with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    table = sok.Variable(torch.randn(6, 3, generator=generator), name="items", dtype=dtype)
    dense = torch.nn.Parameter(torch.randn(3, 2, generator=generator))
    unused = torch.nn.Parameter(torch.zeros(4))
    unused_table = sok.Variable(torch.zeros(2, 2))
    twins = [torch.nn.Parameter(p.detach().double().clone()) for p in (table, dense, unused, unused_table)]
    (sok.lookup_sparse(table, IDS, combiners="sum") @ dense).pow(2).sum().backward()
    bags = torch.nn.functional.embedding_bag(IDS[0], twins[0], IDS[1], mode="sum", include_last_offset=True)
    (bags @ twins[1]).pow(2).sum().backward()
    return [table, dense, unused, unused_table], twins


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, math.inf, "inf"])
def test_as_pytorch(norm_type, foreach):
    parameters, twins = model()
    for max_norm in (1e9, 0.5):
        gradients = [p.grad for p in parameters if p.grad is not None]
        seen = sok.get_total_norm(gradients, norm_type, foreach=foreach)
        total = sok.clip_grad_norm_(iter(parameters), max_norm, norm_type, foreach=foreach)
        wanted = torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type)
        assert seen == total and total.dtype == torch.float32 and total.shape == ()
        torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=0)
    for parameter, twin in zip(parameters[:2], twins, strict=False):
        torch.testing.assert_close(parameter.grad.to_dense().double(), twin.grad, rtol=2e-6, atol=1e-7)
    assert parameters[2].grad is None and parameters[3].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf])
def test_gradients_that_nobody_looked_at(norm_type, dtype):
    """They are scaled where lookups left them, and what comes after clipping is not; also where some were looked at."""
    parameters, twins = model(dtype)
    table, twin = parameters[0], twins[0]
    other = sok.Variable(torch.zeros(2, 3), name="other")
    sok.lookup_sparse(
        other, (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])), combiners="sum"
    ).sum().backward()
    total = sok.clip_grad_norm_([*parameters, other], 0.5, norm_type)
    assert all(each._unread[0] and own_grad.__get__(each) is None for each in (table, other))  # nobody looked
    wanted = torch.nn.utils.clip_grad_norm_(twins, 0.5, norm_type)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=0)
    again = sok.clip_grad_norm_([table, table, parameters[1], other], 0.25, norm_type)
    torch.nn.utils.clip_grad_norm_([twin, twin, twins[1]], 0.25, norm_type)
    assert again > 0.5 * 0.99
    sok.lookup_sparse(table, IDS, combiners="sum").sum().backward()
    bags = torch.nn.functional.embedding_bag(IDS[0], twin, IDS[1], mode="sum", include_last_offset=True)
    bags.sum().backward()
    assert table.grad.dtype == dtype and other.grad._nnz() == 0
    close: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 1e-7}
    torch.testing.assert_close(table.grad.to_dense().double(), twin.grad, **close)
    torch.testing.assert_close(parameters[1].grad.double(), twins[1].grad, rtol=2e-6, atol=1e-7)


def test_steps_after_one_another():
    """What one step clipped is nothing to the next."""
    tables = [sok.Variable(torch.ones(6, 3), name=f"steps{i}") for i in range(2)]
    twins = [torch.nn.Parameter(torch.ones(6, 3)) for _ in range(2)]
    optimizers = sok.OptimizerWrapper(torch.optim.SGD(tables, lr=0.5)), torch.optim.SGD(twins, lr=0.5)
    for step in range(4):
        keys = torch.tensor([step, 5, step])
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(
            output.sum() for output in sok.lookup_sparse(tables, [(keys, torch.arange(4))] * 2, combiners="sum")
        ).backward()
        torch.autograd.backward([twin[keys].sum() for twin in twins])
        sok.clip_grad_norm_(tables, 0.7)
        torch.nn.utils.clip_grad_norm_(twins, 0.7)
        for optimizer in optimizers:
            optimizer.step()
        for table, twin in zip(tables, twins, strict=True):
            torch.testing.assert_close(table.detach().as_subclass(torch.Tensor), twin.detach())


def test_norm_and_pytorch_s_own_scaling():
    parameters, twins = model(torch.bfloat16)
    total = sok.get_total_norm([p.grad for p in parameters[:2]])
    torch.testing.assert_close(
        total.double(), torch.nn.utils.get_total_norm([t.grad for t in twins[:2]]), rtol=1e-6, atol=0
    )
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total)
    torch.testing.assert_close(sok.get_total_norm(p.grad for p in parameters[:2]), torch.tensor(1.0), rtol=1e-5, atol=0)


def test_gradients_of_other_kinds():
    table = sok.Variable(torch.zeros(4, 2))
    sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    (2 * table.sum()).backward()  # a dense one is added: 3 in row 1, 2 elsewhere
    assert sok.get_total_norm(table.grad, 1).item() == 2 * 3 + 6 * 2
    rows = torch.tensor([[1, 1]])
    table.grad = torch.sparse_coo_tensor(rows, torch.ones(2, 2), (4, 2))  # by hand, with a row in two parts
    assert sok.clip_grad_norm_(table, 1.0, "inf").item() == 2  # type: ignore[arg-type]
    torch.testing.assert_close(table.grad.to_dense()[1], torch.ones(2), rtol=1e-5, atol=0)
    assert sok.get_total_norm([]) == 0 and sok.clip_grad_norm_([], 1.0) == 0
    wide = torch.ones(1, dtype=torch.float64)
    assert sok.get_total_norm([wide, torch.ones(3)]).dtype == torch.float64


def test_errors():
    parameters, _ = model()
    before = parameters[0].grad.to_dense().clone()
    for bad in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type must be positive"):
            sok.clip_grad_norm_(parameters, 1.0, bad)
    parameters[1].grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match="is inf, so they cannot be clipped"):
        sok.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert torch.equal(parameters[0].grad.to_dense(), before)
    assert sok.clip_grad_norm_(parameters, 1.0).item() == math.inf
    assert torch.equal(parameters[0].grad.to_dense(), torch.zeros(6, 3))
