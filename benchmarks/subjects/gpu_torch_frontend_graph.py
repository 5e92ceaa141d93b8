# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU, its forward pass and its step each captured in a CUDA graph.

A batch is copied into the buffers that the graph reads, as a training loop would do; the copy is part of the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import Batch, Case
from benchmarks.subjects import gpu_torch_frontend


class Subject(gpu_torch_frontend.Subject):
    def __init__(self, case: Case, batches: list[Batch], optimizer: str, dtype: str) -> None:
        if optimizer == "adam":
            raise NotImplementedError("Adam counts its steps on the host, which a graph would not see")
        super().__init__(case, batches, optimizer, dtype)
        splits = self.inputs[0][0][1].clone()
        self.buffers = [(keys.clone(), splits) for keys, _ in self.inputs[0]]
        self.forward_graph = self._capture(lambda: self.lookup(self.buffers))
        self.step_graph = self._capture(lambda: self.train(self.buffers))

    def _capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    def _fill(self, i: int) -> None:
        inputs = self.inputs[i % len(self.inputs)]
        torch._foreach_copy_([keys for keys, _ in self.buffers], [keys for keys, _ in inputs])
        self.buffers[0][1].copy_(inputs[0][1])

    def forward(self, i: int) -> None:
        self._fill(i)
        self.forward_graph.replay()

    def step(self, i: int) -> None:
        self._fill(i)
        self.step_graph.replay()
