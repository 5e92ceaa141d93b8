# SPDX-License-Identifier: Apache-2.0
"""The sizes that benchmarks run, in one place, and the batches made from them."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: `tables` tables of `rows` x `dimension`, each read by `batch` bags of `keys_per_bag` keys."""

    name: str
    tables: int
    rows: int
    dimension: int
    batch: int
    keys_per_bag: int
    distribution: str = "uniform"
    combiner: str = "sum"

    @property
    def lookups(self) -> int:
        """Entries of one batch, all tables together."""
        return self.tables * self.batch * self.keys_per_bag


CASES = {
    case.name: case
    for case in [
        Case("cpu-1", 26, 100_000, 64, 2048, 1),
        Case("cpu-10", 26, 100_000, 64, 2048, 10),
        Case("cpu-1-zipf", 26, 100_000, 64, 2048, 1, "zipf"),
        Case("cpu-10-zipf", 26, 100_000, 64, 2048, 10, "zipf"),
        Case("A", 26, 1_000_000, 128, 65536, 1),
        Case("A-zipf", 26, 1_000_000, 128, 65536, 1, "zipf"),
        Case("B", 10, 1_000_000, 64, 65536, 10),
        Case("B-zipf", 10, 1_000_000, 64, 65536, 10, "zipf"),
        Case("C", 100, 8192, 4, 8192, 10),
        Case("D", 26, 1_000_000, 16, 65536, 1),
        # What dynamicemb publishes figures of: 1,048,580 keys a step, no pooling.
        Case("dynamicemb", 10, 1_680_000, 128, 104_858, 1, "zipf"),
    ]
}
ZIPF_EXPONENT = 1.05


@dataclasses.dataclass(frozen=True)
class Batch:
    """Keys of one step: `keys[t]` int64 [batch * keys_per_bag] for table t; every bag holds `keys_per_bag` of them."""

    keys: list[np.ndarray]
    row_splits: np.ndarray  # int64 [batch + 1], the same for each table


def _draw(case: Case, generator: np.random.Generator) -> np.ndarray:
    count = case.batch * case.keys_per_bag
    if case.distribution == "uniform":
        return generator.integers(0, case.rows, count)
    # Bounded power law by inverting its continuous distribution function; ranks are scattered over the table so that
    # hot rows are not neighbours in memory.
    power = 1.0 - ZIPF_EXPONENT
    rank = ((generator.random(count) * ((case.rows + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power)).astype(np.int64) - 1
    return (np.clip(rank, 0, case.rows - 1) * 7_368_787) % case.rows


def make_batches(case: Case, count: int, seed: int) -> list[Batch]:
    """`count` different batches, the same for each subject that is given the same seed."""
    generator = np.random.default_rng(seed)
    splits = np.arange(case.batch + 1, dtype=np.int64) * case.keys_per_bag
    return [Batch([_draw(case, generator) for _ in range(case.tables)], splits) for _ in range(count)]


def raw_ids(numbers: np.ndarray) -> np.ndarray:
    """Ids for dynamic tables, any int64, one for each number of a row."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def make_output_gradient(case: Case, seed: int) -> np.ndarray:
    """float32 [batch, dimension], used as the gradient of each table's output."""
    return np.random.default_rng(seed + 1).standard_normal((case.batch, case.dimension), dtype=np.float32)
