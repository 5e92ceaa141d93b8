# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks: one method, all-to-all with counts; and how all ranks learn that one of them failed.

`Exchange` does it over torch.distributed, `NcclExchange` does it for CUDA tensors over the core's NCCL communicator.
"""

from __future__ import annotations

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


class Exchange:
    """All-to-all over a process group of torch.distributed.

    CUDA tensors travel by the group's nccl backend, or, where it has none, through host memory by the CPU's backend.
    """

    def __init__(self, group: Any) -> None:
        # Not a reference that keeps the group alive: destroy_process_group() could not end its threads then, and one
        # that is still at work when the interpreter ends takes the process down ("terminate called without ...").
        self._group = weakref.ref(group)
        self.num_ranks: int = dist.get_world_size(group)
        self._through_host = not dist.is_nccl_available() or "nccl" not in str(dist.get_backend_config(group))

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

    def swap_counts(
        self,
        counts: Tensor | None,
        num_counts: int,
        failed: bool,
        flags: Tensor | None = None,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tells every rank how much comes to it (owner_pooling.Counts), and whether this rank has failed.

        Args:
          counts: [num_ranks, num_counts or fewer] int64 on the CPU or a GPU, 0 where there are no columns; None: this
            rank sends nothing, because it failed.
          failed: this rank knows already that it failed.
          flags: [num_ranks] int64 beside `counts`, not 0 where this rank finds out only now that it failed (a device's
            error record); the caller looks at its record when the call has returned.
          device: where the tables of the call are, if `counts` does not tell it: ranks must agree on it.

        Returns:
          (sent, received), both [num_ranks, num_counts] int64 on the CPU: `counts`, and what comes from each rank.
          Waits for both. Of a rank that failed they mean nothing.

        Raises:
          PeerError: another rank failed and this one did not; then every rank leaves the call here, the failed one with
            its own error.
        """
        del device  # counts always travel by the CPU's backend
        message = torch.empty((self.num_ranks, num_counts + 1), dtype=torch.int64)
        _write_message(message, counts, failed, flags)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self.group)
        return split_counts(message, received)

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
        self._host: dict[torch.Size, Tensor] = {}  # page-locked

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

    def swap_counts(
        self,
        counts: Tensor | None,
        num_counts: int,
        failed: bool,
        flags: Tensor | None = None,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor]:
        device = device if counts is None else counts.device
        communicator = self.communicator(device) if device is not None and device.type == "cuda" else None
        if communicator is None:
            return super().swap_counts(counts, num_counts, failed, flags, device)
        with torch.cuda.device(device):
            messages = torch.empty((2, self.num_ranks, num_counts + 1), dtype=torch.int64, device=device)
            _write_message(messages[0], counts, failed, flags)
            each = [num_counts + 1] * self.num_ranks
            ops.all_to_all(messages[1].view(-1), messages[0].view(-1), communicator.handle, each, each)
            with self._lock:
                host = self._host.get(messages.shape)
                if host is None:
                    host = torch.empty(messages.shape, dtype=torch.int64, pin_memory=True)
                    self._host[messages.shape] = host
                host.copy_(messages, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                sent, received = host.clone()
        ops.check_communicator(communicator.handle)
        return split_counts(sent, received)

    def close(self) -> None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
            self._unusable = True
        if communicator is not None:
            communicator.close()


def _write_message(message: Tensor, counts: Tensor | None, failed: bool, flags: Tensor | None) -> None:
    """Fills what this rank sends, [num_ranks, num_counts + 1]: the counts, and whether it has failed."""
    given = 0 if counts is None else counts.shape[1]
    if counts is not None:
        message[:, :given] = counts
    message[:, given:-1] = 0
    message[:, -1] = flags if flags is not None and not failed else int(failed)


def split_counts(sent: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
    """The counts of two swapped messages [num_ranks, num_counts + 1], whose last column says who failed.

    Raises PeerError when another rank failed and this one did not.
    """
    failures = received[:, -1].nonzero().flatten().tolist()
    if failures and not sent[:, -1].any():
        raise PeerError(failures)
    return sent[:, :-1], received[:, :-1]
