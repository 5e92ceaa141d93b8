# SPDX-License-Identifier: Apache-2.0
"""bags_from_coordinates against the reference."""

import harness
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core


@given(st.integers(1, 20), st.data())
def test_any_rows(num_bags, data):
    rows = np.array(data.draw(st.lists(st.integers(0, num_bags - 1), max_size=60)), np.int64)
    expected = reference.bags_from_coordinates(rows, num_bags)
    splits, order, is_sorted = core.bags_from_coordinates(rows, num_bags)
    assert np.array_equal(splits, expected[0])
    assert np.array_equal(order, expected[1])
    assert is_sorted == expected[2]
    columns = data.draw(st.integers(1, 3))
    indices = np.full((len(rows), columns), -7)
    indices[:, 0] = rows
    assert harness.same_bytes(core.bags_from_coordinates(indices, num_bags)[:2], [splits, order])


def test_many_rows(pools):
    rng = np.random.default_rng(1)
    for rows in (rng.integers(0, 3000, 50_000), np.sort(rng.integers(0, 3000, 50_000)), np.full(50_000, 2999)):
        expected = reference.bags_from_coordinates(rows, 3000)
        for context in [None, *pools]:
            splits, order, is_sorted = core.bags_from_coordinates(rows, 3000, context=context)
            assert np.array_equal(splits, expected[0])
            assert np.array_equal(order, expected[1])
            assert is_sorted == expected[2]


def test_no_bags():
    splits, order, is_sorted = core.bags_from_coordinates(np.zeros(0, np.int64), 0)
    assert splits.tolist() == [0]
    assert order.size == 0
    assert is_sorted


@pytest.mark.parametrize("row", [-1, 3, 2**40])
def test_row_out_of_range(row):
    with pytest.raises(IndexError) as error:
        core.bags_from_coordinates(np.array([0, row, 2]), 3)
    assert str(row) in str(error.value)
    assert "3" in str(error.value)


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_bags"):
        core.bags_from_coordinates(np.zeros(1, np.int64), -1)
    with pytest.raises(ValueError, match="rows"):
        core.bags_from_coordinates(np.zeros(1, np.float32), 1)
    with pytest.raises(IndexError):
        core.bags_from_coordinates(np.zeros(1, np.int64), 0)
