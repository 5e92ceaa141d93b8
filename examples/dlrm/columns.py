# SPDX-License-Identifier: Apache-2.0
"""The columns of Criteo's click logs: a label, 13 counts, 26 categories."""

from __future__ import annotations

LABEL = "label"
DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
ALL = (LABEL, *DENSE, *CATEGORICAL)

# Distinct values of C1..C26 in the Kaggle Display Advertising Challenge data set, which has 45,840,617 rows.
CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip

# Roughly the fraction of empty fields in each column of the same data set.
DENSE_MISSING = (0.45, 0.0, 0.17, 0.18, 0.03, 0.25, 0.05, 0.0, 0.05, 0.45, 0.05, 0.78, 0.18)
CATEGORICAL_MISSING = (
    0.0, 0.0, 0.04, 0.04, 0.0, 0.14, 0.0, 0.0, 0.0, 0.0, 0.0, 0.04, 0.0,
    0.0, 0.0, 0.04, 0.0, 0.0, 0.42, 0.42, 0.04, 0.78, 0.0, 0.04, 0.42, 0.42,
)  # fmt: skip


def table_rows(max_rows: int) -> tuple[int, ...]:
    """Rows of the 26 tables: a column's cardinality, at most `max_rows`."""
    if max_rows < 1:
        raise ValueError(f"a table needs at least one row, not {max_rows}")
    return tuple(min(cardinality, max_rows) for cardinality in CARDINALITIES)
