# SPDX-License-Identifier: Apache-2.0
"""assign: rows by slot."""

import cases
import harness
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core


@given(st.integers(1, 60), cases.dimensions(100), st.sampled_from(cases.KEY_DTYPES), st.data())
def test_rows_land_where_the_slots_say(num_slots, dimension, dtype, data):
    slots = data.draw(st.lists(st.integers(0, num_slots - 1), max_size=30))
    values = np.random.default_rng(num_slots).random((len(slots), dimension), np.float32)
    weight = np.zeros((num_slots, dimension), np.float32)
    expected = weight.copy()
    for slot, value in zip(slots, values, strict=True):  # of equal slots the last one counts
        expected[slot] = value
    core.assign(core.Table(weight), np.array(slots, dtype), values)
    assert np.array_equal(weight, expected)


def test_no_rows_here():
    """A rank may hold none of a table's rows."""
    empty = core.Table(np.zeros((0, 3), np.float32), name="clicks")
    core.assign(empty, [], np.zeros((0, 3), np.float32))
    with pytest.raises(IndexError, match=r"clicks.*slot 0 is outside \[0, 0\)"):
        core.assign(empty, [0], np.ones((1, 3), np.float32))


def test_the_last_of_many_equal_slots_counts(pools):
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
@pytest.mark.parametrize("slot", [-1, 6, 2**30])
def test_a_slot_outside(slot, dtype, pools):
    weight = np.zeros((6, 3), np.float32)
    table = core.Table(weight, name="clicks")
    for context in [None, *pools]:
        with harness.unchanged(weight), pytest.raises(IndexError, match=rf"clicks.*slot {slot} .*\[0, 6\)"):
            core.assign(table, np.array([1, 3, slot, 5], dtype), np.ones((4, 3), np.float32), context=context)


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
    with pytest.raises(ValueError, match="slots"):
        core.assign(table, [0.0], np.ones((1, 3), np.float32))
