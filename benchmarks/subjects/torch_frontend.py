# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend: lookup_sparse, fused SGD."""

from __future__ import annotations

import numpy as np
import torch

import sparse_operation_kit.torch as sok
from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int) -> None:
        torch.set_num_threads(threads)
        sok.init()
        self.tables = [
            sok.Variable(shape=[case.rows, case.dimension], initializer="uniform", name=f"table{t}")
            for t in range(case.tables)
        ]
        self.combiners = [case.combiner] * case.tables
        self.optimizer = sok.OptimizerWrapper(torch.optim.SGD(self.tables, lr=LEARNING_RATE))
        self.inputs = [
            [(torch.from_numpy(keys), torch.from_numpy(batch.row_splits)) for keys in batch.keys] for batch in batches
        ]
        self.gradients = [torch.from_numpy(output_gradient)] * case.tables

    def forward(self, i: int) -> None:
        with torch.no_grad():
            sok.lookup_sparse(self.tables, self.inputs[i], combiners=self.combiners)

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        outputs = sok.lookup_sparse(self.tables, self.inputs[i], combiners=self.combiners)
        torch.autograd.backward(outputs, self.gradients)
        self.optimizer.step()
