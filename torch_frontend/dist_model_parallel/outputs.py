# SPDX-License-Identifier: Apache-2.0
"""Pooled vectors made where their table is, sent to the ranks whose samples they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import runtime


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.counts = receive, send
        exchange = runtime.get().exchange
        assert exchange is not None
        return exchange.all_to_all(flat.contiguous(), send, receive)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        exchange = runtime.get().exchange
        assert exchange is not None
        return exchange.all_to_all(gradients[0].contiguous(), *ctx.counts), None, None


def send_back(outputs: Sequence[Tensor], rank_widths: Sequence[Sequence[int]], samples: int) -> list[Tensor]:
    """Each rank's samples of all outputs of all ranks.

    Args:
      outputs: this rank's, [samples, width] each.
      rank_widths: for each rank the width of each of its outputs.
      samples: of all ranks together, of which each has as many.

    Returns:
      [samples / ranks, width] for each output, rank by rank.
    """
    state = runtime.get()
    mine = samples // state.num_ranks
    totals = [sum(widths) for widths in rank_widths]
    own = zip(outputs, rank_widths[state.rank], strict=True)
    joined = torch.cat([output.reshape(samples, width) for output, width in own], 1).reshape(-1)
    came: Tensor = _AllToAll.apply(
        joined, [mine * totals[state.rank]] * state.num_ranks, [mine * total for total in totals]
    )
    results: list[Tensor] = []
    messages = came.split([mine * total for total in totals])
    for message, total, widths in zip(messages, totals, rank_widths, strict=True):
        results += message.view(mine, total).split(list(widths), 1)
    return results
