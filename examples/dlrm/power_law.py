# SPDX-License-Identifier: Apache-2.0
"""Ids whose frequency falls with their rank by a power law, as those of users and products do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BoundedPowerLaw:
    """Draws ranks 0..count-1, rank k with probability proportional to (k + 1) ** -exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
        self._cumulative = np.cumsum(weights)
        self._cumulative /= self._cumulative[-1]

    def sample(self, generator: np.random.Generator, rows: int) -> npt.NDArray[np.int64]:
        """Independent ranks, shape [rows]."""
        return np.searchsorted(self._cumulative, generator.random(rows), side="right").astype(np.int64)


def scatter(ranks: npt.NDArray[np.int64], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Renames ranks to ids within 0..count-1, one to one, so that frequent ids are not the small ones."""
    generator = np.random.default_rng([seed, count])
    # Golden section, moved to the next number without a common factor.
    step = max(1, round(count * 0.6180339887))
    while np.gcd(step, count) != 1:
        step += 1
    return (ranks * step + int(generator.integers(count))) % count
