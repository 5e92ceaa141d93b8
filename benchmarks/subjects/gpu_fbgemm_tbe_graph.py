# SPDX-License-Identifier: Apache-2.0
"""Peer: FBGEMM's table-batched embedding on a GPU, its forward pass and its step each captured in a CUDA graph, as
gpu_torch_frontend_graph has them.
"""

from __future__ import annotations

from benchmarks.cases import Batch, Case
from benchmarks.subjects import gpu_fbgemm_tbe
from benchmarks.subjects.cuda_graph import capture, refill


class Subject(gpu_fbgemm_tbe.Subject):
    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        if optimizer == "adam":
            raise NotImplementedError("Adam counts its steps on the host, which a graph would not see")
        super().__init__(case, batches, optimizer, dtype)
        self.buffers = [tensor.clone() for tensor in self.inputs[0]]
        try:
            self.forward_graph = capture(lambda: self.lookup(self.buffers))
            self.step_graph = capture(lambda: self.train(self.buffers))
        except RuntimeError as error:
            raise NotImplementedError(f"FBGEMM's part of it cannot be captured: {error}") from error

    def forward(self, i: int) -> None:
        refill(self.buffers, self.inputs[i % len(self.inputs)])
        self.forward_graph.replay()

    def step(self, i: int) -> None:
        refill(self.buffers, self.inputs[i % len(self.inputs)])
        self.step_graph.replay()
