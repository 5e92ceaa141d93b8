# SPDX-License-Identifier: Apache-2.0
"""The stream's model in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import sparse_operation_kit.torch as sok
from examples.stream.stream import Array, Batch, Stream


class Learner:
    """Sums the rows of a sample's ids, and a linear layer makes log odds of them."""

    def __init__(self, stream: Stream, dimension: int, learning_rate: float, options: dict[str, Any]) -> None:
        sok.init()
        torch.manual_seed(0)
        self._table = sok.DynamicVariable(dimension, "normal", name="ids", **options)
        self._dense = torch.nn.Linear(dimension, 1)
        parameters = [self._table, *self._dense.parameters()]
        self._optimizer = sok.OptimizerWrapper(torch.optim.Adagrad(parameters, lr=learning_rate))
        self._splits = torch.arange(0, stream.batch * stream.ids_per_sample + 1, stream.ids_per_sample)

    def train(self, batch: Batch) -> float:
        """One step; the mean loss before it."""
        self._optimizer.zero_grad()
        vectors = sok.lookup_sparse(self._table, (torch.from_numpy(batch.ids), self._splits), combiners="sum")
        odds = self._dense(vectors)[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, torch.from_numpy(batch.labels))
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def keys(self) -> Array:
        """Those that the table holds."""
        return self._table.indices.numpy()
