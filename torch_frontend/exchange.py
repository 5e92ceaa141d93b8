# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks: one method, all-to-all with counts; and how all ranks learn that one of them failed.

`Exchange` does it over torch.distributed, `NcclExchange` does it for CUDA tensors over the core's NCCL communicator.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_operation_kit import core
from sparse_operation_kit.nccl import NcclUnavailable, SharedGpu, connect, logger
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.errors import PeerError


@dataclasses.dataclass(slots=True)
class CountMessage:
    """How much goes to each rank (csrc/message_counts.h), and whether this rank has failed."""

    device: torch.device
    """Where the tables of the call are: ranks must agree on it."""
    known: Tensor
    """[num_ranks, num_counts + 1] int64 on the CPU; the last column is not 0 where this rank has failed. What the
    device has found wrong is added on the way.
    """
    counts: Sequence[Tensor] = ()
    """[num_ranks, *] int64 on `device`, which stand in place of what is in `known`."""
    columns: Sequence[int] = ()
    """Where: of the first of `counts`, then of the second, ..."""


_numbers = itertools.count()
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
"""By the number by which C++ knows them."""


class Exchange:
    """All-to-all over a process group of torch.distributed.

    CUDA tensors travel by the group's nccl backend, or, where it has none, through host memory by the CPU's backend.
    """

    number: int
    """By which C++ knows `handle`."""
    handle: Any
    """torch.classes.sok.Exchange (csrc/exchange.h): what C++ exchanges by. It does not keep this object alive."""

    def __init__(self, group: Any) -> None:
        self._enlist(dist.get_world_size(group), dist.get_rank(group))
        # Not a reference that keeps the group alive: destroy_process_group() could not end its threads then, and one
        # that is still at work when the interpreter ends takes the process down ("terminate called without ...").
        self._group = weakref.ref(group)
        self._through_host = not dist.is_nccl_available() or "nccl" not in str(dist.get_backend_config(group))

    def _enlist(self, num_ranks: int, rank: int) -> None:
        self.number = next(_numbers)
        self.num_ranks = num_ranks
        self.handle = torch.classes.sok.Exchange(self.number, num_ranks, rank)
        _exchanges[self.number] = self

    @property
    def alive(self) -> bool:
        """Whether the process group is still there."""
        return self._group() is not None

    @property
    def group(self) -> Any:
        """The process group; raises RuntimeError after torch.distributed.destroy_process_group()."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group that sok.init() made was destroyed; call torch.distributed.init_process_group() and "
                "sok.init() again"
            )
        return group

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Sends `send[r]` consecutive elements of a 1-D tensor to each rank r and returns what came, by source rank.

        `receive[r]` is what rank r sends here. Blocks until everything has come (CUDA: until it is enqueued).
        """
        if tensor.is_cuda and self._through_host:
            return self.all_to_all(tensor.cpu(), send, receive).to(tensor.device)
        received = tensor.new_empty(sum(receive))
        dist.all_to_all_single(received, tensor, list(receive), list(send), group=self.group)
        return received

    def swap_counts(self, message: CountMessage) -> tuple[Tensor, Tensor]:
        """Tells every rank how much comes to it, and whether this rank has failed.

        Returns:
          (sent, received), both [num_ranks, num_counts] int64 on the CPU: the message, and what comes from each rank.
          Waits for both. Of a rank that failed they mean nothing.

        Raises:
          PeerError: another rank failed and this one did not; then every rank leaves the call here, the failed one with
            its own error.
          IndexError, ValueError: what the device has found wrong on this rank, unless it had failed before.
        """
        known, counts = message.known, message.counts
        if message.device.type == "cuda" and counts:
            flags = ops.error_flags(counts[0]).cpu()
            known = torch.cat([known[:, :-1], torch.maximum(known[:, -1], flags).unsqueeze(1)], dim=1)
            counts = [each.cpu() for each in counts]
        sent = ops.count_message(known, counts, message.columns)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return _read_swapped(sent, received, message)

    def close(self) -> None:
        """Frees what the exchange holds beside the process group."""


class NcclExchange(Exchange):
    """CUDA tensors travel over the core's NCCL communicator on their current stream, CPU tensors by the process group.

    The communicator is made by the first exchange of CUDA tensors, on all ranks together, for the device of these
    tensors; what is enqueued there is waited for then. With required=False the ranks go on with the process group when
    they cannot have one, and say so once.
    """

    def __init__(self, group: Any, required: bool) -> None:
        super().__init__(group)
        self._required = required
        self._lock = threading.Lock()
        self._communicator: core.Communicator | None = None
        self._unusable = False

    def communicator(self, device: torch.device) -> core.Communicator | None:
        """The communicator, made at the first call, or None where the process group has to do.

        Raises:
          NcclUnavailable: the ranks cannot have one, and exchange="nccl" asked for it.
          ValueError: it is of another device.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        with self._lock:
            if self._communicator is None and not self._unusable:
                torch.cuda.synchronize(index)
                try:
                    rank = dist.get_rank(self.group)
                    self._communicator = connect(index, self.num_ranks, rank, self._allgather)
                    self.handle.connect(self._communicator.handle, index)
                except NcclUnavailable as error:
                    if self._required:
                        raise
                    self._unusable = True
                    self._through_host = self._through_host or isinstance(error, SharedGpu)
                    if rank == 0:
                        logger.warning("%s. CUDA tensors are exchanged by torch.distributed instead", error)
            communicator = self._communicator
        if communicator is not None and communicator.device != index:
            raise ValueError(
                f"a tensor on cuda:{index} cannot be exchanged: this process exchanges those of "
                f"cuda:{communicator.device}. One process has its tables on one GPU"
            )
        return communicator

    def _allgather(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        replies = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(replies, mine, group=self.group)
        return [reply.numpy().tobytes() for reply in replies]

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        communicator = self.communicator(tensor.device) if tensor.is_cuda else None
        if communicator is None:
            return super().all_to_all(tensor, send, receive)
        received = tensor.new_empty(sum(receive))
        ops.all_to_all(received, tensor, communicator.handle, send, receive)
        return received

    def swap_counts(self, message: CountMessage) -> tuple[Tensor, Tensor]:
        device = message.device
        communicator = self.communicator(device) if device.type == "cuda" else None
        if communicator is None:
            return super().swap_counts(message)
        device = torch.device("cuda", communicator.device)
        swapped = ops.swap_counts(message.known, message.counts, message.columns, communicator.handle, device)
        sent, received = swapped.unbind()
        return _read_swapped(sent, received, message)

    def close(self) -> None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
            self._unusable = True
            self.handle.connect(0, -1)
        if communicator is not None:
            communicator.close()


def _read_swapped(sent: Tensor, received: Tensor, message: CountMessage) -> tuple[Tensor, Tensor]:
    """The counts that were swapped. Raises what the device has found, or PeerError."""
    _check_swapped(message.device, message.known, sent, received)
    return sent[:, :-1], received[:, :-1]


# --- what C++ calls (csrc/exchange.h) -------------------------------------------------------------------------------


def _find(number: int) -> Exchange:
    exchange = _exchanges.get(number)
    if exchange is None:
        raise RuntimeError("the ranks of this lookup do not exchange any more: sok.init() was called anew since")
    return exchange


def _exchange(number: int, tensor: Tensor, send: list[int], receive: list[int]) -> Tensor:
    return _find(number).all_to_all(tensor, send, receive)


def _exchange_counts(
    number: int, device: torch.device, known: Tensor, counts: list[Tensor], columns: list[int]
) -> tuple[Tensor, Tensor]:
    return _find(number).swap_counts(CountMessage(device, known, counts, columns))


def _check_swapped(device: torch.device, known: Tensor, sent: Tensor, received: Tensor) -> None:
    failed = ops.failed_ranks(received)
    if failed:
        if not ops.failed_ranks(sent):
            raise PeerError(failed)
        if device.type == "cuda" and not ops.failed_ranks(known):  # the swap has waited for the device
            ops.check_errors(torch.cuda.current_device() if device.index is None else device.index)
            raise RuntimeError("the GPU has found something wrong in this call or before, and another thread raised it")


for _name, _function in (
    ("exchange", _exchange),
    ("exchange_counts", _exchange_counts),
    ("check_swapped", _check_swapped),
):
    torch.library.impl(f"sok::{_name}", "CompositeExplicitAutograd")(_function)
