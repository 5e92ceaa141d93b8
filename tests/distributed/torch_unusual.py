# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py about what few programs do: arguments of the wrong kind on one rank, scaled losses."""

import torch
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
