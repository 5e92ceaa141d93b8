# SPDX-License-Identifier: Apache-2.0
"""init() and what it leaves behind: this process's place among torch.distributed's ranks, the exchange, the options."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from sparse_operation_kit import session as _session
from sparse_operation_kit.torch.compiling import keep_order
from sparse_operation_kit.torch.exchange import Exchange, NcclExchange

Runtime = _session.Runtime[Exchange]


class _Session(_session.Session[Exchange]):
    package, framework = "sparse_operation_kit.torch", "PyTorch"
    engines, starter = ("torch",), "torch.distributed.init_process_group"

    def find_ranks(self, engine: str) -> tuple[int, int]:
        del engine  # there is one
        started = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if started else (0, 1)

    def make_exchange(self, kind: str, engine: str) -> Exchange:
        keep_order()
        # Whatever backend the default group has: counts travel on the CPU, and tables may be on either device.
        both = torch.cuda.is_available() and dist.is_gloo_available() and dist.is_nccl_available()
        group = dist.new_group(backend="cpu:gloo,cuda:nccl" if both else None)
        return Exchange(group) if kind == engine else NcclExchange(group, required=kind == "nccl")

    def sees_gpu(self) -> bool:
        return torch.cuda.is_available()

    def alive(self, exchange: Exchange) -> bool:
        return exchange.alive

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.get().rank))


session = _Session()
init, shutdown, get = session.init, session.shutdown, session.get
rank, num_ranks, local_rank = session.rank, session.num_ranks, session.local_rank
num_gpus, global_gpu_id = session.num_gpus, session.global_gpu_id
