# SPDX-License-Identifier: Apache-2.0
"""Area under the ROC curve of any number of rows, in fixed memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class StreamingAuc:
    """Counts positives and negatives in equal bins of the score; rows that share a bin count as ties.

    The counts of several processes add up: sum `counts` over them and `load` the result.
    """

    def __init__(self, bins: int = 1 << 16) -> None:
        if bins < 2:
            raise ValueError(f"bins must be at least 2, not {bins}")
        self.counts = np.zeros((2, bins), np.int64)
        """Rows with label 0 and with label 1 in each bin, shape [2, bins]."""

    def update(self, scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> None:
        """Adds rows. `scores` in [0, 1] and `labels` 0 or 1, both of shape [n]."""
        if scores.shape != labels.shape or scores.ndim != 1:
            raise ValueError(f"scores {scores.shape} and labels {labels.shape} must be vectors of one length")
        # Written so that NaN fails as well.
        if not np.all((scores >= 0) & (scores <= 1)):
            raise ValueError("scores must lie in [0, 1]")
        bins = self.counts.shape[1]
        place = np.minimum((scores.astype(np.float64) * bins).astype(np.int64), bins - 1)
        for label in (0, 1):
            self.counts[label] += np.bincount(place[labels == label], minlength=bins)

    def load(self, counts: npt.NDArray[np.int64]) -> None:
        """Replaces the counts, for example by their sum over processes."""
        if counts.shape != self.counts.shape:
            raise ValueError(f"counts have shape {counts.shape}, not {self.counts.shape}")
        self.counts[...] = counts

    def value(self) -> float:
        """The area, or NaN while one of the labels has not been seen."""
        negatives, positives = self.counts.astype(np.float64)
        pairs = negatives.sum() * positives.sum()
        if pairs == 0:
            return float("nan")
        below = np.cumsum(negatives) - negatives
        return float(np.sum(positives * (below + 0.5 * negatives)) / pairs)
