# SPDX-License-Identifier: Apache-2.0
"""route against the reference: unique keys by rank, table and value, and the way back."""

import cases
import harness
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core


def unplaced(call, num_ranks, rank=0):
    """Tables without rows: route does not touch them."""
    result = []
    for t, table in enumerate(call.tables):
        owner = table.placement(num_ranks).owner
        result.append(core.Table(None, table.num_rows, table.dimension, f"table{t}", owner, num_ranks, rank))
    return result


def check(call, num_ranks, context=None):
    routing = core.route(unplaced(call, num_ranks), harness.lookups(call), context=context)
    placements = [table.placement(num_ranks) for table in call.tables]
    expected = reference.route(placements, [(x.table, x.keys) for x in call.lookups])
    num_unique = len(expected.keys)
    assert np.array_equal(routing.counts, expected.counts)
    assert routing.num_unique == num_unique
    assert np.array_equal(routing.keys[:num_unique], expected.keys)
    assert np.array_equal(routing.inverse, expected.inverse)
    splits = routing.unique_splits[: num_unique + 1]
    assert splits[0] == 0
    assert splits[-1] == len(routing.order)
    assert np.array_equal(np.sort(routing.order), np.arange(len(routing.order)))
    for u, group in enumerate(expected.groups):
        assert set(routing.order[splits[u] : splits[u + 1]].tolist()) == group
    return routing


@pytest.mark.every_isa
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("call", cases.CASES, ids=lambda call: call.name)
def test_cases(call, num_ranks):
    check(call, num_ranks)


@given(cases.calls(max_dimension=64, bagless=True), st.integers(1, 9))
def test_any_call(call, num_ranks):
    check(call, num_ranks)


def test_large_keys():
    """Row numbers that do not fit 32 bits: radix sorts must look at all bytes."""
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 2**60, 5000)
    keys = np.r_[keys, keys[:500], 0, 2**60 - 1, 2**60 - 1]
    for owner in (-1, 1):
        table = core.Table(None, 2**60, 3, "big", owner, 3)
        routing = core.route([table], [core.Lookup(keys)])
        unique = np.unique(keys)
        expected = [unique[unique % 3 == r] for r in range(3)] if owner < 0 else [unique]
        assert np.array_equal(routing.keys[: routing.num_unique], np.concatenate(expected))
        assert np.array_equal(routing.keys[routing.inverse // 3], keys)


@pytest.mark.every_isa
def test_workers_do_not_change_a_bit(pools):
    call = harness.LARGE
    for num_ranks in (1, 3):
        alone = core.route(unplaced(call, num_ranks), harness.lookups(call))
        end = alone.num_unique
        for context in pools:
            other = core.route(unplaced(call, num_ranks), harness.lookups(call), context=context)
            assert harness.same_bytes(other.counts, alone.counts)
            assert harness.same_bytes(other.keys[:end], alone.keys[:end])
            assert harness.same_bytes(other.inverse, alone.inverse)
            assert harness.same_bytes(other.order, alone.order)
            assert harness.same_bytes(other.unique_splits[: end + 1], alone.unique_splits[: end + 1])


@pytest.mark.parametrize("num_rows", [30_000, 2**40])
def test_so_many_keys_that_workers_sort_together(num_rows, pools):
    """More entries of one table than a worker's share: 32-bit and 64-bit sorts in several chunks."""
    rng = np.random.default_rng(8)
    keys = rng.integers(0, num_rows, 30_000)[rng.integers(0, 30_000, 200_000)]
    keys[rng.random(200_000) < 0.4] = keys[0]  # a group that runs over chunks
    tables = [core.Table(None, num_rows, 3, "big", -1, 2), core.Table(None, 10, 2, "small", 1, 2)]
    lookups = [core.Lookup(keys[:150_000]), core.Lookup([3, 3, 9], table=1), core.Lookup(keys[150_000:])]
    unique, inverse = np.unique(keys, return_inverse=True)
    sent = [unique[unique % 2 == 0], unique[unique % 2 == 1], np.array([3, 9])]
    for context in [None, *pools]:
        routing = core.route(tables, lookups, context=context)
        end = routing.num_unique
        assert routing.counts.tolist() == [[len(sent[0]), 0], [len(sent[1]), 2]]
        assert np.array_equal(routing.keys[:end], np.concatenate(sent))
        assert np.array_equal(routing.keys[routing.inverse[:150_000] // 3], keys[:150_000])
        assert np.array_equal(routing.keys[routing.inverse[150_003:] // 3], keys[150_000:])
        splits = routing.unique_splits[: end + 1]
        of_entry = np.empty(200_003, np.int64)
        of_entry[routing.order] = np.repeat(np.arange(end), np.diff(splits))
        assert np.array_equal(routing.keys[of_entry[:150_000]], keys[:150_000])
        assert np.array_equal(np.diff(splits)[: len(sent[0])], np.bincount(inverse)[unique % 2 == 0])


@pytest.mark.parametrize("dtype", cases.KEY_DTYPES)
@pytest.mark.parametrize("key", [-1, 17, -(2**31)])
def test_key_out_of_range(dtype, key):
    tables = [core.Table(None, 100, 2, "fine", -1, 2), core.Table(None, 17, 4, "item", 1, 2)]
    lookups = [core.Lookup(np.array([99], dtype)), core.Lookup(np.array([16, key], dtype), table=1)]
    with pytest.raises(IndexError) as error:
        core.route(tables, lookups)
    assert "item" in str(error.value)
    assert str(key) in str(error.value)
    assert "[0, 17)" in str(error.value)


def test_tables_of_different_worlds():
    tables = [core.Table(None, 10, 2, "a", -1, 2), core.Table(None, 10, 2, "b", -1, 3)]
    with pytest.raises(ValueError, match=r"table 'b'.*3.*table 'a'.*2"):
        core.route(tables, [core.Lookup([1])])


def test_nothing_to_route():
    routing = core.route([core.Table(None, 10, 2, num_ranks=3)], [])
    assert routing.num_unique == 0
    assert np.array_equal(routing.counts, np.zeros((3, 1)))
