# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU, its forward pass and its step each captured in a CUDA graph."""

from __future__ import annotations

import torch

from benchmarks.cases import Batch, Case
from benchmarks.subjects import gpu_torch_frontend
from benchmarks.subjects.cuda_graph import capture, refill


class Subject(gpu_torch_frontend.Subject):
    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        if optimizer == "adam":
            raise NotImplementedError("Adam counts its steps on the host, which a graph would not see")
        super().__init__(case, batches, optimizer, dtype)
        ids, weights = self.inputs[0]
        splits = ids[0][1].clone()  # one tensor for all tables, as in the batches
        buffers = [(keys.clone(), splits) for keys, _ in ids], weights and [weight.clone() for weight in weights]
        self.buffers = _tensors(buffers)
        self.forward_graph = capture(lambda: self.lookup(buffers))
        self.step_graph = capture(lambda: self.train(buffers))

    def forward(self, i: int) -> None:
        refill(self.buffers, _tensors(self.inputs[i % len(self.inputs)]))
        self.forward_graph.replay()

    def step(self, i: int) -> None:
        refill(self.buffers, _tensors(self.inputs[i % len(self.inputs)]))
        self.step_graph.replay()


def _tensors(inputs: gpu_torch_frontend.Inputs) -> list[torch.Tensor]:
    ids, weights = inputs
    return [*(keys for keys, _ in ids), ids[0][1], *(weights or [])]
