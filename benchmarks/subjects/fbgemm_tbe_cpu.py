# SPDX-License-Identifier: Apache-2.0
"""Peer: FBGEMM's table-batched embedding on the CPU, SGD fused into its backward pass."""

from __future__ import annotations

import importlib.metadata

import fbgemm_gpu  # noqa: F401 (registers the operators)
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE


class Subject:
    version = f"fbgemm-gpu-cpu {importlib.metadata.version('fbgemm-gpu-cpu')}, torch {torch.__version__}"

    def __init__(self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.dimension, EmbeddingLocation.HOST, ComputeDevice.CPU)] * case.tables,
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=LEARNING_RATE,
            pooling_mode={"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}[case.combiner],
        )
        self.tables.init_embedding_weights_uniform(-0.05, 0.05)
        self.inputs = []
        for batch in batches:
            length = batch.row_splits[-1]
            offsets = np.concatenate([batch.row_splits[:-1] + t * length for t in range(case.tables)])
            offsets = np.append(offsets, case.tables * length)
            self.inputs.append((torch.from_numpy(np.concatenate(batch.keys)), torch.from_numpy(offsets)))
        self.gradient = torch.from_numpy(np.tile(output_gradient, (1, case.tables)))

    def forward(self, i: int) -> None:
        with torch.no_grad():
            self.tables(*self.inputs[i])

    def step(self, i: int) -> None:
        self.tables(*self.inputs[i]).backward(self.gradient)
