# SPDX-License-Identifier: Apache-2.0
"""Peer: tf.nn.embedding_lookup_sparse of ragged ids on a GPU in a tf.function, SGD by scatter_sub of the IndexedSlices.

Runs in a process of its own (benchmarks.gpu_alone).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE
from benchmarks.subjects import gpu_tensorflow_frontend
from benchmarks.subjects.tensorflow_inputs import scatter_sub


class Subject(gpu_tensorflow_frontend.Subject):
    takes_any_bags = False  # it drops empty bags at the end of a batch

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        if optimizer != "sgd":
            raise NotImplementedError("compared with SGD only")
        if dtype != "float32":
            raise NotImplementedError("measured with float32 rows only")
        super().__init__(case, batches, optimizer, dtype)

    def make_table(self, case: Case, table: int, dtype: str) -> Any:
        return tf.Variable(tf.random.uniform([case.rows, case.dimension], -0.05, 0.05, dtype), name=f"table{table}")

    def make_update(self, optimizer: str) -> Callable[[list[Any]], Any]:
        return lambda slices: scatter_sub(self.tables, slices, LEARNING_RATE)

    def lookup(self, inputs: gpu_tensorflow_frontend.Inputs) -> list[tf.Tensor]:
        return [
            tf.nn.embedding_lookup_sparse(table, ids, None, combiner=combiner)
            for table, ids, combiner in zip(self.tables, inputs.make_ids(), self.combiners, strict=True)
        ]

    def wait(self) -> None:
        tf.test.experimental.sync_devices()
