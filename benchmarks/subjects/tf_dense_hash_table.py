# SPDX-License-Identifier: Apache-2.0
"""Peer: raw ids through tf.lookup.experimental.DenseHashTable into tf.nn.embedding_lookup_sparse, SGD by scatter_sub.

It looks the ids up and inserts none, so it does less than a dynamic table does.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from benchmarks.cases import Batch, Case, raw_ids
from benchmarks.subjects import tf_embedding_lookup_sparse
from benchmarks.subjects.tensorflow_inputs import MakeIds

_UNUSED = (-(2**63), -(2**63) + 1)  # keys that a DenseHashTable wants for itself


class Subject(tf_embedding_lookup_sparse.Subject):
    def __init__(
        self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int, optimizer: str = "sgd"
    ) -> None:
        if optimizer != "sgd":
            raise ImportError("SGD alone: TensorFlow's other optimizers step a whole table")
        self.rows: list[tf.lookup.experimental.DenseHashTable] = []
        of_ids = [Batch(list(map(raw_ids, batch.keys)), batch.row_splits) for batch in batches]
        super().__init__(case, of_ids, output_gradient, threads)

    def find_rows(self, case: Case, make_ids: MakeIds) -> list[tf.SparseTensor]:
        if not self.rows:
            with tf.init_scope():
                for _ in range(case.tables):
                    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, *_UNUSED)
                    table.insert(tf.constant(raw_ids(np.arange(case.rows))), tf.range(case.rows, dtype=tf.int64))
                    self.rows.append(table)
        return [
            tf.SparseTensor(sp.indices, rows.lookup(sp.values), sp.dense_shape)
            for rows, sp in zip(self.rows, make_ids(), strict=True)
        ]
