# SPDX-License-Identifier: Apache-2.0
"""Peer: raw ids through a Python dict, which gives new ones the next row, into torch.nn.EmbeddingBag."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.cases import Batch, Case, raw_ids
from benchmarks.harness import LEARNING_RATE

_OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(
        self, case: Case, batches: list[Batch], output_gradient: np.ndarray, threads: int, optimizer: str = "sgd"
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.bags = [
            torch.nn.EmbeddingBag(case.rows, case.dimension, mode=case.combiner, sparse=True, include_last_offset=True)
            for _ in range(case.tables)
        ]
        ids = raw_ids(np.arange(case.rows)).tolist()
        self.rows: list[dict[int, int]] = [{key: row for row, key in enumerate(ids)} for _ in self.bags]
        self.optimizer = _OPTIMIZERS[optimizer]([bag.weight for bag in self.bags], lr=LEARNING_RATE)
        self.inputs = [
            ([torch.from_numpy(raw_ids(keys)) for keys in batch.keys], torch.from_numpy(batch.row_splits))
            for batch in batches
        ]
        self.gradients = [torch.from_numpy(output_gradient)] * case.tables

    def _outputs(self, i: int) -> list[torch.Tensor]:
        ids, splits = self.inputs[i]
        outputs = []
        for bag, rows, keys in zip(self.bags, self.rows, ids, strict=True):
            found = torch.tensor([rows.setdefault(key, len(rows)) for key in keys.tolist()])
            outputs.append(bag(found, splits))
        return outputs

    def forward(self, i: int) -> None:
        with torch.no_grad():
            self._outputs(i)

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self._outputs(i), self.gradients)
        self.optimizer.step()
