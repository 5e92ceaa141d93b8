# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU: an EmbeddingBagCollection whose tables are one stack, with the ids of all
features in one tensor, as TorchRec's KeyedJaggedTensor has them, and one output.
"""

from __future__ import annotations

import numpy as np
import torch

import sparse_operation_kit.torch as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects.torch_inputs import make_optimizer

DEVICE = torch.device("cuda", 0)


class Keyed:
    """Ids of all features: what the collection asks of a KeyedJaggedTensor."""

    def __init__(
        self, names: list[str], values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> None:
        self._names, self._values, self._offsets, self._weights = names, values, offsets, weights

    def keys(self) -> list[str]:
        """The features."""
        return self._names

    def values(self) -> torch.Tensor:
        """Those of the first feature, then those of the second, ..."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """[features * batch + 1]"""
        return self._offsets

    def weights_or_none(self) -> torch.Tensor | None:
        """One a value, or none at all."""
        return self._weights


class Subject:
    takes_any_bags = True
    version = f"torch {torch.__version__}"

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        sok.init()
        names = [f"table{t}" for t in range(case.tables)]
        with torch.device(DEVICE):
            self.collection = sok.EmbeddingBagCollection(
                dict.fromkeys(names, (case.rows, case.dimension)),
                combiners=case.combiner,
                table_dtype=getattr(torch, dtype),
                concat=True,
            )
        self.optimizer = make_optimizer(optimizer, list(self.collection.parameters()))
        self.inputs = []
        for batch in batches:
            lengths = np.tile(np.diff(batch.row_splits), case.tables)
            offsets = torch.from_numpy(np.r_[0, np.cumsum(lengths)]).to(DEVICE)
            keys = torch.from_numpy(np.concatenate(batch.keys)).to(DEVICE)
            weights = None if batch.weights is None else torch.from_numpy(np.concatenate(batch.weights)).to(DEVICE)
            self.inputs.append(Keyed(names, keys, offsets, weights))
        self.gradient = torch.randn((case.batch, case.tables * case.dimension), device=DEVICE)

    def forward(self, i: int) -> torch.Tensor:
        output: torch.Tensor = self.collection(self.inputs[i % len(self.inputs)])
        return output

    def step(self, i: int) -> None:
        self.forward(i).backward(self.gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        sok.check_errors()
