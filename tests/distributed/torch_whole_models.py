# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py: models with tables that FSDP2 shards, and that are compiled."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_model import Model, batch_of, check_model

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.errors import PeerError


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
    """A compiled model with several ranks is one graph, and trains and evaluates alike. It has no program of
    torch.export.
    """
    runtime.shutdown()
    sok.init(gradient="mean")
    torch._dynamo.reset()
    model = Model()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
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


def compiled_calls():
    """Calls in one graph exchange in the order of the program, whatever inductor would make first; one rank's wrong key
    is every rank's error.
    """
    torch._dynamo.reset()
    tables = [sok.Variable(torch.randn(12, 4, generator=torch.Generator().manual_seed(i))) for i in range(3)]

    def forward(bags, scale):
        found = [sok.lookup_sparse(table, bag, None, "sum") for table, bag in zip(tables, bags, strict=True)]
        return sum(scale * (i + 1) * each.pow(2).sum() for i, each in enumerate(reversed(found)))

    def bags_of(seed, batch):
        generator = torch.Generator().manual_seed(seed + sok.rank())
        return [
            (torch.randint(0, 12, (2 * batch,), generator=generator), torch.arange(0, 2 * batch + 1, 2)) for _ in tables
        ]

    run = torch.compile(forward, fullgraph=True)
    for step in range(3):
        bags, scale = bags_of(step, 3 + sok.rank() * step), torch.tensor(0.5, requires_grad=True)
        found = []
        for function in (run, forward):
            loss = function(bags, scale)
            loss.backward()
            found.append([loss.detach(), scale.grad, *(table.grad.to_dense() for table in tables)])
            for each in (scale, *tables):
                each.grad = None
        torch.testing.assert_close(*found)
    bags = bags_of(0, 3)
    if sok.rank() == 0:
        bags[1][0][0] = 99
    try:
        run(bags, scale)
    except (IndexError, PeerError) as error:
        assert ("key 99" if sok.rank() == 0 else "failed on rank 0") in str(error), error
    else:
        raise AssertionError("no error")


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
