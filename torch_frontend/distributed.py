# SPDX-License-Identifier: Apache-2.0
"""Data-parallel parameters beside tables: the same values at the start, averaged gradients at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_operation_kit.torch import communication, runtime
from sparse_operation_kit.torch.optimizer import OptimizerWrapper
from sparse_operation_kit.torch.table_parameter import is_table

_BUCKET_BYTES = 32 << 20


@torch.no_grad()
def broadcast_variables(vars: Any, root_rank: int = 0) -> None:
    """Gives every rank the values of `root_rank`, in place. Tables are left alone: each rank has rows of its own.

    Args:
      vars: tensors, e.g. ``model.parameters()``; (name, tensor) pairs, e.g. ``model.named_parameters()``; or a mapping
        of names to tensors, e.g. ``model.state_dict(keep_vars=True)``. The same on every rank. What is no tensor is
        left alone.
      root_rank: in [0, num_ranks()).

    Raises ValueError for another root_rank.
    """
    communication.check_root(root_rank)
    if runtime.get().exchange is None:
        return
    for value in _tensors(vars):
        if is_table(value):
            continue
        buffer = value.detach()
        if buffer.is_contiguous():
            dist.broadcast(buffer, root_rank)
        else:
            contiguous = buffer.contiguous()
            dist.broadcast(contiguous, root_rank)
            buffer.copy_(contiguous)


def _tensors(variables: Any) -> list[Tensor]:
    items: Iterable[Any] = variables.values() if isinstance(variables, Mapping) else variables
    values = (item[1] if isinstance(item, tuple) else item for item in items)
    return [value for value in values if isinstance(value, Tensor)]


class DistributedOptimizer(OptimizerWrapper):
    """An :class:`OptimizerWrapper` that first averages the gradients of dense parameters over the ranks.

    Use it where the model is not wrapped in DistributedDataParallel, which averages them itself. Gradients of tables
    are summed where the rows are (divided by the number of ranks after ``init(gradient="mean")``: what a loss that is a
    mean over the local batch wants).

    Every rank calls step(). A parameter that has a gradient on some ranks only counts as zero on the others; one that
    has none anywhere is left alone.

    Args:
      optimizer: of torch.optim, this package's own, or an OptimizerWrapper.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        runtime.get()
        super().__init__(optimizer.optimizer if type(optimizer) is OptimizerWrapper else optimizer)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages, then updates every parameter that has a gradient. Returns the loss of `closure`, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        super().step()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Averages the dense gradients over the ranks, in place."""
        if runtime.get().exchange is None:
            return
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and not is_table(parameter)
        ]
        if not parameters:
            return
        device = parameters[0].device
        present = torch.tensor(
            [parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=device
        )
        dist.all_reduce(present)
        bucket: list[Tensor] = []
        size = 0
        for parameter, count in zip(parameters, present.tolist(), strict=True):
            if count == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout != torch.strided:
                parameter.grad = parameter.grad.to_dense()
            gradient = parameter.grad
            if bucket and (
                gradient.dtype != bucket[0].dtype or gradient.device != bucket[0].device or size > _BUCKET_BYTES
            ):
                _average(bucket)
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
        if bucket:
            _average(bucket)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


def _average(bucket: list[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat)
    flat.div_(runtime.get().num_ranks)
    first = 0
    for gradient in bucket:
        gradient.copy_(flat[first : first + gradient.numel()].view_as(gradient))
        first += gradient.numel()
