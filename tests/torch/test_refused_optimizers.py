# SPDX-License-Identifier: Apache-2.0
"""Optimizers that tables cannot have, since a step of one row depends on the others."""

import pytest
import torch

import sparse_operation_kit.torch as sok


class Lamb(torch.optim.SGD):
    """A user's own, as PyTorch has none; with an option that has no fused form."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9, dampening=0.1)


class LARS(Lamb):
    pass


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.Adafactor, getattr(torch.optim, "Muon", None), LARS])
def test_optimizers_of_whole_tables_are_refused(make):
    if make is None:
        pytest.skip("this PyTorch has no Muon")
    table = sok.Variable(torch.randn(4, 2))
    optimizer = sok.OptimizerWrapper(make([table], lr=0.1))
    sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    before = table.detach().clone()
    with pytest.raises(NotImplementedError, match=make.__name__):
        optimizer.step()
    assert torch.equal(table.detach(), before)


class RowOfRates(torch.optim.SGD):
    """A user's own whose state of a row begins with different numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("rates", torch.arange(1.0, 3.0).expand(parameter.shape).clone())
                parameter -= state["rates"] * parameter.grad


def test_states_that_dynamic_tables_cannot_keep_are_refused():
    """Before the first step has changed anything, of another table too."""
    tables = [sok.Variable(torch.randn(4, 2)), sok.DynamicVariable(2, "normal")]
    optimizer = sok.OptimizerWrapper(RowOfRates(tables, lr=0.1))
    ids = torch.tensor([1]), torch.tensor([0, 1])
    sum(output.sum() for output in sok.lookup_sparse(tables, [ids, ids])).backward()
    before = [table.detach().clone() for table in tables]
    with pytest.raises(NotImplementedError, match="state 'rates' of a dynamic table must be one float32 number"):
        optimizer.step()
    assert all(map(torch.equal, [table.detach() for table in tables], before))
