# SPDX-License-Identifier: Apache-2.0
"""How many buckets a key takes, and the limits of the kernels of a hash index."""

import functools

import pytest

from benchmarks.hash_index_limits import ENTRY_UPDATES, MOST_IN_USE, Buckets, buckets, limits
from sparse_operation_kit.hybrid.topology import H200

COPY = 4e12
of_h200 = functools.partial(limits, read=H200.device.read, updates=ENTRY_UPDATES["NVIDIA H200"], copy=COPY)


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
    per_key = Buckets(1.25, 1.5, 2.0)
    one = {"read": 1 / 32e9, "row": 1 / 17.2e9, "updated": 1 / 11.3e9}
    assert of_h200("find", 1.0, 10, per_key) == {"find_kernel": pytest.approx(10 * (1.25 * one["read"] + 16 / COPY))}
    assert of_h200("find", 0.5, 1, per_key, row_bytes=256) == {
        "read_rows_kernel": pytest.approx(1.375 * one["read"] + 0.5 * one["row"] + 264 / COPY)
    }
    inserted = of_h200("find_or_insert", 0.0, 1, per_key, row_bytes=256)
    assert list(inserted) == ["find_kernel", "count_kernel", "insert_kernel", "read_rows_kernel"]
    assert inserted["find_kernel"] == pytest.approx(1.5 * one["read"] + 25 / COPY)
    assert inserted["insert_kernel"] == pytest.approx(2 * one["updated"] + 34 / COPY)
    assert inserted["read_rows_kernel"] == pytest.approx((17 + 512) / COPY)
    erased = of_h200("erase", 1.0, 1, per_key)
    assert erased["erase_kernel"] == pytest.approx(1.25 * one["updated"] + 29 / COPY)


def test_kernels_that_end_at_once_have_no_limit():
    assert list(of_h200("find_or_insert", 1.0, 1, Buckets(1, 1, 1))) == ["find_kernel"]
