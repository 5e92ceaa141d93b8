# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU: lookup_sparse with one pair (values, offsets) a table, OptimizerWrapper."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import sparse_operation_kit.torch as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects.torch_inputs import make_optimizer

DEVICE = torch.device("cuda", 0)

Inputs = tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor] | None]
"""Of a batch: ids and row splits a table, and weights a table, where there are any."""


class Subject:
    version = f"torch {torch.__version__}"
    takes_any_bags = True

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        sok.init()
        self.tables = [self.make_table(case, t, dtype) for t in range(case.tables)]
        self.combiners = [case.combiner] * case.tables
        self.optimizer = make_optimizer(optimizer, self.tables)
        self.inputs: list[Inputs] = []
        for batch in batches:
            splits = torch.from_numpy(batch.row_splits).to(DEVICE)
            ids = [(torch.from_numpy(self.ids_of(keys)).to(DEVICE), splits) for keys in batch.keys]
            weights = None if batch.weights is None else [torch.from_numpy(each).to(DEVICE) for each in batch.weights]
            self.inputs.append((ids, weights))
        self.gradients = [torch.randn((case.batch, case.dimension), device=DEVICE) for _ in self.tables]

    def make_table(self, case: Case, table: int, dtype: str) -> Any:
        return sok.Variable(
            shape=[case.rows, case.dimension],
            initializer="uniform",
            dtype=getattr(torch, dtype),
            name=f"table{table}",
            device=DEVICE,
        )

    @staticmethod
    def ids_of(numbers: np.ndarray) -> np.ndarray:
        return numbers

    def lookup(self, inputs: Inputs) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = sok.lookup_sparse(self.tables, *inputs, combiners=self.combiners)
        return outputs

    def train(self, inputs: Inputs) -> None:
        torch.autograd.backward(self.lookup(inputs), self.gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self, i: int) -> None:
        self.lookup(self.inputs[i % len(self.inputs)])

    def step(self, i: int) -> None:
        self.train(self.inputs[i % len(self.inputs)])

    def finish(self) -> None:
        sok.check_errors()
