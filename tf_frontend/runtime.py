# SPDX-License-Identifier: Apache-2.0
"""init() and what it leaves behind: this process's place among the ranks, the exchange and the options of the call."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import tensorflow as tf

from sparse_operation_kit import core
from sparse_operation_kit.arguments import InitArguments, check_init
from sparse_operation_kit.nccl import NcclUnavailable
from sparse_operation_kit.tensorflow.exchange import Exchange, HorovodExchange, NcclExchange

TOOLS = ("horovod",)


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The state of an initialised frontend. `exchange` is None where there is one rank."""

    arguments: InitArguments
    rank: int
    num_ranks: int
    local_rank: int
    exchange: Exchange | None

    @property
    def gradient_scale(self) -> float:
        """What summed gradients of table rows are multiplied with: 1, or 1 / ranks for gradient="mean"."""
        return 1.0 / self.num_ranks if self.arguments.gradient == "mean" else 1.0


_runtime: Runtime | None = None


def horovod() -> Any:
    """The module horovod.tensorflow when it is in use, else None.

    It is not imported for this: `hvd.init()` was called through it if it was called at all.
    """
    module = sys.modules.get("horovod.tensorflow")
    return module if module is not None and module.is_initialized() else None


def init(
    comm_tool: str | None = None,
    use_legacy_optimizer: bool = True,
    *,
    gradient: str = "sum",
    exchange: str = "auto",
    seed: int = 0,
) -> None:
    """Prepares this process; call it once on every rank, after ``hvd.init()``.

    Without Horovod the process is alone. With it, the tables made afterwards are sharded over its ranks.

    Args:
      comm_tool: "horovod", also what None means.
      use_legacy_optimizer: accepted because SparseOperationKit has it; ignored.
      gradient: "sum": the gradient of a row is summed over all ranks. "mean": it is also divided by their number, which
        is what a loss that is a mean over the local batch needs to agree with one process on the joined batch (and with
        the average that `DistributedOptimizer` and `DistributedGradientTape` take of dense gradients).
      exchange: what moves keys and rows on GPUs; on the CPU Horovod does. "nccl": the core's own NCCL communicator,
        which is made by the first lookup of a table on a GPU, on all ranks together. "auto": that where it can be had,
        else Horovod, with a line in the log. "horovod" (also "engine"): Horovod.
      seed: with a table's name it determines the table's initial rows.

    Raises:
      ValueError: an unknown comm_tool, gradient or exchange, a seed outside [0, 2**63), or a second call with other
        arguments. A second call with the same arguments does nothing.
      NcclUnavailable (a RuntimeError): exchange="nccl" without a GPU or without NCCL. That ranks share a GPU is found
        by the first lookup there.
    """
    del use_legacy_optimizer
    global _runtime
    arguments = check_init(comm_tool, gradient, exchange, seed, default_tool="horovod", tools=TOOLS, engine="horovod")
    hvd = horovod()
    num_ranks = hvd.size() if hvd else 1
    if _runtime is not None and _runtime.num_ranks == num_ranks:
        if _runtime.arguments != arguments:
            raise ValueError(f"init() was called before with {_runtime.arguments} and now with {arguments}")
        return
    shutdown()
    if num_ranks == 1:
        _runtime = Runtime(arguments, 0, 1, 0, None)
    else:
        exchange_made = _make_exchange(arguments.exchange, num_ranks, hvd.rank())
        _runtime = Runtime(arguments, hvd.rank(), num_ranks, hvd.local_rank(), exchange_made)


def _make_exchange(kind: str, num_ranks: int, rank: int) -> Exchange:
    if kind == "nccl":
        if not tf.config.list_physical_devices("GPU"):
            raise NcclUnavailable('exchange="nccl" needs a GPU, and TensorFlow sees none; use exchange="auto"')
        try:
            core.nccl_properties()
        except (OSError, NotImplementedError) as error:
            raise NcclUnavailable(f'exchange="nccl" cannot be had: {error}') from error
    return HorovodExchange() if kind == "horovod" else NcclExchange(num_ranks, rank, required=kind == "nccl")


def shutdown() -> None:
    """Forgets init(), so that it may be called with other arguments. Tables made before must not be used afterwards.

    With several ranks that exchanged over NCCL all of them call it.
    """
    global _runtime
    if _runtime is not None and _runtime.exchange is not None:
        _runtime.exchange.close()
    _runtime = None


def get() -> Runtime:
    """The state; raises RuntimeError before init()."""
    if _runtime is None:
        raise RuntimeError(
            "sparse_operation_kit.tensorflow is not initialised: call sok.init() on every rank first (after hvd.init() "
            "when there are several)"
        )
    return _runtime


def rank() -> int:
    """This process's rank, in [0, num_ranks())."""
    return get().rank


def num_ranks() -> int:
    """The number of processes that share the tables."""
    return get().num_ranks


def local_rank() -> int:
    """This process's rank on its host."""
    return get().local_rank


def num_gpus() -> int:
    """SparseOperationKit's name for num_ranks(): it runs one process a GPU."""
    return get().num_ranks


def global_gpu_id() -> int:
    """SparseOperationKit's name for rank()."""
    return get().rank
