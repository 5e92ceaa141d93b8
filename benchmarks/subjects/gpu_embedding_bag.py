# SPDX-License-Identifier: Apache-2.0
"""Peer: torch.nn.EmbeddingBag on a GPU with sparse gradients and torch.optim.SGD; other optimizers are not compared."""

from __future__ import annotations

import torch

from benchmarks.cases import Batch, Case

DEVICE = torch.device("cuda", 0)


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        if dtype != "float32":
            raise NotImplementedError("measured with float32 rows only")
        if optimizer != "sgd":
            raise ImportError("nn.EmbeddingBag is compared with SGD only")
        self.bags = [
            torch.nn.EmbeddingBag(
                case.rows, case.dimension, mode=case.combiner, sparse=True, include_last_offset=True, device=DEVICE
            )
            for _ in range(case.tables)
        ]
        self.optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=0.01)
        self.inputs = [
            ([torch.from_numpy(k).to(DEVICE) for k in batch.keys], torch.from_numpy(batch.row_splits).to(DEVICE))
            for batch in batches
        ]
        self.gradients = [torch.randn((case.batch, case.dimension), device=DEVICE)] * case.tables

    def forward(self, i: int) -> list[torch.Tensor]:
        keys, splits = self.inputs[i % len(self.inputs)]
        return [bag(k, splits) for bag, k in zip(self.bags, keys, strict=True)]

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.forward(i), self.gradients)
        self.optimizer.step()
