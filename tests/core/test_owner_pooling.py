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


@dataclasses.dataclass
class Exchanged:
    """What came to one rank, and what it made."""

    key_counts: np.ndarray
    bag_counts: np.ndarray
    slots: np.ndarray
    splits: np.ndarray
    sums: np.ndarray


def here(rank, lookup, number):
    table = rank.tables[lookup.table]
    return table.owner < 0 or table.owner == number


def num_bags(lookup):
    return len(lookup.keys) if lookup.row_splits is None else len(lookup.row_splits) - 1


def split_sizes(ranks, plus_one, weigh_by_dimension):
    """[rank][destination]: the elements of something that exists for every bag of a lookup that lives there."""
    return [
        [
            sum(
                (num_bags(x) + plus_one) * (rank.tables[x.table].shape[1] if weigh_by_dimension else 1)
                for x in rank.lookups
                if here(rank, x, number)
            )
            for number in range(len(ranks))
        ]
        for rank in ranks
    ]


def transposed(sizes):
    return [list(column) for column in zip(*sizes, strict=True)]


def pieces(rank, r, came):
    """(lookup, slots, row splits) of what came from each source rank for each lookup whose table lives here."""
    key, split = 0, 0
    for counts, bags in zip(came.key_counts.tolist(), came.bag_counts.tolist(), strict=True):
        for i, lookup in enumerate(rank.lookups):
            if here(rank, lookup, r):
                yield i, came.slots[key : key + counts[i]], came.splits[split : split + bags[i] + 1]
                key, split = key + counts[i], split + bags[i] + 1


def forward(ranks, context=None):
    """route_bags, exchange, locate, gather_combine, exchange, combine_bags; fills in ranks[r].outputs and .routing."""
    for rank in ranks:
        rank.routing = core.route_bags(rank.tables, rank.lookups, context=context)
    sent = [rank.routing.counts.sum(axis=1) for rank in ranks]
    keys = harness.exchange([rank.routing.keys for rank in ranks], sent)
    splits = harness.exchange([rank.routing.splits for rank in ranks], split_sizes(ranks, 1, False))
    exchanged = []
    for r, rank in enumerate(ranks):
        key_counts = np.stack([other.routing.counts[r] for other in ranks])
        bag_counts = np.array([[num_bags(x) for x in other.lookups] for other in ranks], np.int64)
        bag_counts = bag_counts.reshape(len(ranks), len(rank.lookups))
        of_lookup = [rank.tables[x.table] for x in rank.lookups]
        slots = core.locate(of_lookup, keys[r], key_counts, context=context)
        came = Exchanged(key_counts, bag_counts, slots, splits[r], np.zeros(0, np.float32))
        here_too = [
            core.Lookup(None, rank.lookups[i].table, piece_splits, slots=piece_slots)
            for i, piece_slots, piece_splits in pieces(rank, r, came)
        ]
        sums = core.gather_combine(rank.tables, here_too, context=context)
        came.sums = np.concatenate([came.sums, *(x.ravel() for x in sums)])
        exchanged.append(came)
    sizes = split_sizes(ranks, 0, True)
    received = harness.exchange([e.sums for e in exchanged], transposed(sizes))
    for rank, sums in zip(ranks, received, strict=True):
        rank.rows = sums
        rank.outputs = core.combine_bags(rank.tables, rank.lookups, rank.routing.scales, sums, context=context)
    return exchanged


def backward(ranks, exchanged, output_gradients, context=None):
    """spread_bags and exchange -> the parts of each table's gradient on each rank: [rank][table] lists."""
    spread = [
        core.spread_bags(rank.tables, rank.lookups, incoming, rank.routing.scales, context=context)
        for rank, incoming in zip(ranks, output_gradients, strict=True)
    ]
    received = harness.exchange(spread, split_sizes(ranks, 0, True))
    result = []
    for r, (rank, flat, came) in enumerate(zip(ranks, received, exchanged, strict=True)):
        of_table = [[] for _ in rank.tables]
        element = 0
        for i, slots, splits in pieces(rank, r, came):
            bags, table = len(splits) - 1, rank.lookups[i].table
            width = rank.tables[table].shape[1]
            values = flat[element : element + bags * width].reshape(bags, width)
            of_table[table].append(core.Gradient(slots, values, splits))
            element += bags * width
        result.append(of_table)
    return result


def without_weights(call):
    """Lookups with weights are pooled at the requester."""
    return dataclasses.replace(call, lookups=tuple(dataclasses.replace(x, weights=None) for x in call.lookups))


def run(call, num_ranks, seed, context=None, kind=table_kinds.STATIC):
    ranks, output_gradients, cuts = harness.simulate(call, num_ranks, seed, kind)
    exchanged = forward(ranks, context)
    parts = backward(ranks, exchanged, output_gradients, context)
    reduced = harness.reduce(ranks, parts, context)
    return ranks, cuts, reduced


def check(call, num_ranks, seed, kind):
    call = without_weights(call)
    ranks, cuts, reduced = run(call, num_ranks, seed, kind=kind)
    harness.check_step(call, ranks, cuts, reduced)


@pytest.mark.every_isa
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
@pytest.mark.parametrize("kind", table_kinds.KINDS)
def test_cases(call, num_ranks, kind):
    check(call, num_ranks, 1, kind)


@pytest.mark.parametrize("kind", table_kinds.KINDS)
@given(
    call=cases.calls(max_tables=8, max_dimension=300, bagless=True), num_ranks=st.integers(1, 4), seed=st.integers(0, 5)
)
def test_any_call(call, num_ranks, seed, kind):
    check(call, num_ranks, seed, kind)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_workers_do_not_change_a_bit(num_ranks, pools):
    alone, *_ = run(without_weights(harness.LARGE), num_ranks, seed=0)
    for context in pools:
        other, *_ = run(without_weights(harness.LARGE), num_ranks, seed=0, context=context)
        for a, b in zip(alone, other, strict=True):
            assert harness.same_bytes(a.outputs, b.outputs)
            assert harness.same_bytes([a.routing.keys, a.routing.splits], [b.routing.keys, b.routing.splits])


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
    """Keys by rank, then lookup, as they came; splits of every rank that a table lives on; scales of each combiner."""
    lookups = [
        core.Lookup(np.array([4, 3, 4, 1, 9], np.int32), 0, [0, 3, 3, 5], combiner="mean"),
        core.Lookup([5, 0, 5, 2, 1], 1, [0, 1, 5], combiner="sqrtn"),
    ]
    routing = core.route_bags(two_tables(), lookups)
    assert routing.keys.tolist() == [3, 9, 4, 4, 1, 5, 0, 5, 2, 1]
    assert routing.counts.tolist() == [[2, 0], [3, 5], [0, 0]]
    of_ranks = [[0, 1, 1, 2], [0, 2, 2, 3], [0, 1, 5], [0, 0, 0, 0]]  # rank 0; rank 1, both tables; rank 2
    assert routing.splits.tolist() == list(itertools.chain(*of_ranks))
    expected = [1 / 3, 0, 1 / 2, 1, 1 / 2]
    np.testing.assert_array_equal(routing.scales, np.array(expected, np.float32))


def test_empty_bags_give_zeros():
    """Whatever the rows and gradients are."""
    tables = two_tables(num_ranks=1)
    lookup = core.Lookup([], 0, [0, 0, 0], combiner="mean")
    routing = core.route_bags(tables, [lookup])
    assert routing.scales.tolist() == [0, 0]
    (output,) = core.combine_bags(tables, [lookup], routing.scales, np.full(4, np.inf, np.float32))
    assert output.tolist() == [[0, 0], [0, 0]]
    gradients = core.spread_bags(tables, [lookup], [np.full((2, 2), np.nan, np.float32)], routing.scales)
    assert gradients.tolist() == [0, 0, 0, 0]


def test_absent_output_gradients_are_zeros():
    tables = two_tables()
    lookups = [core.Lookup([1, 2], 0, [0, 2]), core.Lookup([1], 1, [0, 1])]
    routing = core.route_bags(tables, lookups)
    gradients = core.spread_bags(tables, lookups, [None, np.full((1, 2), 3, np.float32)], routing.scales)
    assert gradients.tolist() == [0, 0, 0, 0, 3, 3, 0, 0]


@pytest.mark.parametrize("key", [-1, 10, 2**62])
def test_key_outside(key):
    lookup = core.Lookup([4, key, 5], 0, [0, 1, 3])
    with pytest.raises(IndexError, match=rf"table 'table0'.*key {key}.*\[0, 10\)"):
        core.route_bags(two_tables(), [lookup])


@pytest.mark.parametrize("splits", [[1, 3], [0, 2], [0, 4], [0, 2, 1, 3], [0, -1, 3], [0, 2**40, 3]])
def test_bad_row_splits(splits):
    with pytest.raises(ValueError, match="row_splits"):
        core.route_bags(two_tables(), [core.Lookup([4, 6, 5], 0, splits)])


def test_buffers_that_do_not_fit():
    tables = two_tables()
    lookups = [core.Lookup([1, 2], 0, [0, 2]), core.Lookup([1], 1, [0, 1])]
    scales, sums = np.ones(2, np.float32), np.ones(8, np.float32)
    core.combine_bags(tables, lookups, scales, sums)
    for bad in (sums[:-1], sums.astype(np.float64), sums.reshape(4, 2)):
        with pytest.raises(ValueError, match="sums"):
            core.combine_bags(tables, lookups, scales, bad)
    for bad in (scales[:-1], scales.astype(np.float64)):
        with pytest.raises(ValueError, match="scales"):
            core.combine_bags(tables, lookups, bad, sums)
        with pytest.raises(ValueError, match="scales"):
            core.spread_bags(tables, lookups, [None, None], bad)
    with pytest.raises(ValueError, match="output_gradients"):
        core.spread_bags(tables, lookups, [None, np.ones((2, 2), np.float32)], scales)


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
    assert core.choose_pooling(tables, lookups) == [True, False, True, False, False, False, False, False, False]
    monkeypatch.setenv("SOK_POOLING", "owner")
    assert core.choose_pooling(tables, lookups) == [True, True, True, True, True, False, False, True, False]
    monkeypatch.setenv("SOK_POOLING", "requester")
    assert not any(core.choose_pooling(tables, lookups))
    monkeypatch.setenv("SOK_POOLING", "sometimes")
    with pytest.raises(ValueError, match="SOK_POOLING is 'sometimes'"):
        core.choose_pooling(tables, lookups)


def test_copy():
    sources = [np.arange(5), np.zeros(0, np.float32), np.array([1.5], np.float32)]
    targets = [np.zeros(5, np.int64), np.zeros(0, np.float32), np.zeros(1, np.float32)]
    core.copy(sources, targets)
    assert all(np.array_equal(a, b) for a, b in zip(sources, targets, strict=True))
    with pytest.raises(ValueError, match=r"targets\[1\]"):
        core.copy(sources[:2], [targets[0], np.zeros(1, np.float32)])
    with pytest.raises(ValueError, match=r"targets\[0\]"):
        core.copy([np.arange(5)], [np.zeros(5, np.int32)])
