# SPDX-License-Identifier: Apache-2.0
"""Writes samples of nested keys to Parquet: `python -m examples.dense_demo.generate --out DIR --slots 100 --keys 10`.

A sample is `feature`, list<list<int64>>: for each slot its keys, sorted downwards, all from the slot's own range; and
`label`. Labels are drawn from a hidden rule: the logit is a sum over the sample's keys, each of which has an effect
drawn once.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa

from ..dlrm import columns, writing
from ..dlrm.writing import Made, main
from . import shape

_STRENGTH = 2.0
"""Standard deviation of the logits."""


@dataclasses.dataclass(frozen=True)
class Recipe(writing.Recipe):
    """All that determines the generated rows and files."""

    rows: writing.TrainingRows = 200_000
    valid_rows: writing.HeldOutRows = 20_000
    slots: shape.Slots = 10
    keys: shape.Keys = 5
    vocabulary: shape.Vocabulary = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        shape.check(self.slots, self.vocabulary)

    def maker(self) -> writing.RowMaker:
        """See the base class."""
        return _RowMaker(self)


class _RowMaker:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._range = recipe.vocabulary // recipe.slots
        deviation = _STRENGTH / np.sqrt(recipe.slots * recipe.keys)
        generator = np.random.default_rng([recipe.seed, 1])
        self._effects = generator.normal(0.0, deviation, self._range * recipe.slots)

    def make(self, split: int, group: int, rows: int) -> Made:
        """See RowMaker."""
        recipe = self._recipe
        generator = np.random.default_rng([recipe.seed, 2, split, group])
        keys = np.sort(generator.integers(self._range, size=(rows, recipe.slots, recipe.keys)), axis=2)[:, :, ::-1]
        keys = keys + np.arange(recipe.slots)[:, None] * self._range
        probabilities = 1.0 / (1.0 + np.exp(-self._effects[keys].sum(axis=(1, 2))))
        labels = (generator.random(rows) < probabilities).astype(np.int8)
        return pa.table({shape.FEATURE: _nested(keys), columns.LABEL: labels}), probabilities, labels


def _nested(keys: np.ndarray) -> pa.ListArray:
    """list<list<int64>> of an array [rows, slots, keys]."""
    rows, slots, length = keys.shape
    inner = pa.ListArray.from_arrays(np.arange(rows * slots + 1, dtype=np.int32) * length, pa.array(keys.ravel()))
    return pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * slots, inner)


if __name__ == "__main__":
    main(Recipe, "python -m examples.dense_demo.generate", "Write samples of nested keys with a planted signal.")
