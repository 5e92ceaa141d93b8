# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks: one method, all-to-all with counts; and how all ranks learn that one of them failed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_operation_kit.torch.errors import PeerError


class Exchange:
    """All-to-all over a process group of torch.distributed (gloo for CPU tensors, nccl for CUDA tensors)."""

    def __init__(self, group: Any) -> None:
        # Not a reference that keeps the group alive: destroy_process_group() could not end its threads then, and one
        # that is still at work when the interpreter ends takes the process down ("terminate called without ...").
        self._group = weakref.ref(group)
        self.num_ranks: int = dist.get_world_size(group)

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
        received = tensor.new_empty(sum(receive))
        dist.all_to_all_single(received, tensor, list(receive), list(send), group=self.group)
        return received

    def swap_counts(
        self, counts: Tensor | None, num_tables: int, failed: bool, flags: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tells every rank how many keys of each table come to it, and whether this rank has failed.

        Args:
          counts: [num_ranks, num_tables] int64 on the CPU or a GPU; None: this rank sends nothing, because it failed.
          failed: this rank knows already that it failed.
          flags: [num_ranks] int64 beside `counts`, not 0 where this rank finds out only now that it failed (a device's
            error record, Context.flag_errors); the caller looks at its record when the call has returned.

        Returns:
          (sent, received), both [num_ranks, num_tables] int64 on the CPU: `counts`, and what comes from each rank.
          Waits for both. Of a rank that failed they mean nothing.

        Raises:
          PeerError: another rank failed and this one did not; then every rank leaves the call here, the failed one with
            its own error.
        """
        message = torch.zeros((self.num_ranks, num_tables + 1), dtype=torch.int64)
        if counts is not None:
            message[:, :num_tables] = counts
        if failed:
            message[:, num_tables] = 1
        elif flags is not None:
            message[:, num_tables] = flags
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self.group)
        return split_counts(message, received)


def split_counts(sent: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
    """The counts of two swapped messages [num_ranks, num_tables + 1], whose last column says who failed.

    Raises PeerError when another rank failed and this one did not.
    """
    failures = received[:, -1].nonzero().flatten().tolist()
    if failures and not sent[:, -1].any():
        raise PeerError(failures)
    return sent[:, :-1], received[:, :-1]
