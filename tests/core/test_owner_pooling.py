# SPDX-License-Identifier: Apache-2.0
"""Pooling at the owner over 1 to 4 ranks, simulated in one process, against the reference; and what it refuses."""

import dataclasses
import itertools

import cases
import harness
import numpy as np
import pytest
import table_kinds
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core


def without_weights(call):
    """Lookups with weights are pooled at the requester."""
    return dataclasses.replace(call, lookups=tuple(dataclasses.replace(x, weights=None) for x in call.lookups))


def run(call, num_ranks, seed, context=None, kind=table_kinds.STATIC, choose=None):
    """choose(rank, lookup) -> whether it is pooled at the owner; None: all are that can be."""
    ranks, output_gradients, cuts = harness.simulate(call, num_ranks, seed, kind)
    pooled = [
        [x.weights is None and (choose is None or choose(r, i)) for i, x in enumerate(rank.lookups)]
        for r, rank in enumerate(ranks)
    ]
    harness.forward(ranks, context, pooled)
    return ranks, cuts, harness.reduce(ranks, harness.backward(ranks, output_gradients, context), context)


def check(call, num_ranks, seed, kind, choose=None):
    ranks, cuts, reduced = run(call, num_ranks, seed, kind=kind, choose=choose)
    harness.check_step(call, ranks, cuts, reduced)


@pytest.mark.every_isa
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
@pytest.mark.parametrize("kind", table_kinds.KINDS)
def test_cases(call, num_ranks, kind):
    check(without_weights(call), num_ranks, 1, kind)


@pytest.mark.every_isa
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
def test_cases_of_both_kinds(call, num_ranks):
    """Lookups of one call, and the same lookup on two ranks, are pooled here and there."""
    check(call, num_ranks, 1, table_kinds.STATIC, lambda rank, lookup: (rank + lookup) % 2 == 0)


@pytest.mark.parametrize("kind", table_kinds.KINDS)
@given(
    call=cases.calls(max_tables=8, max_dimension=300, bagless=True),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 5),
    choice=st.integers(0, 2**16),
)
def test_any_call(call, num_ranks, seed, choice, kind):
    check(call, num_ranks, seed, kind, lambda rank, lookup: choice >> (5 * rank + lookup) % 17 & 1 == 0)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_workers_do_not_change_a_bit(num_ranks, pools):
    alone, *_ = run(without_weights(harness.LARGE), num_ranks, seed=0)
    for context in pools:
        other, *_ = run(without_weights(harness.LARGE), num_ranks, seed=0, context=context)
        for a, b in zip(alone, other, strict=True):
            assert harness.same_bytes(a.outputs, b.outputs)
            assert harness.same_bytes(
                [a.routing.bag_keys, a.routing.bag_splits], [b.routing.bag_keys, b.routing.bag_splits]
            )


def two_tables(rank=0, num_ranks=3):
    """A distributed table of 10 rows and one of 6 rows localized on rank 1."""
    placements = [(10, -1), (6, min(1, num_ranks - 1))]
    tables = []
    for t, (rows, owner) in enumerate(placements):
        local = core.local_rows(rows, owner, num_ranks, rank)
        weight = np.arange(local * 2, dtype=np.float32).reshape(local, 2)
        tables.append(core.Table(weight, rows, 2, f"table{t}", owner, num_ranks, rank))
    return tables


def test_send_order():
    """Keys by rank, then lookup, as they came; splits of every rank that a table lives on."""
    lookups = [
        core.Lookup(np.array([4, 3, 4, 1, 9], np.int32), 0, [0, 3, 3, 5], combiner="mean"),
        core.Lookup([7, 7], 0),
        core.Lookup([5, 0, 5, 2, 1], 1, [0, 1, 5], combiner="sqrtn"),
    ]
    routing = core.route(two_tables(), lookups, pooled=[True, False, True])
    assert routing.bag_keys.tolist() == [3, 9, 4, 4, 1, 5, 0, 5, 2, 1]
    assert routing.counts.tolist() == [[0, 0, 2, 0, 0, 4, 0, 0], [1, 0, 3, 0, 5, 4, 0, 3], [0, 0, 0, 0, 0, 4, 0, 0]]
    of_ranks = [[0, 1, 1, 2], [0, 2, 2, 3], [0, 1, 5], [0, 0, 0, 0]]  # rank 0; rank 1, both tables; rank 2
    assert routing.bag_splits.tolist() == list(itertools.chain(*of_ranks))
    assert routing.keys[: routing.num_unique].tolist() == [7]
    # Behind the sums that rank 0 sends: three bags of two elements.
    assert routing.inverse.tolist() == [6, 6]
    messages = [[3, 9, 0, 1, 1, 2], [7, 4, 4, 1, 5, 0, 5, 2, 1, 0, 2, 2, 3, 0, 1, 5], [0, 0, 0, 0]]
    assert core.join_keys(two_tables(), routing).tolist() == list(itertools.chain(*messages))


def all_at_owner(tables, lookups):
    routing = core.route(tables, lookups, pooled=[True] * len(lookups))
    return routing, routing.messages(tables)


def test_scales():
    """What is summed is divided by the number of keys, its root, or nothing; of each key alone by 1."""
    tables = two_tables(num_ranks=1)
    splits = [0, 2, 6]
    lookups = [core.Lookup(np.arange(6), 0, splits, combiner=name) for name in ("sum", "mean", "sqrtn")]
    lookups.append(core.Lookup([1, 2], 0, combiner="mean"))
    routing, messages = all_at_owner(tables, lookups)
    outputs = core.combine(tables, lookups, routing.inverse, np.ones(16, np.float32), messages=messages)
    for output, expected in zip(outputs, ([1, 1], [1 / 2, 1 / 4], [0.5**0.5, 1 / 2], [1, 1]), strict=True):
        np.testing.assert_array_equal(output, np.repeat(np.array(expected, np.float32)[:, None], 2, axis=1))
    gradients = core.spread(tables, lookups, [np.ones((2, 2), np.float32)] * 4, routing)
    np.testing.assert_array_equal(gradients, np.concatenate([output.ravel() for output in outputs]))


def test_empty_bags_give_zeros():
    """Whatever the rows and gradients are."""
    tables = two_tables(num_ranks=1)
    lookups = [core.Lookup([], 0, [0, 0, 0], combiner="mean")]
    routing, messages = all_at_owner(tables, lookups)
    (output,) = core.combine(tables, lookups, routing.inverse, np.full(4, np.inf, np.float32), messages=messages)
    assert output.tolist() == [[0, 0], [0, 0]]
    gradients = core.spread(tables, lookups, [np.full((2, 2), np.nan, np.float32)], routing)
    assert gradients.tolist() == [0, 0, 0, 0]


def test_absent_output_gradients_are_zeros():
    tables = two_tables()
    lookups = [core.Lookup([1, 2], 0, [0, 2]), core.Lookup([1], 1, [0, 1])]
    routing, _ = all_at_owner(tables, lookups)
    gradients = core.spread(tables, lookups, [None, np.full((1, 2), 3, np.float32)], routing)
    assert gradients.tolist() == [0, 0, 0, 0, 3, 3, 0, 0]


@pytest.mark.parametrize("key", [-1, 10, 2**62])
def test_key_outside(key):
    lookup = core.Lookup([4, key, 5], 0, [0, 1, 3])
    with pytest.raises(IndexError, match=rf"table 'table0'.*key {key}.*\[0, 10\)"):
        all_at_owner(two_tables(), [lookup])


BAD_ROW_SPLITS = [[1, 3], [0, 2], [0, 4], [0, 2, 1, 3], [0, -1, 3], [0, 2**40, 3]]


def check_bad_row_splits(splits, words):
    lookups = [core.Lookup([1], 0), core.Lookup([4, 6, 5], 0, splits)]
    for pooled in ([False, True], [True, False]):
        with pytest.raises(ValueError, match=words):
            core.route(two_tables(), lookups, pooled=pooled)


@pytest.mark.parametrize("splits", BAD_ROW_SPLITS)
def test_bad_row_splits(splits):
    check_bad_row_splits(splits, "table 'table0': .*row_splits")


@pytest.mark.parametrize("splits", BAD_ROW_SPLITS)
def test_bad_row_splits_are_named_by_the_number_of_their_lookup(splits):
    check_bad_row_splits(splits, r"lookups\[1\].row_splits")


def test_weights_are_not_pooled_at_the_owner():
    lookups = [core.Lookup([1], 0), core.Lookup([4], 0, [0, 1], np.ones(1, np.float32))]
    with pytest.raises(ValueError, match=r"lookups\[1\].weights must be absent"):
        core.route(two_tables(), lookups, pooled=[True, True])


def test_buffers_that_do_not_fit():
    tables = two_tables()
    lookups = [core.Lookup([1, 2], 0, [0, 2]), core.Lookup([1], 1, [0, 1])]
    routing, messages = all_at_owner(tables, lookups)
    sums = np.ones(8, np.float32)
    core.combine(tables, lookups, routing.inverse, sums, messages=messages)
    for bad in (sums[:-1], sums.astype(np.float64), sums.reshape(4, 2)):
        with pytest.raises(ValueError, match="floats"):
            core.combine(tables, lookups, routing.inverse, bad, messages=messages)
    with pytest.raises(ValueError, match="output_gradients"):
        core.spread(tables, lookups, [None, np.ones((2, 2), np.float32)], routing)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([[0, 0, 1, 0, 2, 0], [0, 0, 1, 1, 3, 2], [0, 0, 0, 0, 2, 0]], "ask rank 1 for 2 bags of lookup 0"),
        ([[0, 0, 1, 0, 2, 0], [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0]], "not all ranks"),
        ([[0, 0, 1, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 2, 0]], "ask rank 0 for 1 bags of lookup 1"),
        ([[9, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], "9 unique keys, more than the 3 entries"),
        ([[0, 0, 1, 0, 2, 0], [0, 0, 1, 1, 2, 2]], "num_ranks is 2, must be 3"),
    ],
)
def test_counts_of_another_call(counts, words):
    tables = two_tables()
    lookups = [core.Lookup([1, 2], 0, [0, 2]), core.Lookup([1], 1, [0, 1])]
    routing, _ = all_at_owner(tables, lookups)
    routing.counts = np.array(counts)
    routing.order, routing.unique_splits = np.zeros(3, np.int32), np.zeros(4, np.int32)
    with pytest.raises(ValueError, match=words):
        core.spread(tables, lookups, [None, None], routing)


def test_choice_by_bytes(monkeypatch):
    """Long bags of keys that can be many are pooled at the owner; not single keys, few rows, weights, or no bags."""
    monkeypatch.delenv("SOK_POOLING", raising=False)
    tables = [
        core.Table(np.zeros((1000, 16), np.float32), 4000, 16, "many", -1, 4, 0),
        core.Table(np.zeros((4000, 16), np.float32), 4000, 16, "one rank's", 0, 4, 0),
        core.Table(np.zeros((2, 16), np.float32), 8, 16, "few", -1, 4, 0),
    ]
    keys, few = np.arange(1000), np.arange(1000) % 8
    tens, threes, singles = (np.arange(0, 1001, step) for step in (20, 4, 1))
    lookups = [
        core.Lookup(keys, 0, tens),
        core.Lookup(keys, 0, threes),
        core.Lookup(keys, 1, threes),
        core.Lookup(keys, 1, singles),
        core.Lookup(few, 2, tens),
        core.Lookup(keys, 0, tens, np.ones(1000, np.float32)),
        core.Lookup(keys, 0),
        core.Lookup([], 0, [0]),
        core.Lookup([], 0, [0, 0], np.zeros(0, np.float32)),
    ]
    assert core.split_batch(tables, lookups) == [True, False, True, False, False, False, False, False, False]
    monkeypatch.setenv("SOK_POOLING", "owner")
    assert core.split_batch(tables, lookups) == [True, True, True, True, True, False, False, True, False]
    monkeypatch.setenv("SOK_POOLING", "requester")
    assert not any(core.split_batch(tables, lookups))
    monkeypatch.setenv("SOK_POOLING", "sometimes")
    with pytest.raises(ValueError, match="SOK_POOLING is 'sometimes'"):
        core.split_batch(tables, lookups)
