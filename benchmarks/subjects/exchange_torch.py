# SPDX-License-Identifier: Apache-2.0
"""Exchanges from PyTorch: the frontend's over NCCL in the core, and all_to_all_single over torch.distributed's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import sparse_operation_kit.torch as sok
from sparse_operation_kit import core
from sparse_operation_kit.torch import runtime


class Ranks:
    """Under torchrun, a GPU a rank."""

    def __init__(self) -> None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        sok.init(exchange="nccl")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        exchange = runtime.get().exchange
        assert exchange is not None
        self._exchange: Any = exchange
        self.versions = {
            "GPU": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "NCCL of torch": ".".join(map(str, torch.cuda.nccl.version())),
            "NCCL of the core": core.nccl_properties().version_text,
        }

    def subjects(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        def in_core(values: torch.Tensor) -> torch.Tensor:
            each = [values.numel() // self.num_ranks] * self.num_ranks
            return self._exchange.all_to_all(values, each, each)

        def all_to_all_single(values: torch.Tensor) -> torch.Tensor:
            received = torch.empty_like(values)
            dist.all_to_all_single(received, values)
            return received

        def swap_counts(values: torch.Tensor) -> Any:
            return self._exchange.swap_counts(torch.zeros((self.num_ranks, 27), dtype=torch.int64, device="cuda"))

        return {"nccl in the core": in_core, "torch.distributed": all_to_all_single, "swap of counts": swap_counts}

    def chains(self, length: int) -> dict[str, Callable[[Any], Any]]:
        return {}

    def values(self, mib: float) -> torch.Tensor:
        elements = int(mib * 2**18) // self.num_ranks * self.num_ranks
        return torch.rand(elements, device="cuda")

    def wait(self) -> None:
        torch.cuda.synchronize()

    def slowest(self, seconds: float) -> float:
        number = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)
