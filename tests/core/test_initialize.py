# SPDX-License-Identifier: Apache-2.0
"""initialize: Philox known answers, distributions, and one value for a key however the table is sharded."""

import itertools
import math
import statistics

import harness
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core

SEEDS = [0, 1, 2**32, 0x13198A2E03707344, 2**64 - 1]
KEYS = [0, 1, 5, 2**31, 2**32 + 7, 2**62, -1, -5, -(2**31), -(2**63), 2**63 - 1]
UNIFORM = core.Initializer("uniform", 0.0, 1.0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_is_philox(counter, key, words):
    """The known answers of the authors' Random123 library."""
    assert reference.philox(counter, key) == words


BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def uniform_of(words):
    """Each word as a number in [0, 1), rounded to float32 but never up to 1."""
    return np.minimum(np.array([word * 2.0**-32 for word in words], np.float32), BELOW_ONE)


def test_first_known_answer():
    """Seed 0, key 0, columns 0 to 3 are the words of counter 0 and key 0."""
    row = core.initialize(UNIFORM, 1, 4)
    assert np.array_equal(row[0], uniform_of((0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)))


@pytest.mark.every_isa
@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_is_philox(seed):
    rows = core.initialize(core.Initializer("uniform", 0.0, 1.0, seed), len(KEYS), 11, keys=KEYS)
    for key, row in zip(KEYS, rows, strict=True):
        words = [reference.random_words(seed, key, column)[column % 4] for column in range(11)]
        assert np.array_equal(row, uniform_of(words)), key


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["normal", "truncated_normal"])
def test_normal_is_the_quantile_of_philox(kind, seed):
    """One word a value, through the inverse of the normal distribution; the next draw while it lies too far out."""
    keys = [*KEYS, *range(100, 200)]
    rows = core.initialize(core.Initializer(kind, 0.5, 2.0, seed), len(keys), 7, keys=keys)
    for key, row in zip(keys, rows, strict=True):
        for column in range(7):
            for draw in itertools.count():
                word = reference.random_words(seed, key, column, draw)[column % 4]
                z = statistics.NormalDist().inv_cdf((word + 0.5) * 2.0**-32)
                if kind == "normal" or abs(z) <= 2:
                    break
            assert abs(row[column] - (0.5 + 2 * z)) <= 1e-6 * max(1, abs(row[column])), (key, column)


KINDS = [
    core.Initializer("constant", 0.25),
    core.Initializer("uniform", -0.5, 1.5, 3),
    core.Initializer("normal", 2.0, 0.5, 3),
    core.Initializer("truncated_normal", -1.0, 0.25, 3),
]


@given(
    st.sampled_from(KINDS),
    st.integers(1, 40),
    st.integers(1, 70),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(KEYS), max_size=20),
)
def test_a_value_depends_on_seed_key_and_column_only(initializer, narrow, wide, keys):
    narrow, wide = min(narrow, wide), max(narrow, wide)
    rows = core.initialize(initializer, len(keys), wide, keys=np.array(keys, np.int64))
    assert harness.same_bytes(
        core.initialize(initializer, len(keys), narrow, keys=np.array(keys, np.int64)),
        np.ascontiguousarray(rows[:, :narrow]),
    )
    for key, row in zip(keys, rows, strict=True):
        assert harness.same_bytes(core.initialize(initializer, 1, wide, first_key=key)[0], row)


@pytest.mark.every_isa
@pytest.mark.parametrize("initializer", KINDS, ids=lambda x: x.kind)
def test_same_values_for_any_sharding(initializer, pools):
    whole = core.initialize(initializer, 1001, 19)
    for num_ranks in (1, 2, 3, 8):
        for rank in range(num_ranks):
            held = core.local_rows(1001, -1, num_ranks, rank)
            shard = core.initialize(initializer, held, 19, first_key=rank, key_stride=num_ranks)
            assert harness.same_bytes(shard, np.ascontiguousarray(whole[rank::num_ranks]))
    for context in pools:
        assert harness.same_bytes(core.initialize(initializer, 1001, 19, context=context), whole)


def test_seeds_keys_and_columns_differ():
    rows = core.initialize(core.Initializer("uniform", 0.0, 1.0, 1), 2000, 32)
    other = core.initialize(core.Initializer("uniform", 0.0, 1.0, 2), 2000, 32)
    assert len(np.unique(rows)) > 0.99 * rows.size
    assert np.mean(rows == other) < 1e-3
    for a, b in [(rows[:-1], rows[1:]), (rows[:, :-1], rows[:, 1:]), (rows, other)]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def moments(values):
    values = values.astype(np.float64).ravel()
    mean, deviation = values.mean(), values.std()
    normal = (values - mean) / deviation
    return mean, deviation, np.mean(normal**3), np.mean(normal**4)


N = 4000 * 50  # samples below; the bounds are about five standard errors


def test_uniform():
    values = core.initialize(core.Initializer("uniform", -0.5, 1.5, 5), 4000, 50)
    assert values.min() >= -0.5
    assert values.max() < 1.5
    mean, deviation, skew, kurtosis = moments(values)
    assert abs(mean - 0.5) < 5 * 0.58 / math.sqrt(N)
    assert abs(deviation - 2 / math.sqrt(12)) < 0.005
    assert abs(skew) < 0.02
    assert abs(kurtosis - 1.8) < 0.02
    counts, _ = np.histogram(values, 20, (-0.5, 1.5))
    assert np.sum((counts - N / 20) ** 2) / (N / 20) < 50


def test_normal():
    values = core.initialize(core.Initializer("normal", 2.0, 0.5, 5), 4000, 50)
    mean, deviation, skew, kurtosis = moments(values)
    assert abs(mean - 2) < 5 * 0.5 / math.sqrt(N)
    assert abs(deviation - 0.5) < 0.005
    assert abs(skew) < 0.03
    assert abs(kurtosis - 3) < 0.06
    beyond = np.mean(abs(values - 2) > 1.0)
    assert abs(beyond - 0.0455) < 0.0025


def test_truncated_normal():
    values = core.initialize(core.Initializer("truncated_normal", -1.0, 0.25, 5), 4000, 50)
    assert abs(values + 1).max() <= 0.5 * (1 + 1e-6)
    mean, deviation, skew, kurtosis = moments(values)
    assert abs(mean + 1) < 5 * 0.22 / math.sqrt(N)
    assert abs(deviation - 0.25 * 0.8796) < 0.003
    assert abs(skew) < 0.03
    assert abs(kurtosis - 2.37) < 0.05


def test_constant_and_degenerate():
    assert np.array_equal(core.initialize(core.Initializer("constant", 0.1), 3, 5), np.full((3, 5), 0.1, np.float32))
    for kind in ("normal", "truncated_normal", "uniform"):
        b = 1.5 if kind == "uniform" else 0.0
        assert np.array_equal(core.initialize(core.Initializer(kind, 1.5, b), 3, 5), np.full((3, 5), 1.5, np.float32))
    assert core.initialize(UNIFORM, 0, 5).shape == (0, 5)


def test_uniform_never_reaches_its_end():
    """Rounding a + (b - a) u up to b would leave the half-open range."""
    for a, b in [(0.0, 1e-38), (1.0, np.nextafter(np.float32(1), np.float32(2))), (-1e30, 1e30), (1e8, 1e8 + 8)]:
        values = core.initialize(core.Initializer("uniform", float(a), float(b), 9), 500, 20)
        assert values.min() >= np.float32(a)
        assert values.max() < np.float32(b)


def test_keys_that_run_over():
    """first_key + i * key_stride wraps around as 64-bit integers do; it neither fails nor is undefined."""
    rows = core.initialize(UNIFORM, 3, 4, first_key=2**63 - 1, key_stride=1)
    keys = np.array([2**63 - 1, -(2**63), -(2**63) + 1])
    assert harness.same_bytes(rows, core.initialize(UNIFORM, 3, 4, keys=keys))
