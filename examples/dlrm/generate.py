# SPDX-License-Identifier: Apache-2.0
"""Writes a Criteo-shaped data set to Parquet: `python -m examples.dlrm.generate --out DIR --rows 400000`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np
import pyarrow as pa

from . import columns, writing
from .options import Option
from .planted import PlantedRule
from .power_law import BoundedPowerLaw, scatter
from .writing import Made, main


@dataclasses.dataclass(frozen=True)
class Recipe(writing.Recipe):
    """All that determines the generated rows and files."""

    max_cardinality: Annotated[int, Option("most ids of a column", least=1)] = 100_000
    exponent: Annotated[float, Option("of the power law of the ids")] = 1.05

    def maker(self) -> writing.RowMaker:
        """See the base class."""
        return _RowMaker(self)


class _RowMaker:
    """Makes the rows of one group."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._cardinalities = columns.table_rows(recipe.max_cardinality)
        self._ranks = [BoundedPowerLaw(cardinality, recipe.exponent) for cardinality in self._cardinalities]
        self._rule = PlantedRule(self._cardinalities, len(columns.DENSE), recipe.seed)
        # Counts spread over several powers of ten, differently in each column, like Criteo's.
        shape = np.random.default_rng([recipe.seed, 2])
        self._log_mean = shape.uniform(0.5, 5.0, len(columns.DENSE))
        self._log_deviation = shape.uniform(0.8, 1.6, len(columns.DENSE))

    def make(self, split: int, group: int, rows: int) -> Made:
        """See RowMaker."""
        generator = np.random.default_rng([self._recipe.seed, 3, split, group])
        normal = generator.normal(size=(rows, len(columns.DENSE)))
        counts = np.floor(np.exp(np.minimum(normal * self._log_deviation + self._log_mean, 20.0))).astype(np.int32)
        dense_missing = generator.random(normal.shape) < columns.DENSE_MISSING
        ids = np.stack(
            [
                scatter(ranks.sample(generator, rows), cardinality, self._recipe.seed)
                for ranks, cardinality in zip(self._ranks, self._cardinalities, strict=True)
            ],
            axis=1,
        )
        id_missing = generator.random(ids.shape) < columns.CATEGORICAL_MISSING
        logits = self._rule.logits(np.where(dense_missing, 0.0, normal), ids, ~id_missing)
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        labels = (generator.random(rows) < probabilities).astype(np.int8)
        arrays = [pa.array(labels)]
        arrays += [pa.array(counts[:, i], mask=dense_missing[:, i]) for i in range(counts.shape[1])]
        arrays += [pa.array(ids[:, i], mask=id_missing[:, i]) for i in range(ids.shape[1])]
        return pa.table(arrays, names=list(columns.ALL)), probabilities, labels


if __name__ == "__main__":
    main(Recipe, "python -m examples.dlrm.generate", "Write a Criteo-shaped data set with a planted signal to Parquet.")
