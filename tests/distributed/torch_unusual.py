# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py about what few programs do: arguments of the wrong kind on one rank, scaled losses."""

import torch
import torch_harness as harness
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.errors import PeerError

IDS = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))


def wrong_kinds():
    """What is no table on one rank, and combiners of the wrong kind there, is an error everywhere."""
    table, other, none = sok.Variable(torch.ones(10, 4)), sok.Variable(torch.ones(6, 2)), torch.ones(10, 4)
    calls = (
        (lambda: sok.lookup_sparse([table, other], [IDS, IDS]), lambda: sok.lookup_sparse([table, none], [IDS, IDS])),
        (lambda: sok.lookup_sparse(table, IDS), lambda: sok.lookup_sparse(none, IDS)),
        (lambda: sok.lookup_sparse(table, IDS), lambda: sok.lookup_sparse(table, IDS, combiners=["sum"])),
        (lambda: sok.all2all_dense_embedding(table, IDS[0]), lambda: sok.all2all_dense_embedding(none, IDS[0])),
    )
    for right, wrong in calls:
        try:
            wrong() if sok.rank() == 0 else right()
        except (TypeError, PeerError) as error:
            assert isinstance(error, TypeError) == (sok.rank() == 0), error
        else:
            raise AssertionError("no error")
    assert torch.equal(sok.lookup_sparse(table, IDS), torch.ones(2, 4))


def grad_scaler():
    """A rank holds the gradients of its rows alone: a scaler that asks all ranks skips a step on all of them or on
    none.
    """
    last = sok.num_ranks() - 1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        table, weight = sok.Variable(torch.zeros(10, 4), dtype=dtype), torch.nn.Parameter(torch.ones(4))
        optimizer = sok.DistributedOptimizer(torch.optim.SGD([table, weight], lr=0.5))
        scaler = ShardedGradScaler("cpu", init_scale=1024.0)
        for factor, scale in ((float("inf"), 512.0), (1.0, 512.0)):
            optimizer.zero_grad()
            loss = (sok.lookup_sparse(table, IDS, combiners="sum") * weight).sum()
            scaler.scale(loss * (factor if sok.rank() == last else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            rows = sok.communication.allgather(table.detach().float())
            changed = 0.0 if factor != 1.0 else -0.5 * sok.num_ranks()
            assert rows.sum() == 3 * 4 * changed, rows


def refilled_buffers():
    """The gradient is that of the ids as they were looked up, whoever writes to their buffers later."""
    for kind in ("tensor", "numpy"):
        table = sok.Variable(torch.zeros(10, 4))
        for ids, weights in harness.refill_buffers(kind):
            sok.lookup_sparse(table, ids, weights, "sum").sum().backward()
        sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0)).step()
        wanted = torch.zeros(10, 4)
        for row, value in harness.REFILLED.items():
            wanted[row] = -value * sok.num_ranks()
        assert torch.equal(table.detach().plain, wanted[table.placement.rows]), (kind, table)
    table = sok.Variable(torch.zeros(10, 4))
    factor = torch.tensor([[1.0], [10.0]])  # of each bag
    outputs = [sok.lookup_sparse(table, ids, weights, "sum") for ids, weights in harness.refill_buffers("numpy")]
    sum((output * factor).sum() for output in outputs).backward()
    wanted = torch.tensor([0.0, 60, 0, 1, 0, 0, 0, 0, 0, 0]) * sok.num_ranks()
    assert torch.equal(table.grad.to_dense()[:, 0], wanted[table.placement.rows]), table.grad


def single_ids_of_several_tables():
    """Rows of several tables in one call, of ranks with batches of their own; wrong arguments are heard of by all."""
    values = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) for rows in (10, 6)]
    items, users = sok.Variable(values[0]), sok.Variable(values[1], mode="localized:0")
    indices = [torch.tensor([[1, 2], [9, 2]])[: sok.rank() + 1], torch.tensor(5), torch.tensor([2])]
    outputs = sok.all2all_dense_embedding([items, users, items], indices)
    for output, value, index in zip(outputs, (values[0], values[1], values[0]), indices, strict=True):
        assert torch.equal(output, value[index]), output
    sum(output.sum() for output in outputs).backward()
    n = sok.num_ranks()
    wanted = torch.tensor([0.0, n, 2 * n + (n - 1), 0, 0, 0, 0, 0, 0, n - 1])
    assert torch.equal(items.grad.to_dense()[:, 0], wanted[items.placement.rows]), items.grad
    if sok.rank() == 0:
        assert users.grad.to_dense()[5].tolist() == [n] * 3
    try:
        sok.all2all_dense_embedding([items, users, items], indices if sok.rank() else indices[:2])
    except (ValueError, PeerError) as error:
        assert isinstance(error, ValueError) == (sok.rank() == 0), error
    else:
        raise AssertionError("no error")
