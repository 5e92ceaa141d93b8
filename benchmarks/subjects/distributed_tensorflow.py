# SPDX-License-Identifier: Apache-2.0
"""Sharded tables from TensorFlow: the project's frontend under Horovod, rows dealt out or tables placed whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects.gpu_tensorflow_frontend import make_optimizer
from benchmarks.subjects.tensorflow_inputs import MakeIds, functions, ragged_inputs
from examples.dlrm.settings import Settings
from examples.dlrm.tensorflow_model import TensorflowModel
from sparse_operation_kit import core


class Ranks:
    """Under horovodrun, a GPU a rank."""

    def __init__(self) -> None:
        hvd.init()
        gpu = tf.config.list_physical_devices("GPU")[hvd.local_rank()]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
        sok.init()
        self.rank, self.num_ranks = hvd.rank(), hvd.size()
        self.versions = {
            "GPU": core.device_properties(hvd.local_rank()).name,
            "tensorflow": tf.__version__,
            "horovod": horovod.__version__,
        }

    def subjects(self, names: list[str]) -> dict[str, Callable[[Case, list[Batch], str], Any]]:
        makers: dict[str, Callable[[Case, list[Batch], str], Any]] = {
            "TensorFlow, by row": lambda *given: Frontend(*given, by_row=True),
            "TensorFlow, by table": lambda *given: Frontend(*given, by_row=False),
        }
        return {name: make for name, make in makers.items() if not names or name in names}

    def wait(self) -> None:
        tf.test.experimental.sync_devices()

    def slowest(self, seconds: float) -> float:
        with tf.device("CPU:0"):
            return float(tf.reduce_max(hvd.allgather(tf.constant([seconds], tf.float64), name="slowest")))

    def release(self) -> None:
        gc.collect()


def whole_model(step: Settings) -> TensorflowModel:
    """For benchmarks.whole_step."""
    with tf.device("GPU:0"):
        return TensorflowModel(step, "GPU:0")


class Frontend:
    """lookup_sparse of ragged ids in a tf.function a batch (see gpu_tensorflow_frontend.py), OptimizerWrapper."""

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, by_row: bool) -> None:
        combiners = [case.combiner] * case.tables
        bags = len(batches[0].row_splits) - 1
        with tf.device("GPU:0"):
            self.tables = [
                sok.Variable(
                    shape=[case.rows, case.dimension],
                    initializer="uniform",
                    name=f"table{t}",
                    mode=None if by_row else f"localized:{t % hvd.size()}",
                )
                for t in range(case.tables)
            ]
            inputs = ragged_inputs(batches)
            gradients = [tf.random.normal((bags, case.dimension)) for _ in self.tables]
        wrapped = make_optimizer(optimizer)

        def forward(make_ids: MakeIds) -> Any:
            return sok.lookup_sparse(self.tables, make_ids(), combiners=combiners)

        def step(make_ids: MakeIds) -> None:
            with tf.GradientTape() as tape:
                result = forward(make_ids)
            slices = tape.gradient(result, self.tables, output_gradients=gradients)
            wrapped.apply_gradients(zip(slices, self.tables, strict=True))

        self._forward = functions(forward, inputs)
        self._step = functions(step, inputs)

    def forward(self, i: int) -> None:
        self._forward[i]()

    def step(self, i: int) -> None:
        self._step[i]()
