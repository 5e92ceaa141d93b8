# SPDX-License-Identifier: Apache-2.0
"""The same, with all tables one stack and the ids of all in one ragged tensor."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects import gpu_tensorflow_frontend_concrete
from benchmarks.subjects.tensorflow_inputs import MakeIds


class Subject(gpu_tensorflow_frontend_concrete.Subject):
    def make_tables(self, case: Case, dtype: str) -> list[Any]:
        shapes = {f"table{t}": (case.rows, case.dimension) for t in range(case.tables)}
        return [sok.TableStack(shapes, initializer="uniform", dtype=dtype)]

    def make_inputs(self, batches: list[Batch]) -> list[MakeIds]:
        def make_ids(keys: tf.Tensor, row_splits: tf.Tensor) -> list[tf.RaggedTensor]:
            return [tf.RaggedTensor.from_row_splits(keys, row_splits, validate=False)]

        inputs: list[MakeIds] = []
        for batch in batches:
            lengths = np.tile(np.diff(batch.row_splits), len(batch.keys))
            flat = tf.constant(np.concatenate(batch.keys)), tf.constant(np.r_[0, np.cumsum(lengths)])
            inputs.append(functools.partial(make_ids, *flat))
        return inputs

    @staticmethod
    def stacked(weights: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(weights)[np.newaxis]
