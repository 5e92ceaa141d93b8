# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks: all-to-all with counts, the swap of these counts that comes before it, and how all ranks
learn that one of them failed.

`Exchange` does it over torch.distributed, `NcclExchange` does it for CUDA tensors over the core's NCCL communicator.
"""

from __future__ import annotations

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

    def swap_counts(self, counts: Tensor, failed: bool = False) -> tuple[Tensor, Tensor]:
        """Tells every rank how much comes to it, and whether this rank has failed.

        Args:
          counts: [num_ranks, k] int64; row r goes to rank r. The last column is not 0 where this rank has failed; what
            the device has found wrong is added on the way. Where it lies the tables of the call are: ranks must agree.
          failed: this rank has failed: it raises nothing here.

        Returns:
          (sent, received), both [num_ranks, k] int64 on the CPU: the counts, and what comes from each rank. Waits for
          both. Of a rank that failed they mean nothing.

        Raises:
          PeerError: another rank failed and this one did not; then every rank leaves the call here, the failed one with
            its own error.
          IndexError, ValueError: what the device has found wrong on this rank.
        """
        sent, received = self._swap(counts)
        if not failed:
            _check_swapped(counts.device, sent, received)
        return sent, received

    def _swap(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        sent = counts.cpu()
        if counts.is_cuda:
            sent[:, -1] = torch.maximum(sent[:, -1], ops.error_flags(counts).cpu())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return sent, received

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

    def _swap(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        communicator = self.communicator(counts.device) if counts.is_cuda else None
        if communicator is None:
            return super()._swap(counts)
        sent, received = ops.swap_counts(counts, communicator.handle).unbind()
        return sent, received

    def close(self) -> None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
            self._unusable = True
            self.handle.connect(0, -1)
        if communicator is not None:
            communicator.close()


# --- what C++ calls (csrc/exchange.h) -------------------------------------------------------------------------------


def _find(number: int) -> Exchange:
    exchange = _exchanges.get(number)
    if exchange is None:
        raise RuntimeError("the ranks of this lookup do not exchange any more: sok.init() was called anew since")
    return exchange


def _exchange(number: int, tensor: Tensor, send: list[int], receive: list[int]) -> Tensor:
    return _find(number).all_to_all(tensor, send, receive)


def _exchange_counts(number: int, counts: Tensor, failed: bool) -> tuple[Tensor, Tensor]:
    return _find(number).swap_counts(counts, failed)


def _check_swapped(device: torch.device, sent: Tensor, received: Tensor) -> None:
    failed = ops.failed_ranks(received)
    if failed:
        if not ops.failed_ranks(sent):
            raise PeerError(failed)
        # The swap has waited for the device.
        ops.check_errors(torch.cuda.current_device() if device.index is None else device.index)
        raise RuntimeError("the GPU has found something wrong in this call or before, and another thread raised it")


for _name, _function in (
    ("exchange", _exchange),
    ("exchange_counts", _exchange_counts),
    ("check_swapped", _check_swapped),
):
    torch.library.impl(f"sok::{_name}", "CompositeExplicitAutograd")(_function)
