# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py: models with tables that FSDP2 shards, and that are compiled."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_model import Model, batch_of, check_model

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import runtime


class _Whole(Model):
    """What check_model reads of a model: dense parameters as plain tensors."""

    def __init__(self, model):
        super().__init__()
        self.bags = model.bags
        with torch.no_grad():
            for mine, sharded in zip(self.top.parameters(), model.top.parameters(), strict=True):
                mine.copy_(sharded.full_tensor())


class _Clipped(torch.optim.Adagrad):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.5)
        return super().step(closure)


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def compiled():
    """A compiled model with several ranks runs the lookup between graphs, and trains and evaluates alike. It has no
    program of torch.export.
    """
    runtime.shutdown()
    sok.init(gradient="mean")
    torch._dynamo.reset()
    model = Model()
    run = torch.compile(model, backend="aot_eager")
    optimizer = sok.DistributedOptimizer(make_sgd(model.parameters()))
    for step in range(3):
        ids, labels = batch_of(step, sok.rank(), sok.num_ranks())
        optimizer.zero_grad()
        (run(ids) - labels).pow(2).mean().backward()
        optimizer.step()
    check_model(model, 3, make_sgd)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(run(ids), model(ids))
    if sok.num_ranks() > 1:
        try:
            torch.export.export(model, (ids,))
        except RuntimeError as error:
            assert "torch.export is for a process alone" in str(error), error
        else:
            raise AssertionError("no error")
    runtime.shutdown()
    sok.init()


def fully_sharded():
    """fully_shard leaves tables alone; training, clipped, is that of one process on the joined batches."""
    runtime.shutdown()
    sok.init(gradient="mean")
    model = Model()
    fully_shard(model.top)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.top.parameters())
    tables = list(model.bags.parameters())
    assert tables and all(type(table) is sok.Variable for table in tables)
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad(model.parameters(), lr=0.1))
    for step in range(4):
        ids, labels = batch_of(step, sok.rank(), sok.num_ranks())
        optimizer.zero_grad()
        (model(ids) - labels).pow(2).mean().backward()
        sok.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    check_model(_Whole(model), 4, lambda parameters: _Clipped(parameters, lr=0.1))
    state = model.state_dict()
    assert {type(value).__name__ for value in state.values()} == {"DTensor", "TableShard"}
    runtime.shutdown()
    sok.init()
