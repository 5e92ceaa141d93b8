# SPDX-License-Identifier: Apache-2.0
"""Keys and rows of tables with more than 2^31 rows on a GPU, for tests of both frontends and of several ranks."""

BATCH = 1 << 24
ROWS = (1 << 31) + BATCH
MEMORY = 120 << 30  # of a table on a GPU, with states and scores 50 bytes per row, and of calls beside it


def keys_of(numbers):
    """Different keys for different int64 numbers, of all bits: an odd factor is a permutation of 64 bits."""
    return numbers * -7046029254386353131


def values_of(numbers):
    """The value of each number's row, none 0. float32 has a tenth of each."""
    return 1 + numbers % 1_000_003
