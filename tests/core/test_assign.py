# SPDX-License-Identifier: Apache-2.0
"""assign: rows by global key."""

import cases
import harness
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core


@given(
    st.integers(1, 60),
    cases.dimensions(100),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(cases.KEY_DTYPES),
    st.data(),
)
def test_rows_land_where_the_keys_say(num_rows, dimension, num_ranks, localized, dtype, data):
    rank = data.draw(st.integers(0, num_ranks - 1))
    owner = rank if localized else -1
    placement = cases.Table(num_rows, dimension, owner).placement(num_ranks)
    mine = placement.keys_of(rank)
    keys = data.draw(st.lists(st.sampled_from(mine.tolist()), max_size=30)) if len(mine) else []
    values = np.random.default_rng(num_rows).random((len(keys), dimension), np.float32)
    weight = np.zeros((len(mine), dimension), np.float32)
    expected = weight.copy()
    for key, value in zip(keys, values, strict=True):  # of equal keys the last one counts
        expected[placement.slot_of(key)] = value
    table = core.Table(weight, num_rows, dimension, "t", owner, num_ranks, rank)
    core.assign(table, np.array(keys, dtype), values)
    assert np.array_equal(weight, expected)


def test_the_last_of_many_equal_keys_counts(pools):
    rng = np.random.default_rng(4)
    keys = rng.integers(0, 50, 30_000)
    values = rng.random((30_000, 16), np.float32)
    expected = np.zeros((50, 16), np.float32)
    for key, value in zip(keys, values, strict=True):
        expected[key] = value
    for context in [None, *pools]:
        table = core.Table(np.zeros((50, 16), np.float32))
        core.assign(table, keys, values, context=context)
        assert harness.same_bytes(table.weight, expected)


def test_an_optimizer_state():
    table, state = core.Table(np.zeros((5, 2), np.float32)), np.zeros((5, 2), np.float32)
    with harness.unchanged(table.weight):
        core.assign(table, [3], np.ones((1, 2), np.float32), target=state)
    assert state[3].tolist() == [1, 1]
    assert state.sum() == 2


@pytest.mark.parametrize("dtype", cases.KEY_DTYPES)
@pytest.mark.parametrize(("key", "words"), [(-1, "[0, 11)"), (11, "[0, 11)"), (4, "rank")])
def test_a_key_that_does_not_belong_here(key, words, dtype, pools):
    weight = np.zeros((core.local_rows(11, -1, 2, 1), 3), np.float32)
    table = core.Table(weight, 11, 3, "clicks", -1, 2, 1)
    keys = np.array([1, 3, key, 5], dtype)
    for context in [None, *pools]:
        with harness.unchanged(weight), pytest.raises(IndexError) as error:
            core.assign(table, keys, np.ones((4, 3), np.float32), context=context)
        assert "clicks" in str(error.value)
        assert str(key) in str(error.value)
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (np.ones((2, 3), np.float32), "values"),
        (np.ones((3, 4), np.float32), "values"),
        (np.ones((3, 3), np.float64), "values"),
        (np.ones(3, np.float32), "values"),
    ],
)
def test_values_that_do_not_fit(values, word):
    weight = np.zeros((5, 3), np.float32)
    with harness.unchanged(weight), pytest.raises(ValueError, match=word):
        core.assign(core.Table(weight), [0, 1, 2], values)


def test_target_that_does_not_fit():
    table = core.Table(np.zeros((5, 3), np.float32))
    for target in (np.zeros((4, 3), np.float32), np.zeros((5, 2), np.float32), np.zeros((5, 3), np.float64)):
        with harness.unchanged(table.weight, target), pytest.raises(ValueError, match="target"):
            core.assign(table, [0], np.ones((1, 3), np.float32), target=target)
    with pytest.raises(ValueError, match="neither"):
        core.assign(core.Table(None, 5, 3), [0], np.ones((1, 3), np.float32))
    with pytest.raises(ValueError, match="keys"):
        core.assign(table, [0.0], np.ones((1, 3), np.float32))
