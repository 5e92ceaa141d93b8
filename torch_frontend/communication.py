# SPDX-License-Identifier: Apache-2.0
"""Collectives over all ranks, over torch.distributed. A process alone gets what it put in. None is differentiable."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_operation_kit.torch import runtime

__all__ = ["allgather", "allreduce", "alltoall", "broadcast"]


@torch.no_grad()
def alltoall(tensor: Tensor, splits: Sequence[int] | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sends slices of the first axis to every rank.

    Args:
      tensor: [n, ...].
      splits: how many of the n go to each rank; None: as many to each, n must be a multiple of the number of ranks.

    Returns:
      (what came from all ranks, one after another, [m, ...]; how many came from each, [ranks] int64).

    Raises:
      ValueError: splits that do not fit.
    """
    state = runtime.get()
    n = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if tensor.dim() == 0 or n % state.num_ranks:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot be split evenly over {state.num_ranks} ranks")
        counts = [n // state.num_ranks] * state.num_ranks
    else:
        counts = [int(count) for count in splits]
    if len(counts) != state.num_ranks or min(counts) < 0 or sum(counts) != n:
        raise ValueError(f"splits {counts} do not fit a first axis of {n} and {state.num_ranks} ranks")
    if state.exchange is None:
        return tensor.clone(), torch.tensor(counts)
    received = state.exchange.swap_counts(torch.tensor(counts).unsqueeze(1), 1, failed=False)[:, 0]
    width = math.prod(tensor.shape[1:])
    flat = state.exchange.all_to_all(
        tensor.contiguous().view(-1), [count * width for count in counts], [int(c) * width for c in received]
    )
    return flat.view(int(received.sum()), *tensor.shape[1:]), received


@torch.no_grad()
def allreduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """The element-wise "sum" or "mean" ("average") of the ranks' tensors, which have one shape and dtype."""
    state = runtime.get()
    if op not in ("sum", "mean", "average"):
        raise ValueError(f'unknown op {op!r}: it must be "sum", "mean" or "average"')
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if state.exchange is not None:
        dist.all_reduce(result)
        if op != "sum":
            result = result.div_(state.num_ranks) if result.is_floating_point() else result // state.num_ranks
    return result


@torch.no_grad()
def allgather(tensor: Tensor) -> Tensor:
    """The ranks' tensors one after another along the first axis, in which they may differ; the other axes agree."""
    state = runtime.get()
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if state.exchange is None:
        return tensor.clone()
    copies = torch.cat([tensor.detach()] * state.num_ranks)
    result, _ = alltoall(copies, [tensor.shape[0]] * state.num_ranks)
    return result


@torch.no_grad()
def broadcast(tensor: Tensor, root_rank: int = 0) -> Tensor:
    """The tensor of `root_rank`; every rank gives one of the same shape and dtype."""
    state = runtime.get()
    if not 0 <= root_rank < state.num_ranks:
        raise ValueError(f"root_rank is {root_rank}, must be in [0, {state.num_ranks})")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if state.exchange is not None:
        dist.broadcast(result, root_rank)
    return result
