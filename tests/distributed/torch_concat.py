# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py: lookup_sparse(concat=True) on several ranks."""

from typing import Any

import numpy as np
import torch
from pooling_choice import pooling
from torch_model import whole

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch.errors import PeerError

DIMENSIONS, ROWS, BAGS = (4, 3, 8), 40, 6


def _tables():
    last = sok.num_ranks() - 1
    rng = np.random.default_rng(3)
    values = [rng.standard_normal((ROWS, dimension)).astype(np.float32) for dimension in DIMENSIONS]
    modes = (None, f"localized:{last}", "distributed")
    return [sok.Variable(value, mode=mode) for value, mode in zip(values, modes, strict=True)]


def _ids(rng, length):
    lengths = rng.integers(0, length, BAGS)
    return torch.from_numpy(rng.integers(0, ROWS, lengths.sum())), torch.from_numpy(np.r_[0, lengths.cumsum()])


def _train(concat, lengths, weighted):
    """(the last outputs side by side, whole tables, gradients of the weights) of three steps."""
    tables = _tables()
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad(tables, lr=0.1))
    rng = np.random.default_rng(sok.rank())
    params = [*tables, tables[0]]
    for _ in range(3):
        optimizer.zero_grad()
        ids = [_ids(rng, length) for length in lengths]
        weights: list[Any] = [None] * len(ids)
        if weighted:
            weights[1] = torch.ones(len(ids[1][0]), requires_grad=True)
        outputs = sok.lookup_sparse(params, ids, weights, "mean", concat=concat)
        outputs = outputs if concat else torch.cat(outputs, dim=1)
        outputs.backward(torch.from_numpy(rng.standard_normal(tuple(outputs.shape)).astype(np.float32)))
        optimizer.step()
    return outputs.detach(), [whole(table) for table in tables], weights[1].grad if weighted else torch.zeros(0)


def side_by_side():
    """The bits of the list, whatever is pooled where: all at the requester, all at the owner, some of both."""
    for choice, lengths, weighted in (
        ("requester", (3, 3, 3, 3), True),
        ("owner", (3, 9, 3, 5), False),
        ("owner", (3, 3, 9, 3), True),  # a lookup with weights stays at the requester
    ):
        with pooling(choice):
            apart, together = (_train(concat, lengths, weighted) for concat in (False, True))
        assert torch.equal(apart[0], together[0]) and apart[0].shape == (BAGS, 19)
        assert all(map(torch.equal, apart[1], together[1]))
        torch.testing.assert_close(apart[2], together[2], rtol=1e-5, atol=1e-5)


def unequal_batches():
    """Batches of unequal size on one rank are its ValueError, and a PeerError of the others."""
    tables, rank = _tables(), sok.rank()
    good = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    short = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    ids = [good, short if rank == 0 else good, good]
    try:
        sok.lookup_sparse(tables, ids, concat=True)
    except (ValueError, PeerError) as error:
        assert ("lookup 1 has 1 and lookup 0 has 2" if rank == 0 else "rank 0") in str(error), str(error)
        assert isinstance(error, PeerError) == (rank != 0)
    else:
        raise AssertionError("no error")
    assert sok.lookup_sparse(tables, [good] * 3, concat=True).shape == (2, 15)
