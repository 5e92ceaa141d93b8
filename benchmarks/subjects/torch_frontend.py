# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend: lookup_sparse, a fused optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import sparse_operation_kit.torch as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects.torch_inputs import make_optimizer


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(
        self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int, optimizer: str = "sgd"
    ) -> None:
        torch.set_num_threads(threads)
        sok.init()
        self.tables = [self.make_table(case, t) for t in range(case.tables)]
        self.combiners = [case.combiner] * case.tables
        self.optimizer = make_optimizer(optimizer, self.tables)
        self.inputs = [
            [(torch.from_numpy(self.ids_of(keys)), torch.from_numpy(batch.row_splits)) for keys in batch.keys]
            for batch in batches
        ]
        self.gradients = [torch.from_numpy(output_gradient)] * case.tables

    def make_table(self, case: Case, table: int) -> Any:
        return sok.Variable(shape=[case.rows, case.dimension], initializer="uniform", name=f"table{table}")

    @staticmethod
    def ids_of(numbers: np.ndarray) -> np.ndarray:
        return numbers

    def forward(self, i: int) -> None:
        with torch.no_grad():
            sok.lookup_sparse(self.tables, self.inputs[i], combiners=self.combiners)

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        outputs = sok.lookup_sparse(self.tables, self.inputs[i], combiners=self.combiners)
        torch.autograd.backward(outputs, self.gradients)
        self.optimizer.step()
