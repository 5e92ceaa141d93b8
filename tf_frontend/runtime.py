# SPDX-License-Identifier: Apache-2.0
"""init() and what it leaves behind: this process's place among the ranks, the exchange and the options."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from sparse_operation_kit import session as _session
from sparse_operation_kit.arguments import SINGLE, InitArguments
from sparse_operation_kit.tensorflow import collectives, keras_compat, strategies
from sparse_operation_kit.tensorflow.engine import HorovodEngine, horovod
from sparse_operation_kit.tensorflow.exchange import EngineExchange, Exchange, NcclExchange

Runtime = _session.Runtime[Exchange]

at_init: list[Callable[[], None]] = []
"""What init() does first."""


class _Session(_session.Session[Exchange]):
    package, framework = "sparse_operation_kit.tensorflow", "TensorFlow"
    engines, starter = ("horovod", "tensorflow"), "hvd.init()"

    def begin(self) -> None:
        for each in at_init:
            each()

    def find_engine(self) -> str:
        several = [engine for engine in self.engines if self.find_ranks(engine)[1] > 1]
        if len(several) > 1:
            raise RuntimeError(
                f"Horovod has {self.find_ranks('horovod')[1]} ranks and MultiWorkerMirroredStrategy "
                f'{self.find_ranks("tensorflow")[1]} workers: say which with sok.init(comm_tool="horovod") or '
                'sok.init(comm_tool="tensorflow")'
            )
        return several[0] if several else self.engines[0]

    def find_ranks(self, engine: str) -> tuple[int, int]:
        if engine == "tensorflow":
            return collectives.place()
        hvd = horovod()
        return (hvd.rank(), hvd.size()) if hvd else (0, 1)

    def make_exchange(self, kind: str, engine: str) -> Exchange:
        made = collectives.CollectiveEngine() if engine == "tensorflow" else HorovodEngine()
        return EngineExchange(made) if kind == engine else NcclExchange(made, required=kind == "nccl")

    def check_job(self, arguments: InitArguments, num_ranks: int) -> None:
        alone = arguments.comm_tool == SINGLE
        strategies.check(num_ranks, alone)
        if not alone:
            strategies.check_job(num_ranks, max(self.find_ranks(engine)[1] for engine in self.engines))

    def use_legacy_optimizers(self) -> None:
        if not keras_compat.prefers_tf_keras():
            return
        legacy = getattr(tf.keras.optimizers, "legacy", None)
        if getattr(getattr(legacy, "Optimizer", None), "__name__", None) == "OptimizerV2":
            tf.keras.optimizers = tf.optimizers = legacy

    def sees_gpu(self) -> bool:
        return bool(tf.config.list_physical_devices("GPU"))

    def local_rank(self) -> int:
        exchange = self.get().exchange
        return 0 if exchange is None else exchange.engine.local_rank


def get_or_begin() -> Runtime:
    """The state. Where nobody has called init() and no engine was started, this process is alone, with its defaults: so
    scripts of SOK 2.x that use nothing but dynamic tables run, which never ask for ranks.
    """
    if session.state is None and session.find_ranks(session.find_engine())[1] == 1:
        session.init(use_legacy_optimizer=False)
    return get_in_strategy()


def get_in_strategy() -> Runtime:
    """The state, for what makes or uses tables: RuntimeError before init(), and within a strategy that has other
    replicas than there are ranks.
    """
    state = session.get()
    strategies.check(state.num_ranks, state.arguments.comm_tool == SINGLE)
    return state


def set_comm_tool(tool: str) -> None:
    """`init(comm_tool=tool)`, by SOK 2.x's name."""
    session.init(comm_tool=tool)


session = _Session()
init, shutdown, get = session.init, session.shutdown, session.get
rank, num_ranks, local_rank = session.rank, session.num_ranks, session.local_rank
num_gpus, global_gpu_id = session.num_gpus, session.global_gpu_id
