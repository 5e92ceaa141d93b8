# SPDX-License-Identifier: Apache-2.0
"""Of several things that are wrong in a call the first is named: of the first lookup or table, then of its entries."""

import numpy as np
import pytest

from sparse_operation_kit import core

ROWS = 100
DIMENSIONS = (8, 3, 8)  # kinds of their own to a device, which takes tables of a kind together
N = 40_000


def tables():
    return [core.Table(np.ones((ROWS, d), np.float32), name=f"table{t}") for t, d in enumerate(DIMENSIONS)]


def keys(seed, dtype=np.int64):
    """[N] of which a good part, from the middle on, are wrong, each in its own way; and the first of these."""
    rng = np.random.default_rng(seed)
    made = rng.integers(0, ROWS, N).astype(dtype)
    wrong = np.sort(rng.choice(np.arange(N // 2, N), N // 10, replace=False))
    made[wrong] = ROWS + rng.permutation(len(wrong)) + seed * 10_000
    return made, made[wrong[0]]


def batches(first_wrong, row_splits=True):
    """A batch of keys for each table, with wrong ones from table `first_wrong` on, and the first wrong key."""
    made = [keys(t, (np.int64, np.int32)[t % 2]) for t in range(len(DIMENSIONS))]
    given = [x if t >= first_wrong else x % ROWS for t, (x, _) in enumerate(made)]
    splits = np.arange(0, N + 1, 4) if row_splits else None
    weights = np.ones(N, np.float32)
    return [core.Lookup(x, t, splits, weights) for t, x in enumerate(given)], made[first_wrong][1]


def fails(call, table, number):
    with pytest.raises(IndexError) as error:
        call()
    assert f"table{table}'" in str(error.value) and f" {number} " in str(error.value), str(error.value)


@pytest.mark.parametrize("row_splits", [True, False])
@pytest.mark.parametrize("first_wrong", range(3))
def test_keys_of_lookups(pools, first_wrong, row_splits):
    lookups, key = batches(first_wrong, row_splits)
    bags = N // 4 if row_splits else N
    incoming = [np.ones((bags, d), np.float32) for d in DIMENSIONS]
    for context in [None, *pools]:
        fails(lambda c=context: core.gather_combine(tables(), lookups, context=c), first_wrong, key)
        fails(lambda c=context: core.weight_gradient(tables(), lookups, incoming, context=c), first_wrong, key)
        fails(lambda c=context: core.route(tables(), lookups, context=c), first_wrong, key)


@pytest.mark.parametrize("first_wrong", range(3))
def test_keys_and_slots_of_an_owner(pools, first_wrong):
    lookups, key = batches(first_wrong)
    numbers = np.concatenate([x.keys for x in lookups]).astype(np.int64)
    counts = [[N] * len(DIMENSIONS)]
    for context in [None, *pools]:
        fails(lambda c=context: core.locate(tables(), numbers, counts, context=c), first_wrong, key)
        fails(lambda c=context: core.gather(tables(), numbers, counts, context=c), first_wrong, key)


@pytest.mark.parametrize("row_splits", [True, False])
@pytest.mark.parametrize("first_wrong", range(3))
def test_slots_of_gradients(pools, first_wrong, row_splits):
    lookups, slot = batches(first_wrong, row_splits)
    bags = N // 4 if row_splits else N
    parts = [
        core.Gradient(x.keys, np.ones((bags, d), np.float32), x.row_splits)
        for x, d in zip(lookups, DIMENSIONS, strict=True)
    ]
    for context in [None, *pools]:
        updates = [core.Update(t, core.Optimizer("sgd", 0.1), [p]) for t, p in zip(tables(), parts, strict=True)]
        fails(lambda c=context, u=updates: core.apply(u, context=c), first_wrong, slot)
        assert all((update.table.weight == 1).all() for update in updates)
        table, part = tables()[first_wrong], parts[first_wrong]
        fails(lambda c=context, t=table, p=part: core.reduce(t, [p, p], context=c), first_wrong, slot)


def test_row_splits_before_keys(pools):
    """Where both are wrong in one table, on any backend."""
    lookups, _ = batches(1)
    lookups[1].row_splits = lookups[1].row_splits.copy()
    lookups[1].row_splits[[10, 5000]] = N + 1
    for context in [None, *pools]:
        with pytest.raises(ValueError, match="row_splits"):
            core.gather_combine(tables(), lookups, context=context)
