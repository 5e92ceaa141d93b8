# SPDX-License-Identifier: Apache-2.0
"""The project's PyTorch frontend on a GPU with one output, its backward pass on the calling thread.

Autograd otherwise wakes a thread of its own for what is on a GPU, and the step finds nothing in the CPU's caches
afterwards.
"""

from __future__ import annotations

import torch

from benchmarks.subjects import gpu_torch_frontend_concat


class Subject(gpu_torch_frontend_concat.Subject):
    def step(self, i: int) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            super().step(i)
