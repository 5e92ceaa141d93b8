# SPDX-License-Identifier: Apache-2.0
"""What runs between steps, on the host: the ranks as a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparse_operation_kit.checkpoint.group import Array
from sparse_operation_kit.torch import communication, runtime


class Group:
    """The ranks that init() found, as sparse_operation_kit.checkpoint.Group wants them."""

    def __init__(self) -> None:
        state = runtime.get()
        self.rank, self.size = state.rank, state.num_ranks
        self._exchange = state.exchange

    def allgather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, by rank."""
        if self.size == 1:
            return [data]
        lengths = [int(length) for length in self._gathered(torch.tensor([len(data)]))]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self._gathered(padded)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def alltoall(self, values: Array, splits: Sequence[int]) -> Array:
        """Sends splits[r] of `values`, [n] float32, to each rank r; what came, by rank."""
        flat = torch.from_numpy(np.ascontiguousarray(values))
        return np.asarray(communication.alltoall(flat, list(splits)).cpu().numpy())

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        assert self._exchange is not None
        group = self._exchange.group
        if "cpu" not in str(dist.get_backend_config(group)):  # nccl alone takes tensors on the GPU only
            tensor = tensor.cuda()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=group)
        return [part.cpu() for part in parts]
