# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend: lookup_sparse in a tf.function, fused SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE
from benchmarks.subjects.tensorflow_inputs import sparse_inputs, use_threads


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
        self.inputs = self.make_inputs(batches)
        optimizer = sok.OptimizerWrapper(sok.SGD(LEARNING_RATE))
        gradients = [tf.constant(output_gradient)] * case.tables
        combiners = [case.combiner] * case.tables

        @tf.function
        def step(ids: list[Any]) -> None:
            with tf.GradientTape() as tape:
                result = sok.lookup_sparse(self.tables, ids, combiners=combiners)
            slices = tape.gradient(result, self.tables, output_gradients=gradients)
            optimizer.apply_gradients(zip(slices, self.tables, strict=True))

        self._forward = tf.function(lambda ids: sok.lookup_sparse(self.tables, ids, combiners=combiners))
        self._step = step

    def forward(self, i: int) -> None:
        self._forward(self.inputs[i])

    def step(self, i: int) -> None:
        self._step(self.inputs[i])
