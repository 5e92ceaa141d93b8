# SPDX-License-Identifier: Apache-2.0
"""init() and what it leaves behind: this process's place among Horovod's ranks, the exchange and the options."""

from __future__ import annotations

import os
import sys
from typing import Any

import tensorflow as tf

from sparse_operation_kit import session as _session
from sparse_operation_kit.tensorflow.exchange import Exchange, HorovodExchange, NcclExchange

Runtime = _session.Runtime[Exchange]


def horovod() -> Any:
    """The module horovod.tensorflow when it is in use, else None.

    It is not imported for this: `hvd.init()` was called through it if it was called at all.
    """
    module = sys.modules.get("horovod.tensorflow")
    return module if module is not None and module.is_initialized() else None


class _Session(_session.Session[Exchange]):
    package, framework = "sparse_operation_kit.tensorflow", "TensorFlow"
    engine, starter = "horovod", "hvd.init()"

    def find_ranks(self) -> tuple[int, int]:
        hvd = horovod()
        return (hvd.rank(), hvd.size()) if hvd else (0, 1)

    def make_exchange(self, kind: str, rank: int, num_ranks: int) -> Exchange:
        return HorovodExchange() if kind == "horovod" else NcclExchange(num_ranks, rank, required=kind == "nccl")

    def use_legacy_optimizers(self) -> None:
        if os.environ.get("TF_USE_LEGACY_KERAS") not in ("1", "True", "true"):
            return  # tf.keras is Keras 3 then, and asking it would import it
        legacy = getattr(tf.keras.optimizers, "legacy", None)
        if getattr(getattr(legacy, "Optimizer", None), "__name__", None) == "OptimizerV2":
            tf.keras.optimizers = tf.optimizers = legacy

    def sees_gpu(self) -> bool:
        return bool(tf.config.list_physical_devices("GPU"))

    def local_rank(self) -> int:
        return horovod().local_rank() if self.get().num_ranks > 1 else 0


def get_or_begin() -> Runtime:
    """The state. Where nobody has called init() and no engine was started, this process is alone, with its defaults: so
    scripts of SOK 2.x that use nothing but dynamic tables run, which never ask for ranks.
    """
    if session.state is None and session.find_ranks()[1] == 1:
        session.init(use_legacy_optimizer=False)
    return session.get()


def set_comm_tool(tool: str) -> None:
    """`init(comm_tool=tool)`, by SOK 2.x's name."""
    session.init(comm_tool=tool)


session = _Session()
init, shutdown, get = session.init, session.shutdown, session.get
rank, num_ranks, local_rank = session.rank, session.num_ranks, session.local_rank
num_gpus, global_gpu_id = session.num_gpus, session.global_gpu_id
