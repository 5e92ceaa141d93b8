# SPDX-License-Identifier: Apache-2.0
"""The sizes that benchmarks run, in one place, and the batches made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: `tables` tables of `rows` x `dimension`, each read by `batch` bags of `keys_per_bag` keys.

    varying: bags hold 0 to 2 * keys_per_bag keys, each length equally often, in another order in each batch. weighted:
    each key has a weight.
    """

    name: str
    tables: int
    rows: int
    dimension: int
    batch: int
    keys_per_bag: int
    distribution: str = "uniform"
    combiner: str = "sum"
    varying: bool = False
    weighted: bool = False

    @property
    def lookups(self) -> int:
        """Entries of one batch, all tables together."""
        return self.tables * int(self.bag_lengths().sum())

    @property
    def skew(self) -> float:
        """The exponent of the power law of its keys, 0 for uniform ones."""
        return ZIPF_EXPONENT if self.distribution == "zipf" else 0.0

    @property
    def is_plain(self) -> bool:
        """Whether all bags are of one length and without weights."""
        return not (self.varying or self.weighted)

    def bag_lengths(self) -> np.ndarray:
        """int64 [batch], in order of length where they vary. So batches have as many keys as each other."""
        if not self.varying:
            return np.full(self.batch, self.keys_per_bag, np.int64)
        return np.arange(self.batch, dtype=np.int64) * (2 * self.keys_per_bag + 1) // self.batch


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
        Case("B-varying", 10, 1_000_000, 64, 65536, 10, varying=True),
        Case("B-weighted", 10, 1_000_000, 64, 65536, 10, weighted=True),
        Case("C", 100, 8192, 4, 8192, 10),
        Case("D", 26, 1_000_000, 16, 65536, 1),
        # What dynamicemb publishes figures of: 1,048,580 keys a step, no pooling.
        Case("dynamicemb", 10, 1_680_000, 128, 104_858, 1, "zipf"),
    ]
}
PLAIN = {name: case for name, case in CASES.items() if case.is_plain}
ZIPF_EXPONENT = 1.05


@dataclasses.dataclass(frozen=True)
class Batch:
    """Keys of one step: `keys[t]` int64 for table t, and `weights[t]` float32 where the case has weights."""

    keys: list[np.ndarray]
    row_splits: np.ndarray  # int64 [batch + 1], the same for each table
    weights: list[np.ndarray] | None = None


def check_taken(subject: Any, case: Case) -> None:
    """Raises NotImplementedError where bags vary or have weights, and a class of subjects does not say that its own
    take them (`takes_any_bags`)."""
    if not case.is_plain and not getattr(subject, "takes_any_bags", False):
        raise NotImplementedError("compared with bags of one length, without weights, only")


def _draw(case: Case, count: int, generator: np.random.Generator) -> np.ndarray:
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
    return [_make_batch(case, generator) for _ in range(count)]


def _make_batch(case: Case, generator: np.random.Generator) -> Batch:
    lengths = case.bag_lengths()
    if case.varying:
        generator.shuffle(lengths)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    keys = [_draw(case, int(splits[-1]), generator) for _ in range(case.tables)]
    weights = [generator.uniform(0.5, 1.5, len(each)).astype(np.float32) for each in keys] if case.weighted else None
    return Batch(keys, splits, weights)


def raw_ids(numbers: np.ndarray) -> np.ndarray:
    """Ids for dynamic tables, any int64, one for each number of a row."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def make_output_gradient(case: Case, seed: int) -> np.ndarray:
    """float32 [batch, dimension], used as the gradient of each table's output."""
    return np.random.default_rng(seed + 1).standard_normal((case.batch, case.dimension), dtype=np.float32)
