# SPDX-License-Identifier: Apache-2.0
"""A stream of clicks whose ids drift: new ones appear all the time, are seen often, then less, then never again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Batch(NamedTuple):
    """ids [batch x ids_per_sample] int64, of one sample after the other; labels [batch] float32, 0 or 1."""

    ids: Array
    labels: Array


@dataclasses.dataclass(frozen=True)
class Stream:
    """At each step `live` ids are in use, `new` of them for the first time, and the new ones are drawn most.

    An id is any int64. What it does to the odds of a click is a function of the id, and all that there is to learn.
    """

    batch: int = 512
    ids_per_sample: int = 4
    live: int = 10_000
    new: int = 100
    seed: int = 0

    def batches(self, steps: int) -> Iterator[Batch]:
        """The same batches each time."""
        rng = np.random.default_rng(self.seed)
        for step in range(steps):
            # The share of draws among the newest x of the live ids is the cube root of x.
            age = (self.live * rng.random((self.batch, self.ids_per_sample)) ** 3).astype(np.int64)
            ids = _mixed((self.newest(step) - age).astype(np.uint64))
            odds = _effect(ids).sum(axis=1)
            labels = rng.random(self.batch) < 1 / (1 + np.exp(-odds))
            yield Batch(ids.view(np.int64).reshape(-1), labels.astype(np.float32))

    def newest(self, step: int) -> int:
        """The number of the id that came last."""
        return self.live + step * self.new

    def live_ids(self, step: int) -> Array:
        """[live] int64: the ids in use at a step."""
        newest = self.newest(step)
        return _mixed(np.arange(newest - self.live + 1, newest + 1).astype(np.uint64)).view(np.int64)

    def num_ids(self, steps: int) -> int:
        """Ids in use at any of the steps."""
        return self.live + (steps - 1) * self.new


def _mixed(numbers: Array) -> Array:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), which is one to one: ids that look like hashes."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))


def _effect(ids: Array) -> Array:
    """Of each id on the log odds: even in [-1.5, 1.5)."""
    return np.asarray((_mixed(ids) >> np.uint64(11)).astype(np.float64) * (3.0 / (1 << 53)) - 1.5)
