# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU: lookup_sparse with one pair (values, offsets) a table, OptimizerWrapper."""

from __future__ import annotations

import torch

import sparse_operation_kit.torch as sok
from benchmarks.cases import Batch, Case

DEVICE = torch.device("cuda", 0)


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        sok.init()
        self.tables = [
            sok.Variable(
                shape=[case.rows, case.dimension],
                initializer="uniform",
                dtype=getattr(torch, dtype),
                name=f"table{t}",
                device=DEVICE,
            )
            for t in range(case.tables)
        ]
        self.combiners = [case.combiner] * case.tables
        self.optimizer = {
            "sgd": lambda: sok.OptimizerWrapper(torch.optim.SGD(self.tables, lr=0.01)),
            "rowwise_adagrad": lambda: sok.RowWiseAdagrad(0.01, epsilon=1e-8).attach(self.tables),
            "adagrad": lambda: sok.OptimizerWrapper(torch.optim.Adagrad(self.tables, lr=0.01, eps=1e-8)),
            "adam": lambda: sok.OptimizerWrapper(torch.optim.Adam(self.tables, lr=0.01, eps=1e-8)),
        }[optimizer]()
        self.inputs = []
        for batch in batches:
            splits = torch.from_numpy(batch.row_splits).to(DEVICE)
            self.inputs.append([(torch.from_numpy(keys).to(DEVICE), splits) for keys in batch.keys])
        self.gradients = [torch.randn((case.batch, case.dimension), device=DEVICE) for _ in self.tables]

    def lookup(self, inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = sok.lookup_sparse(self.tables, inputs, combiners=self.combiners)
        return outputs

    def train(self, inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        torch.autograd.backward(self.lookup(inputs), self.gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self, i: int) -> None:
        self.lookup(self.inputs[i % len(self.inputs)])

    def step(self, i: int) -> None:
        self.train(self.inputs[i % len(self.inputs)])

    def finish(self) -> None:
        sok.check_errors()
