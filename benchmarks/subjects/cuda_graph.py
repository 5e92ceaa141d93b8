# SPDX-License-Identifier: Apache-2.0
"""What the subjects in CUDA graphs share: the graph of a call, and buffers of a batch that it reads.

A batch is copied into the buffers before each replay, as a training loop would do; the copy is part of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of what `call` enqueues, after three calls that are not part of it."""
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


def refill(buffers: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
    """Copies a batch into the buffers, those of one dtype together."""
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        pairs = [pair for pair in zip(buffers, batch, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([buffer for buffer, _ in pairs], [tensor for _, tensor in pairs])
