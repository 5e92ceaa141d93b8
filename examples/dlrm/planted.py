# SPDX-License-Identifier: Apache-2.0
"""The hidden rule from which the labels of generated data are drawn, so that there is something to learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Columns (counted from 0) of which two and two act together: only the product of embeddings can learn these.
_PAIRS = ((5, 13), (8, 22), (16, 13), (5, 22))
_FACTORS = 4


class PlantedRule:
    """Logit of a click = bias + effects of the dense values + effects of the ids + effects of pairs of ids.

    An effect of an id is a normal number drawn from the seed once; a missing id has none.
    """

    def __init__(self, cardinalities: Sequence[int], dense_columns: int, seed: int) -> None:
        generator = np.random.default_rng([seed, 1])
        self._bias = -2.3
        self._dense = generator.normal(0.0, 0.28, dense_columns)
        self._bend = generator.normal(0.0, 0.04, dense_columns)
        # An id of a column with many of them is seldom seen: its effect is smaller, or it could not be learned.
        self._ids = [generator.normal(0.0, 1.4 / (1.0 + np.log10(count)) ** 1.5, count) for count in cardinalities]
        self._factors = {
            column: generator.normal(0.0, 0.35, (cardinalities[column], _FACTORS)) for pair in _PAIRS for column in pair
        }

    def logits(
        self, dense: npt.NDArray[np.float64], ids: npt.NDArray[np.int64], present: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float64]:
        """Logits [n] of rows with `dense` [n, dense columns] (standardised, 0 where missing), `ids` and `present`
        [n, columns]; the id of a field that is not present does not matter."""
        logits = self._bias + dense @ self._dense + (dense**2 - 1.0) @ self._bend
        for column, effects in enumerate(self._ids):
            logits += np.where(present[:, column], effects[ids[:, column]], 0.0)
        for left, right in _PAIRS:
            products = np.sum(self._factors[left][ids[:, left]] * self._factors[right][ids[:, right]], axis=1)
            logits += np.where(present[:, left] & present[:, right], products, 0.0)
        return logits
