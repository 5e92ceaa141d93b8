# SPDX-License-Identifier: Apache-2.0
"""Peer: tf.nn.embedding_lookup_sparse in a tf.function, SGD by scatter_sub of the IndexedSlices."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE
from benchmarks.subjects.tensorflow_inputs import MakeIds, functions, scatter_sub, sparse_inputs, use_threads


class Subject:
    version = f"tensorflow {tf.__version__}"
    make_inputs = staticmethod(sparse_inputs)

    def __init__(self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int) -> None:
        use_threads(threads)
        generator = tf.random.Generator.from_seed(0)
        self.tables = [
            tf.Variable(generator.uniform([case.rows, case.dimension], -0.05, 0.05)) for _ in range(case.tables)
        ]
        inputs = self.make_inputs(batches)
        gradients = [tf.constant(output_gradient)] * case.tables

        def outputs(make_ids: MakeIds) -> list[tf.Tensor]:
            return [
                tf.nn.embedding_lookup_sparse(table, sp, None, combiner=case.combiner)
                for table, sp in zip(self.tables, self.find_rows(case, make_ids), strict=True)
            ]

        def step(make_ids: MakeIds) -> None:
            with tf.GradientTape() as tape:
                result = outputs(make_ids)
            scatter_sub(self.tables, tape.gradient(result, self.tables, output_gradients=gradients), LEARNING_RATE)

        self._forward = functions(outputs, inputs)
        self._step = functions(step, inputs)

    def find_rows(self, case: Case, make_ids: MakeIds) -> list[Any]:
        """The rows of a batch, a tensor a table."""
        return make_ids()

    def forward(self, i: int) -> None:
        self._forward[i]()

    def step(self, i: int) -> None:
        self._step[i]()
