# SPDX-License-Identifier: Apache-2.0
"""init() and what it leaves behind: this process's place among the ranks, the exchange and the options of the call."""

from __future__ import annotations

import dataclasses
import os

import torch
import torch.distributed as dist

from sparse_operation_kit import core
from sparse_operation_kit.arguments import InitArguments, check_init
from sparse_operation_kit.nccl import NcclUnavailable
from sparse_operation_kit.torch.exchange import Exchange, NcclExchange

TOOLS = ("torch",)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The state of an initialised frontend. `exchange` is None where there is one rank."""

    arguments: InitArguments
    rank: int
    num_ranks: int
    exchange: Exchange | None

    @property
    def gradient_scale(self) -> float:
        """What summed gradients of table rows are multiplied with: 1, or 1 / ranks for gradient="mean"."""
        return 1.0 / self.num_ranks if self.arguments.gradient == "mean" else 1.0


_runtime: Runtime | None = None


def init(
    comm_tool: str | None = None,
    use_legacy_optimizer: bool = True,
    *,
    gradient: str = "sum",
    exchange: str = "auto",
    seed: int = 0,
) -> None:
    """Prepares this process; call it once on every rank, after ``torch.distributed.init_process_group``.

    Without a process group the process is alone. With one, the tables made afterwards are sharded over its ranks; keys
    and rows travel in a group of their own, so that they never wait for, or mix with, what DistributedDataParallel
    sends.

    Args:
      comm_tool: "torch" (torch.distributed), also what None means.
      use_legacy_optimizer: accepted because SparseOperationKit has it; ignored.
      gradient: "sum": the gradient of a row is summed over all ranks. "mean": it is also divided by their number, which
        is what a loss that is a mean over the local batch needs to agree with one process on the joined batch (and with
        what DistributedDataParallel does for dense parameters).
      exchange: what moves keys and rows on GPUs; on the CPU torch.distributed does. "nccl": the core's own NCCL
        communicator, which is made by the first lookup of a table on a GPU, on all ranks together. "auto": that where
        it can be had, else torch.distributed, with a line in the log. "torch" (also "engine"): torch.distributed.
      seed: with a table's name it determines the table's initial rows.

    Raises:
      ValueError: an unknown comm_tool, gradient or exchange, a seed outside [0, 2**63), or a second call with other
        arguments. A second call with the same arguments does nothing.
      NcclUnavailable (a RuntimeError): exchange="nccl" without a GPU or without NCCL. That ranks share a GPU is found
        by the first lookup there.
    """
    del use_legacy_optimizer
    global _runtime
    arguments = check_init(comm_tool, gradient, exchange, seed, default_tool="torch", tools=TOOLS, engine="torch")
    distributed = dist.is_available() and dist.is_initialized()
    num_ranks = dist.get_world_size() if distributed else 1
    alive = _runtime is not None and (_runtime.exchange is None or _runtime.exchange.alive)
    if _runtime is not None and alive and _runtime.num_ranks == num_ranks:
        if _runtime.arguments != arguments:
            raise ValueError(f"init() was called before with {_runtime.arguments} and now with {arguments}")
        return
    shutdown()
    if num_ranks == 1:
        _runtime = Runtime(arguments, 0, 1, None)
    else:
        _runtime = Runtime(arguments, dist.get_rank(), num_ranks, _make_exchange(arguments.exchange))


def _make_exchange(kind: str) -> Exchange:
    if kind == "nccl":
        if not torch.cuda.is_available():
            raise NcclUnavailable('exchange="nccl" needs a GPU, and PyTorch sees none; use exchange="auto"')
        try:
            core.nccl_properties()
        except (OSError, NotImplementedError) as error:
            raise NcclUnavailable(f'exchange="nccl" cannot be had: {error}') from error
    # Whatever backend the default group has: counts travel on the CPU, and tables may be on either device.
    both = torch.cuda.is_available() and dist.is_gloo_available() and dist.is_nccl_available()
    group = dist.new_group(backend="cpu:gloo,cuda:nccl" if both else None)
    return Exchange(group) if kind == "torch" else NcclExchange(group, required=kind == "nccl")


def shutdown() -> None:
    """Forgets init(), so that it may be called with other arguments. Tables made before must not be used afterwards.

    With several ranks that exchanged over NCCL all of them call it, when their work on the GPU is enqueued.
    """
    global _runtime
    if _runtime is not None and _runtime.exchange is not None:
        _runtime.exchange.close()
    _runtime = None


def get() -> Runtime:
    """The state; raises RuntimeError before init()."""
    if _runtime is None:
        raise RuntimeError(
            "sparse_operation_kit.torch is not initialised: call sok.init() on every rank first (after "
            "torch.distributed.init_process_group when there are several)"
        )
    return _runtime


def rank() -> int:
    """This process's rank, in [0, num_ranks())."""
    return get().rank


def num_ranks() -> int:
    """The number of processes that share the tables."""
    return get().num_ranks


def local_rank() -> int:
    """This process's rank on its host, as torchrun gives it in LOCAL_RANK; without that, rank()."""
    return int(os.environ.get("LOCAL_RANK", get().rank))


def num_gpus() -> int:
    """SparseOperationKit's name for num_ranks(): it runs one process a GPU."""
    return get().num_ranks


def global_gpu_id() -> int:
    """SparseOperationKit's name for rank()."""
    return get().rank


def default_device() -> torch.device:
    """Where a table lives when nobody says: PyTorch's default device."""
    return torch.get_default_device()
