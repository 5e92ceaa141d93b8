# SPDX-License-Identifier: Apache-2.0
"""Checks of torch_worker.py: pooling at the owner beside pooling at the requester, in one call and across ranks."""

import contextlib
import functools
import sys
from typing import Any

import cases
import numpy as np
import reference
import torch
import torch_harness as harness
from pooling_choice import pooling
from torch_model import whole

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import runtime


def ranks_that_differ():
    """Each rank chooses on its own: every case, trained steps, and what all refuse together, however they choose."""
    worker = sys.modules["__main__"]
    for choices in (("owner", "requester"), ("requester", "owner"), ("auto", "owner", "requester")):
        with pooling(choices[sok.rank() % len(choices)]):
            worker.lookups()
            worker.accumulation()
            worker.raise_together()
    with pooling(("owner", "requester")[sok.rank() % 2]):
        worker.training()
        worker.row_dtypes()


@contextlib.contextmanager
def messages():
    """The (dtype, elements) of each message that this rank sends and receives meanwhile: two lists."""
    exchange, sent, received = runtime.get().exchange, [], []
    all_to_all = exchange.all_to_all

    def recorded(tensor, send, receive):
        result = all_to_all(tensor, send, receive)
        sent.append((tensor.dtype, sum(send)))
        received.append((result.dtype, sum(receive)))
        return result

    exchange.all_to_all = recorded
    try:
        yield sent, received
    finally:
        del exchange.all_to_all


def what_travels():
    """One message of keys and one of rows each way, whatever is pooled where; sums in place of rows at the owner."""
    n, rank = sok.num_ranks(), sok.rank()
    if n == 1:
        return
    spread = sok.Variable(torch.arange(400.0).view(100, 4), name="spread")
    whole_here = sok.Variable(torch.arange(60.0).view(20, 3), name="whole", mode=f"localized:{n - 1}")
    bags = 5 + rank
    lengths = torch.full((bags,), 6)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    first = torch.arange(6 * bags) % 100
    second = torch.arange(6 * bags) % 20
    unique = [len(set(first.tolist())), len(set(second.tolist()))]
    keys_of_both = 2 * 6 * bags
    wanted = {
        "owner": (keys_of_both + (n + 1) * (bags + 1), bags * (4 * n + 3)),
        "requester": (sum(unique), 4 * unique[0] + 3 * unique[1]),
    }
    for choice, (keys, elements) in wanted.items():
        with pooling(choice), messages() as (sent, received):
            outputs = sok.lookup_sparse([spread, whole_here], [(first, offsets), (second, offsets)], combiners="sum")
            assert sent[0] == (torch.int64, keys), (choice, sent)
            assert received[1] == (torch.float32, elements), (choice, received)
            torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
            assert sent[2] == received[1] and received[2] == sent[1] and len(sent) == 3
        for output, table, ids in zip(outputs, (100, 20), (first, second), strict=True):
            rows = torch.arange(table * output.shape[1], dtype=torch.float32).view(table, -1)
            assert torch.equal(output, rows[ids].view(bags, 6, -1).sum(1))
    with pooling("owner"), messages() as (sent, received):  # a lookup with weights stays at the requester
        weights = [None, torch.ones(len(second), requires_grad=True)]
        sok.lookup_sparse([spread, whole_here], [(first, offsets), (second, offsets)], weights, "sum")
        assert sent[0] == (torch.int64, 6 * bags + n * (bags + 1) + unique[1])
        assert received[1] == (torch.float32, bags * 4 * n + 3 * unique[1])


def long_and_short_bags():
    """By default long bags of many keys are pooled at the owner and single keys are not, in one call; a rank has none.

    Rank 0 has long bags, rank 1 single keys, rank 2 no bags, the others both.
    """
    n, rank = sok.num_ranks(), sok.rank()
    rng = np.random.default_rng(7)
    tables = (cases.Table(4000, 16), cases.Table(3000, 8, 0))

    def of(t, bags, length, combiner):
        splits = np.arange(bags + 1) * length
        return cases.Lookup(t, rng.integers(0, tables[t].num_rows, bags * length), splits, None, combiner)

    shapes = [[(40, 30), (40, 30)], [(40, 1), (40, 1)], [(0, 1), (0, 1)], [(40, 1), (40, 30)]]
    calls = [
        cases.Call(tables, tuple(of(t, *shape, "mean") for t, shape in enumerate(shapes[r % 4])), seed=r)
        for r in range(n)
    ]
    whole_call = cases.Call(tables, tuple(item for call in calls for item in call.lookups), seed=0)
    mine = calls[rank]
    variables = harness.tables(cases.Call(tables, (), seed=0), n)
    with pooling("auto"):
        if n > 1:
            with messages() as (sent, _):
                sok.lookup_sparse(variables, [harness.pair(item) for item in mine.lookups])
            pooled = {0: [0, 1], 1: [], 2: [], 3: [1]}[rank % 4]
            keys = 0
            for i, item in enumerate(mine.lookups):
                owners = n if tables[i].owner < 0 else 1
                parts = len(item.keys) + owners * (item.num_bags + 1)
                keys += parts if i in pooled else len(np.unique(item.keys))
            assert sent[0] == (torch.int64, keys), sent
        outputs = sok.lookup_sparse(variables, [harness.pair(item) for item in mine.lookups])
        with torch.no_grad():
            again = sok.lookup_sparse(variables, [harness.pair(item) for item in mine.lookups])
    assert all(torch.equal(a.detach(), b) and not b.requires_grad for a, b in zip(outputs, again, strict=True))
    for i, output in enumerate(outputs):
        wanted = whole_call.output(2 * rank + i)
        reference.assert_close(output.detach(), wanted, 1e-6, whole_call.output(2 * rank + i, absolute=True))
    torch.autograd.backward(outputs, harness.gradients(whole_call)[2 * rank : 2 * rank + 2])
    for t, table in enumerate(variables):
        rows = table.placement.rows
        terms = whole_call.row_gradient(t, absolute=True)[rows]
        reference.assert_close(table.grad.to_dense(), whole_call.row_gradient(t)[rows], 1e-6, terms, f"table {t}")


def gradients_that_are_used():
    """A gradient of sums does what one of rows does: clipped, scaled, added up, as a sparse tensor, through autograd's
    hooks, in any optimizer.
    """
    rng = np.random.default_rng(5)
    tables = (cases.Table(40, 8), cases.Table(15, 5, 1), cases.Table(23, 8, 0))
    items = tuple(
        cases.random_lookup(rng, t, tables[t].num_rows, 24, 4, combiner=c, weighted=w, skew=2)
        for t, c, w in ((0, "sum", False), (1, "mean", False), (0, "sqrtn", True), (2, "sqrtn", False))
    )
    call = cases.Call(tables, items, seed=3)
    part, rank = call.split(sok.num_ranks())[0][sok.rank()], sok.rank()
    cut = call.split(sok.num_ranks())[1]
    mine = [gradient[c[rank] : c[rank + 1]] for gradient, c in zip(harness.gradients(call), cut, strict=True)]

    def backward(variables, choice):
        with pooling(choice):
            outputs, _ = harness.lookup(part, variables)
            torch.autograd.backward(outputs, mine)

    def train(choices, make, change=None, hook=None):
        variables = harness.tables(call, sok.num_ranks())
        hooks = [table.register_hook(hook) for table in variables] if hook else []
        optimizer = make(variables)
        for _ in range(3):
            optimizer.zero_grad()
            for choice in choices:
                backward(variables, choice)
            if change is not None:
                change(variables)
            optimizer.step()
        for handle in hooks:
            handle.remove()
        return [whole(table) for table in variables]

    def half(variables):
        for table in variables:
            table.grad = table.grad.coalesce() * 0.5

    wraps = {
        "fused": lambda p: sok.OptimizerWrapper(torch.optim.Adagrad(p, lr=0.1)),
        "adam": lambda p: sok.OptimizerWrapper(torch.optim.Adam(p, lr=0.1, eps=1e-3)),
        "torch's": lambda p: torch.optim.SGD(p, lr=0.1),
        "not fused": lambda p: sok.OptimizerWrapper(torch.optim.RAdam(p, lr=0.1, eps=1e-3)),
    }
    changes: dict[str, dict[str, Any]] = {
        "none": {},
        "norm": {"change": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.7)},
        "value": {"change": lambda p: torch.nn.utils.clip_grad_value_(p, 0.3)},
        "coalesced": {"change": half},
        "hook": {"hook": lambda gradient: gradient * 2},
    }
    for name, make in wraps.items():
        for kind, change in changes.items():
            wanted = train(("requester", "requester"), make, **change)
            for choices in (("owner", "owner"), ("owner", "requester")):
                for got, table in zip(train(choices, make, **change), wanted, strict=True):
                    torch.testing.assert_close(
                        got, table, rtol=1e-4, atol=1e-5, msg=functools.partial("{}, {}: {}".format, name, kind)
                    )


def a_key_twice_in_one_bag():
    """A part that is the whole gradient of a table, though a key of it comes twice: materialised, and stepped."""
    with pooling("owner"):
        wanted = torch.zeros(9, 3)
        wanted[4], wanted[7] = 2, 1
        for read_first in (False, True):
            table = sok.Variable(torch.zeros(9, 3))
            optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=0.1))
            mine = [4, 7, 4] if sok.rank() == sok.num_ranks() - 1 else []
            ids = (torch.tensor(mine, dtype=torch.int64), torch.tensor([0, len(mine)]))
            sok.lookup_sparse(table, ids, combiners="sum").sum().backward()
            if read_first:
                assert torch.equal(table.grad.to_dense(), wanted[table.placement.rows])
            optimizer.step()
            state = optimizer.state[table]["sum"]
            assert torch.equal(state, (wanted * wanted)[table.placement.rows])
