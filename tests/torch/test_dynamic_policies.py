# SPDX-License-Identifier: Apache-2.0
"""Which keys of dynamic tables get rows, and which rows stay: admission, expiry, counts that fade, in PyTorch."""

import time

import pytest
import torch

import sparse_operation_kit.torch as sok

DIMENSION = 3


def make(**options):
    return sok.DynamicVariable(DIMENSION, name="t", initializer="normal", **{"max_capacity": 100, **options})


def initial(keys):
    """Rows of an untouched table of the same name."""
    with torch.no_grad():
        return sok.all2all_dense_embedding(make(), torch.tensor(keys))


def train(table, keys, optimizer=None, **options):
    """The rows that a lookup reads, each trained by -1 where a step follows."""
    keys = torch.tensor(keys)
    rows = sok.lookup_sparse(table, (keys, torch.arange(len(keys) + 1)), combiners="sum", **options)
    if optimizer is not None:
        optimizer.zero_grad()
        rows.sum().backward()
        optimizer.step()
    return rows.detach()


def held(table):
    return set(table.indices.tolist())


@pytest.mark.parametrize("options", ({}, {"evict_strategy": "lfu"}, {"dtype": torch.float16}))
def test_a_key_gets_a_row_in_the_lookup_of_the_threshold(options):
    table = make(admission_threshold=3, **options)
    optimizer = sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=1.0))
    other = sok.OptimizerWrapper(torch.optim.SGD([sok.Variable(torch.zeros(2, DIMENSION))], lr=1.0))
    del other
    wanted = initial([5, 7, 5]).to(table.dtype).float()
    for step in range(3):
        assert torch.equal(train(table, [5, 7, 5][: 3 - step % 2], optimizer), wanted[: 3 - step % 2])
        assert held(table) == ({5, 7} if step == 2 else set())
    counts = table.statistics()
    assert (counts.insertions, counts.refusals, counts.size) == (2, 4, 2)
    assert counts.hits + counts.misses == counts.lookups == 8 and counts.misses == 6
    with torch.no_grad():  # trained once, in its third lookup
        assert not torch.equal(sok.all2all_dense_embedding(table, torch.tensor([5])), wanted[:1])
    keys, rows = sok.export(table)
    assert sorted(keys.tolist()) == [5, 7] and rows.shape == (2, DIMENSION)


def test_assign_and_the_candidates_of_a_bounded_number():
    table = make(admission_threshold=2, admission_candidates=1)
    sok.assign(table, torch.tensor([1]), torch.ones(1, DIMENSION))
    assert held(table) == {1}
    for keys in ([2], [3], [2], [2]):  # 3 took the place of 2
        train(table, keys)
    assert held(table) == {1, 2}


def test_the_filter_is_for_lookups_that_ask_for_it():
    table = make(filter_ratio=0.25, max_capacity=10_000)
    keys = list(range(4000))
    rows = train(table, keys, use_low_frequency_filter=True)
    assert torch.equal(rows, initial(keys))
    once = held(table)
    assert abs(len(once) / 4000 - 0.25) < 0.05
    again = make(filter_ratio=0.25, max_capacity=10_000)
    train(again, keys, use_low_frequency_filter=True)
    assert held(again) == once
    train(again, keys[:100])
    assert held(again) == once | set(keys[:100])
    train(again, [9999], use_low_frequency_filter=True, training=False)
    assert 9999 not in held(again)


def test_a_static_table_beside_one_that_admits_late():
    """Weights, mean and a table that trains each key, in one call."""
    dynamic, static = make(admission_threshold=2), sok.Variable(torch.arange(30.0).reshape(10, 3))
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([dynamic, static], lr=1.0))
    ids = (torch.tensor([1, 2, 2]), torch.tensor([0, 1, 3]))
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for step in range(2):
        first, second = sok.lookup_sparse([dynamic, static], [ids, ids], [weights, None], combiners=["mean", "sum"])
        rows = initial([1, 2])
        torch.testing.assert_close(first, rows)
        optimizer.zero_grad()
        weights.grad = None
        (first.sum() + second.sum()).backward()
        torch.testing.assert_close(weights.grad, torch.zeros(3), atol=1e-6, rtol=0)  # a mean of equal rows
        optimizer.step()
        assert held(dynamic) == ({1, 2} if step == 1 else set())
    torch.testing.assert_close(static[1], torch.arange(3.0, 6.0) - 2)
    with torch.no_grad():
        torch.testing.assert_close(sok.all2all_dense_embedding(dynamic, torch.tensor([1, 2])), initial([1, 2]) - 1)


def test_rows_that_nothing_uses_expire():
    table = make(time_to_live=0.3)
    train(table, [1, 2, 3])
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        train(table, [2])
        train(table, [1], training=False)
        time.sleep(0.02)
    assert held(table) == {2} and table.statistics().expirations == 2


def test_counts_fade():
    """What was used often long ago goes before what is used now."""
    for half_life, stays in ((0, 1), (2, 2)):
        table = make(max_capacity=2, evict_strategy="lfu", half_life=half_life)
        for keys in [[1]] * 8 + [[2]] * 5 + [[3]]:
            train(table, keys)
            table._core.end_step()
        assert held(table) == {stays, 3}, half_life
