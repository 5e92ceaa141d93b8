# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients over all ranks, and clipping by them: PyTorch's functions see this rank's rows of tables alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.errors import PeerError
from sparse_operation_kit.torch.gradient import PendingGradient
from sparse_operation_kit.torch.table_parameter import TableParameter


@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all gradients of a model as one vector, as torch.nn.utils.get_total_norm, the same on every rank.

    Of tables, whose gradients are a :class:`~sparse_operation_kit.torch.gradient.PendingGradient` of this rank's rows,
    the rows of all ranks count; others are replicas and count once.

    With several ranks every rank makes the call, whatever gradients it has, and waits for the others. Then
    torch.nn.utils.clip_grads_with_norm_ may scale by the result.

    Args:
      tensors: gradients: those of tables as ``table.grad`` gives them; dense ones, the same on every rank (as after
        DistributedDataParallel's backward pass or ``DistributedOptimizer.synchronize()``), or DTensors.
      norm_type: p > 0, or inf.
      error_if_nonfinite: whether a norm that is NaN or infinite is an error.
      foreach: of dense gradients, as in PyTorch.

    Returns:
      [], float32 (float64 where a dense gradient is), where the first gradient is.

    Raises:
      ValueError: another norm_type.
      RuntimeError: with error_if_nonfinite; a gradient of a table whose ids were overwritten. PeerError where the
        latter happened on another rank.
    """
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    of_tables = [gradient for gradient in gradients if isinstance(gradient, PendingGradient)]
    dense = [gradient for gradient in gradients if not isinstance(gradient, PendingGradient)]
    return _total_norm(lambda: of_tables, dense, norm_type, error_if_nonfinite, foreach, _device(gradients))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients of a model so that their norm over all ranks is at most `max_norm`, as
    torch.nn.utils.clip_grad_norm_ does in one process. PyTorch's own would scale by another factor on each rank.

    Call it between backward() and the step. With several ranks every rank makes the call, with the same parameters.
    Dense gradients are to be the same on every rank: DistributedDataParallel sees to it; with
    :class:`DistributedOptimizer` call its ``synchronize()`` before.

    Args:
      parameters: tables and dense ones; those without gradients are passed over.
      max_norm: of all gradients together.
      norm_type, error_if_nonfinite, foreach: as of :func:`get_total_norm`.

    Returns and raises:
      As :func:`get_total_norm`, of the gradients as they were. Nothing is scaled where it raises.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    tables: list[TableParameter] = []
    dense: list[Tensor] = []
    for parameter in given:
        if issubclass(type(parameter), TableParameter):  # isinstance is slow of parameters
            tables.append(cast(TableParameter, parameter))
        elif parameter.grad is not None:
            dense.append(parameter)
    others = [parameter.grad for parameter in dense if parameter.grad is not None]
    read: list[TableParameter] = []
    summed: list[Tensor] = []

    def of_tables() -> Sequence[Tensor]:
        numbers = [table._gradient_number for table in tables]
        positions: Sequence[int] = range(len(tables))
        if len(set(numbers)) == len(numbers):  # PyTorch counts and scales what is given twice twice
            values, positions = torch.classes.sok.TableGradient.reduce_unread(numbers, tables)
            summed.extend(values)
        read.extend(tables[i] for i in positions if tables[i].grad is not None)
        return [*summed, *(table.grad for table in read if table.grad is not None)]

    total = _total_norm(of_tables, others, norm_type, error_if_nonfinite, foreach, _device(given))
    for some in (read, *_apart(dense)):
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, total, False if some is read else foreach)
    for values in summed:
        values.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0).to(values.device))
    return total


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _apart(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """DTensors, which PyTorch's functions do not take beside others, and others."""
    return [t for t in tensors if isinstance(t, DTensor)], [t for t in tensors if not isinstance(t, DTensor)]


def _total_norm(
    of_tables: Callable[[], Sequence[Tensor]],
    dense: Sequence[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    device: torch.device,
) -> Tensor:
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in dense) else torch.float32
    state = runtime.get()
    failure = None
    try:
        given = of_tables()
        plain = [gradient for gradient in given if _is_plain(gradient)]
        rows = [
            torch.linalg.vector_norm(_elements(gradient), p, dtype=torch.float64).to(device)
            for gradient in given
            if not _is_plain(gradient)
        ]
        for some in _by_device([values for values in plain if values.numel()]):
            rows.append(
                torch.linalg.vector_norm(torch.stack(torch._foreach_norm(some, p, torch.float64)), p).to(device)
            )
        replicas = [torch.nn.utils.get_total_norm(some, p, False, foreach) for some in _apart(dense) if some]
        own = [_norm(rows, p, device), _norm([_whole(norm).to(device) for norm in replicas], p, device)]
    except Exception as error:
        if state.exchange is None:
            raise
        failure = error
        own = [torch.zeros((), dtype=torch.float64, device=device)] * 2
    if state.exchange is not None:
        mine = torch.stack([*own, torch.full_like(own[0], failure is not None)])
        every = mine.new_empty(state.num_ranks * len(mine))
        dist.all_gather_into_tensor(every, mine)
        every = every.view(state.num_ranks, len(mine))
        if failure is not None:
            raise failure
        failed = torch.nonzero(every[:, 2]).flatten().tolist()
        if failed:
            raise PeerError(failed, "the norm of the gradients")
        own = [torch.linalg.vector_norm(every[:, 0], p), every[:, 1].max()]
    total = _norm(own, p, device)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {p} of the gradients is {total.item()}, so they cannot be clipped; with "
            "error_if_nonfinite=False they are scaled all the same"
        )
    return total.to(dtype)


def _is_plain(gradient: Tensor) -> bool:
    return type(gradient) is Tensor and gradient.layout == torch.strided


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.device == device] for device in devices]


def _elements(gradient: Tensor) -> Tensor:
    """Those of a table's gradient that may not be 0, each once."""
    if isinstance(gradient, PendingGradient) or gradient.layout != torch.sparse_coo:
        return gradient
    return gradient.coalesce().values()


def _norm(norms: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Of the norms of parts, [] float64."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]), p)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
