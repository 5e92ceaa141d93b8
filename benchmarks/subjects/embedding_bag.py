# SPDX-License-Identifier: Apache-2.0
"""Peer: torch.nn.EmbeddingBag with sparse gradients and torch.optim.SGD."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.cases import Batch, Case
from benchmarks.harness import LEARNING_RATE


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.bags = [
            torch.nn.EmbeddingBag(case.rows, case.dimension, mode=case.combiner, sparse=True, include_last_offset=True)
            for _ in range(case.tables)
        ]
        self.optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=LEARNING_RATE)
        self.inputs = [
            ([torch.from_numpy(keys) for keys in batch.keys], torch.from_numpy(batch.row_splits)) for batch in batches
        ]
        self.gradients = [torch.from_numpy(output_gradient)] * case.tables

    def _outputs(self, i: int) -> list[torch.Tensor]:
        keys, splits = self.inputs[i]
        return [bag(k, splits) for bag, k in zip(self.bags, keys, strict=False)]

    def forward(self, i: int) -> None:
        with torch.no_grad():
            self._outputs(i)

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self._outputs(i), self.gradients)
        self.optimizer.step()
