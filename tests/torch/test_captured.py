# SPDX-License-Identifier: Apache-2.0
"""Steps while a CUDA graph takes in what happens, as far as a CPU can show it; tests/gpu_torch captures some."""

import contextlib

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import table_step


@pytest.mark.parametrize(
    ("make", "follows"),
    [
        (lambda tables: torch.optim.Adam(tables, capturable=True), True),
        (lambda tables: torch.optim.AdamW(tables, capturable=True), True),
        (lambda tables: torch.optim.Adamax(tables, capturable=True), True),
        (torch.optim.SparseAdam, True),
        (lambda tables: torch.optim.Adagrad(tables, lr_decay=0.1), True),
        (torch.optim.Adagrad, False),
        (lambda tables: torch.optim.RMSprop(tables, capturable=True), False),
        (lambda tables: torch.optim.Adadelta(tables, capturable=True), False),
        (lambda tables: torch.optim.SGD(tables, lr=0.1, momentum=0.9), False),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_steps_with_a_number_are_not_captured(make, follows, steps, monkeypatch):
    """A graph would repeat it."""
    table, ids = sok.Variable(torch.ones(5, 2)), (torch.tensor([1, 2]), torch.tensor([0, 2]))
    optimizer = sok.OptimizerWrapper(make([table]))
    for _ in range(steps):
        sok.lookup_sparse(table, ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monkeypatch.setattr(table_step, "is_captured", lambda device: True)
    before = table.detach().clone()
    sok.lookup_sparse(table, ids).sum().backward()
    with pytest.raises(RuntimeError, match="CUDA graph") if follows else contextlib.nullcontext():
        optimizer.step()
    assert torch.equal(table.detach(), before) == follows
