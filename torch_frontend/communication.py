# SPDX-License-Identifier: Apache-2.0
"""Collective operations on dense tensors over torch.distributed; with one process they change nothing.

Results are new tensors outside autograd. `name` is there for the sake of the TensorFlow frontend's scripts and ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_operation_kit.torch import runtime

__all__ = ["allgather", "allreduce", "alltoall", "broadcast"]

_OPERATIONS = ("sum", "average", "min", "max")


@torch.no_grad()
def alltoall(tensor: Tensor, splits: Sequence[int] | Tensor | None = None, name: str | None = None) -> Tensor:
    """Sends splits[r] entries of `tensor` [n, ...] to each rank r; returns [m, ...], what came, by source rank.

    splits: [num_ranks] integers that add up to n; None: n / num_ranks each.
    Raises ValueError when the splits do not fit.
    """
    del name
    state = runtime.get()
    if tensor.dim() == 0:
        raise ValueError("alltoall needs a tensor of at least one dimension")
    n = tensor.shape[0]
    if splits is None:
        if n % state.num_ranks:
            raise ValueError(f"a first axis of {n} cannot be split evenly over {state.num_ranks} ranks; give splits")
        counts = [n // state.num_ranks] * state.num_ranks
    else:
        counts = [int(count) for count in splits]
    if len(counts) != state.num_ranks or min(counts) < 0 or sum(counts) != n:
        raise ValueError(f"splits {counts} do not fit a first axis of {n} and {state.num_ranks} ranks")
    tensor = tensor.detach()
    if state.exchange is None:
        return tensor.clone()
    known = torch.tensor([[count, 0] for count in counts], device="cpu")
    received = state.exchange.swap_counts(known)[1][:, 0].tolist()
    width = math.prod(tensor.shape[1:])
    flat = tensor.contiguous().view(-1)
    flat = state.exchange.all_to_all(flat, [count * width for count in counts], [count * width for count in received])
    return flat.view(sum(received), *tensor.shape[1:])


@torch.no_grad()
def allreduce(tensor: Tensor, op: str = "sum", name: str | None = None) -> Tensor:
    """The sum (or "average", "min", "max") over the ranks of a tensor of the same shape and dtype on each.

    The average of integers is rounded down. Raises ValueError for an unknown `op`.
    """
    del name
    if op not in _OPERATIONS:
        raise ValueError(f"unknown op {op!r}: it must be one of {', '.join(_OPERATIONS)}")
    state = runtime.get()
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if state.exchange is None:
        return result
    kinds = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    dist.all_reduce(result, kinds[op])
    if op == "average":
        result = result / state.num_ranks if result.is_floating_point() else result // state.num_ranks
    return result


@torch.no_grad()
def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """[m, ...]: the tensors [n, ...] of all ranks one after another; n may differ from rank to rank."""
    del name
    state = runtime.get()
    tensor = tensor.detach()
    if state.exchange is None:
        return tensor.clone()
    return alltoall(torch.cat([tensor] * state.num_ranks), [tensor.shape[0]] * state.num_ranks)


@torch.no_grad()
def broadcast(tensor: Tensor, root_rank: int = 0, name: str | None = None) -> Tensor:
    """The tensor of `root_rank`, on all ranks. Raises ValueError when there is no such rank."""
    del name
    check_root(root_rank)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if runtime.get().exchange is not None:
        dist.broadcast(result, root_rank)
    return result


def check_root(root_rank: int) -> None:
    """Raises ValueError unless `root_rank` is a rank."""
    num_ranks = runtime.get().num_ranks
    if not 0 <= root_rank < num_ranks:
        raise ValueError(f"root_rank is {root_rank}, must be in [0, {num_ranks})")
