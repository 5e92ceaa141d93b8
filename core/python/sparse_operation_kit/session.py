# SPDX-License-Identifier: Apache-2.0
"""init() and what it leaves behind, for either framework: this process's place among the ranks, the exchange and the
options of the call.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Generic, Protocol, TypeVar

from sparse_operation_kit import core
from sparse_operation_kit.arguments import SINGLE, InitArguments, check_init
from sparse_operation_kit.nccl import NcclUnavailable


class Closable(Protocol):
    """An exchange between ranks, as far as it matters here."""

    def close(self) -> None: ...


Exchange = TypeVar("Exchange", bound=Closable)


@dataclasses.dataclass(frozen=True)
class Runtime(Generic[Exchange]):
    """The state of an initialised frontend. `exchange` is None where there is one rank."""

    arguments: InitArguments
    rank: int
    num_ranks: int
    exchange: Exchange | None

    @property
    def gradient_scale(self) -> float:
        """What summed gradients of table rows are multiplied with: 1, or 1 / ranks for gradient="mean"."""
        return 1.0 / self.num_ranks if self.arguments.gradient == "mean" else 1.0


class Session(abc.ABC, Generic[Exchange]):
    """What a process of a framework has been told by init(), and the functions that ask for it."""

    package: str
    framework: str
    engines: tuple[str, ...]
    """What may have started the processes, as `comm_tool` and `exchange` name it; the first where nothing did."""
    starter: str
    """The call that starts the first."""

    def __init__(self) -> None:
        self.state: Runtime[Exchange] | None = None

    # --- what a frontend says -----------------------------------------------------------------------------------------

    def find_engine(self) -> str:
        """What comm_tool=None means now."""
        return self.engines[0]

    @abc.abstractmethod
    def find_ranks(self, engine: str) -> tuple[int, int]:
        """(this process's rank, number of ranks) as the engine has them; (0, 1) where it was not started."""

    @abc.abstractmethod
    def make_exchange(self, kind: str, engine: str) -> Exchange:
        """The exchange "nccl", "auto" or that of the engine, of several ranks."""

    def check_job(self, arguments: InitArguments, num_ranks: int) -> None:
        """Raises RuntimeError where the framework knows of processes that the ranks leave out."""

    def begin(self) -> None:
        """What init() does first; nothing in most frameworks."""

    def use_legacy_optimizers(self) -> None:
        """What `init(use_legacy_optimizer=True)` asks for; nothing in most frameworks."""

    @abc.abstractmethod
    def sees_gpu(self) -> bool:
        """Whether the framework has a GPU."""

    def alive(self, exchange: Exchange) -> bool:
        """Whether the processes that `exchange` connects are still those of the engine."""
        del exchange
        return True

    @abc.abstractmethod
    def local_rank(self) -> int:
        """This process's rank on its host: Horovod's, or LOCAL_RANK as torchrun gives it, without that rank()."""

    # --- the functions ------------------------------------------------------------------------------------------------

    def init(
        self,
        comm_tool: str | None = None,
        use_legacy_optimizer: bool = True,
        *,
        gradient: str = "sum",
        exchange: str = "auto",
        seed: int = 0,
    ) -> None:
        """Prepares this process; call it once on every rank, after ``hvd.init()``,
        ``tf.distribute.MultiWorkerMirroredStrategy()`` or ``torch.distributed.init_process_group``.

        Where none was called the process is alone. Otherwise the tables made afterwards are sharded over its ranks;
        PyTorch's keys and rows travel in a process group of their own, so that they never wait for, or mix with, what
        DistributedDataParallel sends.

        Args:
          comm_tool: the engine that started the processes: "horovod" or "tensorflow" (the workers of a
            MultiWorkerMirroredStrategy, each with one replica) in TensorFlow, "torch" (torch.distributed) in PyTorch.
            None: the one that there is. "single": this process is alone, whatever was started.
          use_legacy_optimizer: where Keras is tf_keras (TF_USE_LEGACY_KERAS=1), ``tf.keras.optimizers`` and
            ``tf.optimizers`` become its legacy optimizers, as SparseOperationKit does it. Elsewhere it means nothing.
          gradient: "sum": the gradient of a row is summed over all ranks. "mean": it is also divided by their number,
            which is what a loss that is a mean over the local batch needs to agree with one process on the joined batch
            (and with the average that `DistributedOptimizer`, `DistributedGradientTape` and DistributedDataParallel
            take of dense gradients).
          exchange: what moves keys and rows on GPUs; on the CPU the engine does. "nccl": the core's own NCCL
            communicator, which is made by the first lookup of a table on a GPU, on all ranks together. "auto": that
            where it can be had, else the engine, with a line in the log. "engine", or its name: the engine.
          seed: with a table's name it determines the table's initial rows.

        Raises:
          ValueError: an unknown comm_tool, gradient or exchange, a seed outside [0, 2**63), or a second call with other
            arguments. A second call with the same arguments does nothing.
          RuntimeError: TensorFlow knows of other processes, or of more replicas in this one, than there are ranks; or
            Horovod and a strategy both have several, and comm_tool does not say which.
          NcclUnavailable (a RuntimeError): exchange="nccl" without a GPU or without NCCL. That ranks share a GPU is
            found by the first lookup there.
        """
        tool = self.find_engine() if comm_tool is None else comm_tool
        arguments = check_init(tool, gradient, exchange, seed, engines=self.engines)
        rank, num_ranks = (0, 1) if arguments.comm_tool == SINGLE else self.find_ranks(arguments.comm_tool)
        self.check_job(arguments, num_ranks)
        self.begin()
        if use_legacy_optimizer:
            self.use_legacy_optimizers()
        state = self.state
        alive = state is not None and (state.exchange is None or self.alive(state.exchange))
        if state is not None and alive and state.num_ranks == num_ranks:
            if state.arguments != arguments:
                raise ValueError(f"init() was called before with {state.arguments} and now with {arguments}")
            return
        self.shutdown()
        if num_ranks > 1 and arguments.exchange == "nccl":
            self._check_nccl()
        made = self.make_exchange(arguments.exchange, arguments.comm_tool) if num_ranks > 1 else None
        self.state = Runtime(arguments, rank, num_ranks, made)

    def _check_nccl(self) -> None:
        if not self.sees_gpu():
            raise NcclUnavailable(f'exchange="nccl" needs a GPU, and {self.framework} sees none; use exchange="auto"')
        try:
            core.nccl_properties()
        except (OSError, NotImplementedError) as error:
            raise NcclUnavailable(f'exchange="nccl" cannot be had: {error}') from error

    def shutdown(self) -> None:
        """Forgets init(), so that it may be called with other arguments. Tables made before must not be used
        afterwards.

        With several ranks that exchanged over NCCL all of them call it, when their work on the GPU is enqueued.
        """
        if self.state is not None and self.state.exchange is not None:
            self.state.exchange.close()
        self.state = None

    def get(self) -> Runtime[Exchange]:
        """The state; raises RuntimeError before init()."""
        if self.state is None:
            raise RuntimeError(
                f"{self.package} is not initialised: call sok.init() on every rank first (after {self.starter} when "
                "there are several)"
            )
        return self.state

    def rank(self) -> int:
        """This process's rank, in [0, num_ranks())."""
        return self.get().rank

    def num_ranks(self) -> int:
        """The number of processes that share the tables."""
        return self.get().num_ranks

    def num_gpus(self) -> int:
        """SparseOperationKit's name for num_ranks(): it runs one process a GPU."""
        return self.get().num_ranks

    def global_gpu_id(self) -> int:
        """SparseOperationKit's name for rank()."""
        return self.get().rank
