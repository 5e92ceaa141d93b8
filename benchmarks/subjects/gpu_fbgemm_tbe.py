# SPDX-License-Identifier: Apache-2.0
"""Peer: FBGEMM's table-batched embedding on a GPU, the optimizer fused into its backward pass."""

from __future__ import annotations

import importlib.metadata

import fbgemm_gpu  # noqa: F401 (registers the operators)
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.cases import Batch, Case

DEVICE = torch.device("cuda", 0)
KINDS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
PRECISIONS = {"float32": SparseType.FP32, "float16": SparseType.FP16}


class Subject:
    takes_any_bags = True
    version = f"fbgemm-gpu {importlib.metadata.version('fbgemm-gpu')}, torch {torch.__version__}"

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        if dtype not in PRECISIONS:
            raise NotImplementedError(f"compared with {' and '.join(PRECISIONS)} rows only")
        if optimizer == "adam" and dtype != "float32":
            raise NotImplementedError("FBGEMM 1.6: 'Expected tensor row_counter_dev to have scalar type Float'")
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.dimension, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * case.tables,
            optimizer=KINDS[optimizer],
            learning_rate=0.01,
            eps=1e-8,
            weights_precision=PRECISIONS[dtype],
            stochastic_rounding=False,  # to nearest, as here
            pooling_mode={"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}[case.combiner],
            device=DEVICE,
        )
        for weight in self.tables.split_embedding_weights():
            weight.data.uniform_(-0.05, 0.05)
        self.inputs: list[list[torch.Tensor]] = []
        for batch in batches:
            keys = torch.cat([torch.from_numpy(k) for k in batch.keys]).to(DEVICE)
            lengths = torch.from_numpy(batch.row_splits[1:] - batch.row_splits[:-1]).repeat(case.tables)
            offsets = torch.zeros(case.tables * case.batch + 1, dtype=torch.int64)
            offsets[1:] = torch.cumsum(lengths, 0)
            inputs = [keys, offsets.to(DEVICE)]
            if batch.weights is not None:
                inputs.append(torch.cat([torch.from_numpy(each) for each in batch.weights]).to(DEVICE))
            self.inputs.append(inputs)
        self.gradient = torch.randn((case.batch, case.tables * case.dimension), device=DEVICE)

    def lookup(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self.tables(*inputs)

    def train(self, inputs: list[torch.Tensor]) -> None:
        self.lookup(inputs).backward(self.gradient)

    def forward(self, i: int) -> None:
        self.lookup(self.inputs[i % len(self.inputs)])

    def step(self, i: int) -> None:
        self.train(self.inputs[i % len(self.inputs)])
