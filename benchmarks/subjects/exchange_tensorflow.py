# SPDX-License-Identifier: Apache-2.0
"""Exchanges from TensorFlow: the frontend's over NCCL in the core, and hvd.alltoall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit import core
from sparse_operation_kit.tensorflow import runtime

ALLTOALL = "hvd.alltoall" if hvd.nccl_built() else "hvd.alltoall (Gloo)"


class Ranks:
    """Under horovodrun, a GPU a rank."""

    def __init__(self) -> None:
        hvd.init()
        gpu = tf.config.list_physical_devices("GPU")[hvd.local_rank()]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
        sok.init(exchange="nccl")
        self.rank, self.num_ranks = hvd.rank(), hvd.size()
        exchange = runtime.get().exchange
        assert exchange is not None
        self._exchange: Any = exchange
        self.versions = {
            "GPU": core.device_properties(hvd.local_rank()).name,
            "tensorflow": tf.__version__,
            "horovod": horovod.__version__,
            "horovod has NCCL": str(bool(hvd.nccl_built())),
            "NCCL of the core": core.nccl_properties().version_text,
        }

    def subjects(self) -> dict[str, Callable[[tf.Tensor], tf.Tensor]]:
        splits: dict[int, tf.Tensor] = {}

        def in_core(values: tf.Tensor) -> tf.Tensor:
            each = splits.get(values.shape[0])
            if each is None:
                with tf.device("CPU:0"):
                    each = tf.fill([self.num_ranks], np.int32(values.shape[0] // self.num_ranks))
                splits[values.shape[0]] = each
            return self._exchange.all_to_all(values, each, each)

        def alltoall(values: tf.Tensor) -> tf.Tensor:
            return hvd.alltoall(values, name="benchmark")

        def swap_counts(values: tf.Tensor) -> Any:
            with tf.device("GPU:0"):
                return self._exchange.swap_counts(self._counts)

        with tf.device("GPU:0"):
            self._counts = tf.ones([self.num_ranks, 27], tf.int64)
        return {"nccl in the core": in_core, ALLTOALL: alltoall, "swap of counts": swap_counts}

    def chains(self, length: int) -> dict[str, Callable[[tf.Tensor], tf.Tensor]]:
        @tf.function(autograph=False, reduce_retracing=True)
        def in_core(values: tf.Tensor) -> tf.Tensor:
            with tf.device("GPU:0"):
                shape = tf.shape(values)  # on the host all values would be copied there for it
            with tf.device("CPU:0"):
                each = tf.fill([self.num_ranks], shape[0] // self.num_ranks)
            for _ in range(length):
                with tf.device("GPU:0"):
                    values = self._exchange.all_to_all(tf.identity(values), each, each)
            return values

        @tf.function(autograph=False, reduce_retracing=True)
        def alltoall(values: tf.Tensor) -> tf.Tensor:
            for _ in range(length):
                values = hvd.alltoall(values)
            return values

        return {"nccl in the core": in_core, ALLTOALL: alltoall}

    def values(self, mib: float) -> tf.Tensor:
        elements = int(mib * 2**18) // self.num_ranks * self.num_ranks
        with tf.device("GPU:0"):
            return tf.random.uniform([elements])

    def wait(self) -> None:
        tf.test.experimental.sync_devices()

    def slowest(self, seconds: float) -> float:
        with tf.device("CPU:0"):
            return float(tf.reduce_max(hvd.allgather(tf.constant([seconds], tf.float64), name="slowest")))
