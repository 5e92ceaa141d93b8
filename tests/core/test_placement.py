# SPDX-License-Identifier: Apache-2.0
"""Where a key is at home: the core's arithmetic, the package's and the reference's are one, for negative keys too."""

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core
from sparse_operation_kit.placement import Placement

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9), min_size=1, max_size=12)


@given(KEYS, st.integers(1, 5), st.data())
def test_any_keys_are_routed(keys, num_ranks, data):
    owner = data.draw(st.integers(-1, num_ranks - 1))
    expected = [key % num_ranks if owner < 0 else owner for key in keys]
    table = core.Table(None, core.ANY_KEY, 1, "any", owner, num_ranks)
    routing = core.route([table], [core.Lookup(np.array(keys), row_splits=[0, len(keys)])], pooled=[True])
    assert routing.counts[:, 1].tolist() == [expected.count(rank) for rank in range(num_ranks)]
    assert routing.bag_keys.tolist() == [
        k for rank in range(num_ranks) for k, r in zip(keys, expected, strict=True) if r == rank
    ]
    # Without duplicates, and ascending on each rank.
    routing = core.route([table], [core.Lookup(np.array(keys), row_splits=[0, len(keys)])])
    unique = [sorted({k for k, r in zip(keys, expected, strict=True) if r == rank}) for rank in range(num_ranks)]
    assert routing.counts[:, 0].tolist() == list(map(len, unique))
    sent = [key for of_rank in unique for key in of_rank]
    assert routing.keys[: len(sent)].tolist() == sent
    assert routing.inverse.tolist() == [sent.index(key) for key in keys]  # of rows of one number


@given(KEYS, st.integers(1, 5), st.data())
def test_ranks_of_any_keys(keys, num_ranks, data):
    owner = data.draw(st.integers(-1, num_ranks - 1))
    expected = [key % num_ranks if owner < 0 else owner for key in keys]
    place = Placement(1, 1, owner, num_ranks)
    assert [place.owner_of(key) for key in keys] == expected
    assert place.owner_of(np.array(keys)).tolist() == expected
    slots = [key // num_ranks if owner < 0 else key for key in keys]
    assert [place.key_map(key) for key in keys] == slots
    assert place.key_map(np.array(keys)).tolist() == slots
    for key, rank, slot in zip(keys, expected, slots, strict=True):
        assert Placement(1, 1, owner, num_ranks, rank).global_keys(slot) == key


@given(KEYS, st.integers(1, 5), st.data())
def test_owners_take_their_keys_alone(keys, num_ranks, data):
    owner, rank = data.draw(st.integers(-1, num_ranks - 1)), data.draw(st.integers(0, num_ranks - 1))
    index = core.Index(lambda keys, insert: np.arange(len(keys)))
    table = core.Table(None, core.ANY_KEY, 1, "any", owner, num_ranks, rank, index)
    mine = [key for key in keys if (key % num_ranks if owner < 0 else owner) == rank]
    assert core.locate([table], np.array(mine, np.int64), [[len(mine)]]).tolist() == list(range(len(mine)))
    for key in set(keys) - set(mine):
        with pytest.raises(IndexError, match=rf"table 'any': key {key} belongs to rank"):
            core.locate([table], np.array([key]), [[1]])


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_slots_of_static_tables(num_rows, num_ranks, data):
    owner = data.draw(st.integers(-1, num_ranks - 1))
    expected = reference.Placement(num_rows, 1, owner, num_ranks)
    for rank in range(num_ranks):
        keys = expected.keys_of(rank)
        table = core.Table(None, num_rows, 1, "t", owner, num_ranks, rank)
        assert core.locate([table], keys, [[len(keys)]]).tolist() == list(range(len(keys)))
        place = Placement(num_rows, 1, owner, num_ranks, rank)
        assert core.local_rows(num_rows, owner, num_ranks, rank) == place.local_rows == len(keys)
        assert place.global_keys(np.arange(len(keys))).tolist() == keys.tolist()
