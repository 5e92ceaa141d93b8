# SPDX-License-Identifier: Apache-2.0
"""Peer: FBGEMM's table-batched embedding on a GPU, its backward pass on the calling thread."""

from __future__ import annotations

import torch

from benchmarks.subjects import gpu_fbgemm_tbe


class Subject(gpu_fbgemm_tbe.Subject):
    def step(self, i: int) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            super().step(i)
