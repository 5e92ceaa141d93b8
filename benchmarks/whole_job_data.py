# SPDX-License-Identifier: Apache-2.0
"""Data and model of benchmarks.whole_job: DLRM's shape, with 26 tables of one size and no missing fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa

from benchmarks.cases import ZIPF_EXPONENT
from examples.dlrm import columns, writing
from examples.dlrm.dataset import Split
from examples.dlrm.features import Batch, CriteoLayout, Features
from examples.dlrm.options import Option
from examples.dlrm.parquet_source import ParquetSource
from examples.dlrm.power_law import BoundedPowerLaw, scatter
from examples.dlrm.reader import Reader
from examples.dlrm.settings import Settings


@dataclasses.dataclass(frozen=True)
class Job(Settings):
    """The demo's model with tables of `max_table_rows` rows each."""

    def table_rows(self) -> tuple[int | None, ...]:
        """See Settings."""
        return (self.max_table_rows,) * len(columns.CATEGORICAL)

    def reader(self, batches: int, rank: int = 0, num_ranks: int = 1) -> Reader[Features, Batch]:
        """Reads a rank's part of so many batches: the files of the training rows again and again."""
        files = sorted((self.data / "train").glob("*.parquet"))
        times = -(-batches * self.batch_size // ParquetSource(files).rows)
        split, layout = Split(ParquetSource(files * times)), CriteoLayout(self.table_rows())
        return Reader(split, self.batch_size, layout, rank=rank, num_ranks=num_ranks)


@dataclasses.dataclass(frozen=True)
class Recipe(writing.Recipe):
    """All that determines the generated rows and files."""

    table_rows: Annotated[int, Option("rows of a table", least=1)] = 1_000_000

    def maker(self) -> writing.RowMaker:
        """See the base class."""
        return _RowMaker(self)


class _RowMaker:
    """Makes the rows of one group: a click is more likely the larger the first count is."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._ranks = BoundedPowerLaw(recipe.table_rows, ZIPF_EXPONENT)

    def make(self, split: int, group: int, rows: int) -> writing.Made:
        """See RowMaker."""
        generator = np.random.default_rng([self._recipe.seed, split, group])
        normal = generator.standard_normal((len(columns.DENSE), rows))
        probabilities = 1.0 / (1.0 + np.exp(1.0 - normal[0]))
        labels = (generator.random(rows) < probabilities).astype(np.int8)
        counts = np.floor(np.exp(1.2 * normal + 2.0)).astype(np.int32)
        ids = [
            scatter(self._ranks.sample(generator, rows), self._recipe.table_rows, self._recipe.seed + place)
            for place in range(len(columns.CATEGORICAL))
        ]
        return pa.table([labels, *counts, *ids], names=list(columns.ALL)), probabilities, labels


def make(folder: Path, rows: int, table_rows: int, seed: int) -> None:
    """Leaves the data set in `folder`, unless it is there. Raises FileExistsError where other data is."""
    writing.generate(folder, Recipe(rows=rows, valid_rows=1, seed=seed, rows_per_group=8192, table_rows=table_rows))
