# SPDX-License-Identifier: Apache-2.0
"""The batches of the benchmarks: lengths of bags, weights, the same ones for the same seed."""

import dataclasses

import numpy as np
import pytest

from benchmarks.cases import CASES, PLAIN, Case, check_taken, make_batches

SMALL = Case("small", 3, 50, 4, 44, 10)


def test_bags_of_one_length():
    for batch in make_batches(SMALL, 2, seed=1):
        assert batch.weights is None
        np.testing.assert_array_equal(batch.row_splits, np.arange(45) * 10)
        assert all(keys.shape == (440,) and keys.min() >= 0 and keys.max() < 50 for keys in batch.keys)
    assert SMALL.lookups == 3 * 440


def test_varying_bags_have_each_length_from_none_as_often():
    case = dataclasses.replace(SMALL, varying=True, batch=42)
    batches = make_batches(case, 3, seed=1)
    for batch in batches:
        lengths = np.diff(batch.row_splits)
        np.testing.assert_array_equal(np.bincount(lengths), np.full(21, 2))
        assert all(len(keys) == batch.row_splits[-1] for keys in batch.keys)
        assert case.lookups == sum(map(len, batch.keys))
    assert not np.array_equal(batches[0].row_splits, batches[1].row_splits)


def test_weights_stand_beside_the_keys_of_the_plain_case():
    weighted = make_batches(dataclasses.replace(SMALL, weighted=True), 1, seed=7)[0]
    plain = make_batches(SMALL, 1, seed=7)[0]
    for keys, weights, expected in zip(weighted.keys, weighted.weights, plain.keys, strict=True):
        np.testing.assert_array_equal(keys, expected)
        assert weights.dtype == np.float32 and weights.shape == keys.shape
        assert weights.min() >= 0.5 and weights.max() < 1.5 and len(np.unique(weights)) > 400


def test_subjects_say_whether_they_take_such_bags():
    taking = type("Taking", (), {"takes_any_bags": True})
    for name, case in CASES.items():
        check_taken(taking, case)
        if name in PLAIN:
            check_taken(object, case)
        else:
            with pytest.raises(NotImplementedError, match="bags of one length"):
                check_taken(object, case)
