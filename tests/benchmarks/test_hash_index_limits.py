# SPDX-License-Identifier: Apache-2.0
"""How many buckets a key takes, and the limits of the kernels of a hash index."""

import pytest

from benchmarks.hash_index_limits import MOST_IN_USE, RATES, Buckets, buckets, limits

H200 = RATES["NVIDIA H200"]


def test_a_key_takes_one_bucket_while_there_is_room():
    assert buckets(0.01) == Buckets(1.0, 1.0, 1.0)


def test_buckets_are_those_of_the_documentation():
    for load, expected in ((0.5, (1.00, 1.00)), (0.75, (1.04, 1.02)), (1.0, (1.18, 1.15))):
        found = buckets(load * MOST_IN_USE, seed=1)
        assert (found.hit, found.miss) == pytest.approx(expected, abs=0.01)
        assert found.inserted >= found.hit


def test_the_next_key_takes_what_the_last_ones_took():
    """The mean of a hit is the mean of all insertions so far."""
    means = [buckets(MOST_IN_USE * (i + 0.5) / 20).inserted for i in range(20)]
    assert sum(means) / 20 == pytest.approx(buckets(MOST_IN_USE).hit, abs=0.01)


def test_limits_count_each_access():
    per_key, copy = Buckets(1.25, 1.5, 2.0), 4e12
    one = {"read": 1 / 32e9, "row": 1 / 17.2e9, "updated": 1 / 11.3e9}
    assert limits("find", 1.0, 10, per_key, H200, copy) == {
        "find_kernel": pytest.approx(10 * (1.25 * one["read"] + 16 / copy))
    }
    assert limits("find", 0.5, 1, per_key, H200, copy, 256) == {
        "read_rows_kernel": pytest.approx(1.375 * one["read"] + 0.5 * one["row"] + 264 / copy)
    }
    inserted = limits("find_or_insert", 0.0, 1, per_key, H200, copy, 256)
    assert list(inserted) == ["find_kernel", "count_kernel", "insert_kernel", "read_rows_kernel"]
    assert inserted["find_kernel"] == pytest.approx(1.5 * one["read"] + 25 / copy)
    assert inserted["insert_kernel"] == pytest.approx(2 * one["updated"] + 34 / copy)
    assert inserted["read_rows_kernel"] == pytest.approx((17 + 512) / copy)
    erased = limits("erase", 1.0, 1, per_key, H200, copy)
    assert erased["erase_kernel"] == pytest.approx(1.25 * one["updated"] + 29 / copy)


def test_kernels_that_end_at_once_have_no_limit():
    assert list(limits("find_or_insert", 1.0, 1, Buckets(1, 1, 1), H200, 4e12)) == ["find_kernel"]
