# SPDX-License-Identifier: Apache-2.0
"""Keys for tests of hash indices: the extremes, and keys whose hashes are chosen (core/src/table/hash_layout.h)."""

import numpy as np

EXTREMES = (0, -1, 1, -(2**63), 2**63 - 1, -(2**31), 2**31 - 1, 2**32)
_MASK = 2**64 - 1


def _unshift(value, bits):
    """The number whose `x ^ (x >> bits)` is value."""
    result = 0
    for shift in range(0, 64, bits):
        result ^= value >> shift
    return result


def with_hash(value):
    """The key whose hash is `value` in [0, 2^64)."""
    value = _unshift(value, 31)
    value = value * pow(0x94D049BB133111EB, -1, 2**64) & _MASK
    value = _unshift(value, 27)
    value = value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & _MASK
    value = _unshift(value, 30)
    value = (value - 0x9E3779B97F4A7C15) & _MASK
    return value - 2**64 if value >= 2**63 else value


def of_one_bucket(n, upper=0):
    """n keys that name the same buckets, in whatever segments there are: `upper` is the highest byte of their hashes,
    which differ between the bits that name buckets and classes and the highest 16."""
    return np.array([with_hash((upper << 56) | (i << 21) | 5) for i in range(n)], np.int64)
