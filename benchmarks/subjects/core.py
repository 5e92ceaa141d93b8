# SPDX-License-Identifier: Apache-2.0
"""The project's core alone, through its NumPy binding."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE
from sparse_operation_kit import core


class _OutputPool:
    """Gives the same arrays again for each call, as the frameworks' allocators do: page faults are not measured."""

    def __init__(self, arrays_a_call: int) -> None:
        self._arrays: list[np.ndarray] = []
        self._arrays_a_call = arrays_a_call
        self._next = 0

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        if len(self._arrays) < self._arrays_a_call:
            self._arrays.append(np.empty(shape, dtype))
        array = self._arrays[self._next % self._arrays_a_call]
        self._next += 1
        return array


class Subject:
    version = f"core {core.build_info()}"

    def __init__(self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int) -> None:
        pool = core.ThreadPool(threads)
        self.tables = []
        for t in range(case.tables):
            initializer = core.Initializer("uniform", -0.05, 0.05, seed=t)
            weight = core.initialize(initializer, case.rows, case.dimension, context=core.Context(pool))
            self.tables.append(core.Table(weight, name=f"table{t}"))
        self.context = core.Context(pool, empty=_OutputPool(case.tables).empty)
        self.batches = batches
        self.gradient = output_gradient
        self.combiner = case.combiner
        self.optimizer = core.Optimizer("sgd", learning_rate=LEARNING_RATE)

    def forward(self, i: int) -> None:
        batch = self.batches[i]
        lookups = [
            core.Lookup(keys, t, row_splits=batch.row_splits, combiner=self.combiner)
            for t, keys in enumerate(batch.keys)
        ]
        core.gather_combine(self.tables, lookups, context=self.context)

    def step(self, i: int) -> None:
        batch = self.batches[i]
        self.forward(i)
        updates = [
            core.Update(
                table,
                self.optimizer,
                [core.Gradient(keys, self.gradient, row_splits=batch.row_splits, combiner=self.combiner)],
            )
            for table, keys in zip(self.tables, batch.keys, strict=True)
        ]
        core.apply(updates, context=self.context)
