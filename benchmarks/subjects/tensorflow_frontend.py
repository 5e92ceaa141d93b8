# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend: lookup_sparse in a tf.function, fused SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE
from benchmarks.subjects.tensorflow_inputs import MakeIds, functions, sparse_inputs, use_threads


class Subject:
    version = f"tensorflow {tf.__version__}"
    make_inputs = staticmethod(sparse_inputs)

    def __init__(self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int) -> None:
        use_threads(threads)
        sok.init()
        self.tables = [
            sok.Variable(shape=[case.rows, case.dimension], initializer="uniform", dtype=tf.float32, name=f"table{t}")
            for t in range(case.tables)
        ]
        inputs = self.make_inputs(batches)
        optimizer = sok.OptimizerWrapper(sok.SGD(LEARNING_RATE))
        gradients = [tf.constant(output_gradient)] * case.tables
        combiners = [case.combiner] * case.tables

        def forward(make_ids: MakeIds) -> Any:
            return sok.lookup_sparse(self.tables, make_ids(), combiners=combiners)

        def step(make_ids: MakeIds) -> None:
            with tf.GradientTape() as tape:
                result = forward(make_ids)
            slices = tape.gradient(result, self.tables, output_gradients=gradients)
            optimizer.apply_gradients(zip(slices, self.tables, strict=True))

        self._forward = functions(forward, inputs)
        self._step = functions(step, inputs)

    def forward(self, i: int) -> None:
        self._forward[i]()

    def step(self, i: int) -> None:
        self._step[i]()
