# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py about the norm of all gradients and clipping by it."""

import math
from typing import Any

import reference
import torch
from torch.nn.parallel import DistributedDataParallel
from torch_model import Model, batch_of, check_model

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.errors import PeerError

STEPS = 4


class _Clipped(torch.optim.SGD):
    """Of one process: clips as PyTorch does before each step, and keeps the norms."""

    def __init__(self, parameters, norm_type, max_norm):
        super().__init__(parameters, lr=0.1)
        self.clip = (max_norm, norm_type)
        self.norms = []

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        self.norms.append(torch.nn.utils.clip_grad_norm_(parameters, *self.clip).item())
        return super().step(closure)


def clipping():
    """Training with clipped gradients is that of one process on the joined batches, whatever averages dense ones."""
    runtime.shutdown()
    sok.init(gradient="mean")
    for norm_type, max_norm, ddp in ((2.0, 0.5, True), (math.inf, 0.1, False), (3, 0.5, False)):
        model = Model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        run = DistributedDataParallel(model) if ddp else model
        optimizer = sok.OptimizerWrapper(optimizer) if ddp else sok.DistributedOptimizer(optimizer)
        norms = []
        for step in range(STEPS):
            ids, labels = batch_of(step, sok.rank(), sok.num_ranks())
            optimizer.zero_grad()
            (run(ids) - labels).pow(2).mean().backward()
            if not ddp:
                optimizer.synchronize()
            seen = sok.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type)
            norms.append(sok.clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite=True))
            assert seen == norms[-1]
            optimizer.step()
        made = []

        def one_process(parameters, norm_type=norm_type, max_norm=max_norm, made=made):
            made.append(_Clipped(parameters, norm_type, max_norm))
            return made[0]

        check_model(model, STEPS, one_process)
        reference.assert_close(torch.stack(norms), torch.tensor(made[0].norms), 1e-6, message="norms")
    runtime.shutdown()
    sok.init()


def clipping_of_uneven_ranks():
    """A rank without gradients takes part; one that fails is heard of by all, and nothing is scaled."""
    table = sok.Variable(torch.ones(2 * sok.num_ranks(), 2), name="items")
    last = sok.num_ranks() - 1
    key = torch.full((1,), last)  # a row of the last rank
    sok.lookup_sparse(table, (key, torch.tensor([0, 1])), combiners="sum").sum().backward()
    table.grad = table.grad if sok.rank() == last else None
    wanted = sok.num_ranks() * math.sqrt(2)
    assert abs(sok.clip_grad_norm_(table, 1.0).item() - wanted) < 1e-6 * wanted
    if sok.rank() == last:
        torch.testing.assert_close(table.grad.norm(), torch.tensor(1.0), rtol=1e-5, atol=0)
    bad = torch.full((1,), math.nan if sok.rank() == last else 1.0)
    for call in (lambda: sok.get_total_norm([bad], error_if_nonfinite=True), lambda: _fail(last)):
        try:
            call()
        except PeerError as error:
            assert sok.rank() != last and f"failed on rank {last}" in str(error), error
        except RuntimeError as error:
            assert "is nan, so they cannot be clipped" in str(error) or sok.rank() == last, error
        else:
            raise AssertionError("no error")


def _fail(failing):
    """A gradient that has no norm on one rank."""
    return sok.get_total_norm([torch.ones(2, dtype=torch.int64 if sok.rank() == failing else torch.float32)])
