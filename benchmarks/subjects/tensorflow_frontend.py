# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend: lookup_sparse in a tf.function, a fused optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE
from benchmarks.subjects.tensorflow_inputs import MakeIds, functions, make_optimizer, sparse_inputs, use_threads


class Subject:
    version = f"tensorflow {tf.__version__}"
    make_inputs = staticmethod(sparse_inputs)

    def __init__(
        self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int, optimizer: str = ""
    ) -> None:
        use_threads(threads)
        sok.init()
        self.tables = [self.make_table(case, t) for t in range(case.tables)]
        inputs = self.make_inputs([Batch(list(map(self.ids_of, b.keys)), b.row_splits) for b in batches])
        wrapped = make_optimizer(optimizer) if optimizer else sok.OptimizerWrapper(sok.SGD(LEARNING_RATE))
        gradients = [tf.constant(output_gradient)] * case.tables
        combiners = [case.combiner] * case.tables

        def forward(make_ids: MakeIds) -> Any:
            return sok.lookup_sparse(self.tables, make_ids(), combiners=combiners)

        def step(make_ids: MakeIds) -> None:
            with tf.GradientTape() as tape:
                result = forward(make_ids)
            slices = tape.gradient(result, self.tables, output_gradients=gradients)
            wrapped.apply_gradients(zip(slices, self.tables, strict=True))

        self._forward = functions(forward, inputs)
        self._step = functions(step, inputs)

    def make_table(self, case: Case, table: int) -> Any:
        shape = [case.rows, case.dimension]
        return sok.Variable(shape=shape, initializer="uniform", dtype=tf.float32, name=f"table{table}")

    @staticmethod
    def ids_of(numbers: np.ndarray) -> np.ndarray:
        return numbers

    def forward(self, i: int) -> None:
        self._forward[i]()

    def step(self, i: int) -> None:
        self._step[i]()
