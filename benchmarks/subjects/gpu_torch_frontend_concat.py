# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU with one output for all tables, as FBGEMM's TBE has it."""

from __future__ import annotations

import torch

import sparse_operation_kit.torch as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects import gpu_torch_frontend


class Subject(gpu_torch_frontend.Subject):
    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        super().__init__(case, batches, optimizer, dtype)
        self.gradients = [torch.cat(self.gradients, dim=1)]

    def lookup(self, inputs: gpu_torch_frontend.Inputs) -> list[torch.Tensor]:
        return [sok.lookup_sparse(self.tables, *inputs, combiners=self.combiners, concat=True)]
