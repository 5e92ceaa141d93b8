# SPDX-License-Identifier: Apache-2.0
"""Sharded tables from TensorFlow under Horovod: the project's frontend, rows dealt out or tables placed whole, and its
DistributedEmbedding.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.cases import Batch, Case
from benchmarks.subjects.tensorflow_inputs import MakeIds, functions, make_optimizer, ragged_inputs
from examples.dlrm.settings import Settings
from examples.dlrm.tensorflow_model import TensorflowModel
from sparse_operation_kit import core
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp


class Ranks:
    """Under horovodrun, a GPU a rank."""

    def __init__(self) -> None:
        hvd.init()
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
            tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
        sok.init()
        self.rank, self.num_ranks = hvd.rank(), hvd.size()
        self.versions = {"tensorflow": tf.__version__, "horovod": horovod.__version__}
        if gpus:
            self.versions["GPU"] = core.device_properties(hvd.local_rank()).name

    def placements(self) -> dict[str, Callable[..., Any]]:
        return {
            "TensorFlow, by row": functools.partial(Frontend, by_row=True),
            "TensorFlow, by table": functools.partial(Frontend, by_row=False),
        }

    def peers(self) -> dict[str, Callable[..., Any]]:
        return {}

    def layer(self, case: Case, batches: list[Batch], optimizer: str, options: dict[str, Any]) -> Any:
        return Layer(case, batches, optimizer, options)

    def wait(self) -> None:
        tf.test.experimental.sync_devices()

    def slowest(self, seconds: float) -> float:
        with tf.device("CPU:0"):
            return float(tf.reduce_max(hvd.allgather(tf.constant([seconds], tf.float64), name="slowest")))

    def release(self) -> None:
        gc.collect()


def whole_model(step: Settings) -> TensorflowModel:
    """For benchmarks.whole_step."""
    with device():
        return TensorflowModel(step, "GPU:0" if tf.config.get_visible_devices("GPU") else "CPU:0")


def device() -> contextlib.AbstractContextManager[Any]:
    """The scope of tables and batches."""
    return tf.device("GPU:0" if tf.config.get_visible_devices("GPU") else "CPU:0")


class Subject:
    """Ragged ids in a tf.function a batch (see gpu_tensorflow_frontend.py), OptimizerWrapper."""

    def __init__(self, case: Case, batches: list[Batch], optimizer: str) -> None:
        bags = len(batches[0].row_splits) - 1
        with device():
            inputs = ragged_inputs(batches)
            gradients = [tf.random.normal((bags, case.dimension)) for _ in range(case.tables)]
        wrapped = make_optimizer(optimizer)

        def step(make_ids: MakeIds) -> None:
            with tf.GradientTape() as tape:
                result = self.look_up(make_ids)
            tables = self.trained()
            slices = self.taped(tape).gradient(result, tables, output_gradients=gradients)
            wrapped.apply_gradients(zip(slices, tables, strict=True))

        self._forward = functions(self.look_up, inputs)
        self._step = functions(step, inputs)

    def look_up(self, make_ids: MakeIds) -> list[tf.Tensor]:
        raise NotImplementedError

    def trained(self) -> list[Any]:
        """The tables of this rank."""
        raise NotImplementedError

    def taped(self, tape: tf.GradientTape) -> Any:
        """What gives gradients."""
        return tape

    def forward(self, i: int) -> None:
        self._forward[i]()

    def step(self, i: int) -> None:
        self._step[i]()


class Frontend(Subject):
    """lookup_sparse of all tables in one call."""

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, by_row: bool) -> None:
        self.combiners = [case.combiner] * case.tables
        with device():
            self.tables = [
                sok.Variable(
                    shape=[case.rows, case.dimension],
                    initializer="uniform",
                    name=f"table{t}",
                    mode=None if by_row else f"localized:{t % hvd.size()}",
                )
                for t in range(case.tables)
            ]
        super().__init__(case, batches, optimizer)

    def look_up(self, make_ids: MakeIds) -> list[tf.Tensor]:
        outputs: list[tf.Tensor] = sok.lookup_sparse(self.tables, make_ids(), combiners=self.combiners)
        return outputs

    def trained(self) -> list[Any]:
        return self.tables


class Layer(Subject):
    """A DistributedEmbedding. The planner is told what is known of the case."""

    def __init__(self, case: Case, batches: list[Batch], optimizer: str, options: dict[str, Any]) -> None:
        tables = [dmp.Embedding(case.rows, case.dimension, combiner=case.combiner) for _ in range(case.tables)]
        known: dict[str, Any] = {"batch_size": case.batch, "hotness": case.keys_per_bag, "skew": case.skew}
        known["optimizer"] = optimizer
        if options.get("strategy") == "planned":
            options = {**options, "strategy": dmp.plan(tables, **known)}
        self.layer = dmp.DistributedEmbedding(tables, name="tables", **options)
        with device():
            self.layer.build()
        self.known = known
        super().__init__(case, batches, optimizer)

    def look_up(self, make_ids: MakeIds) -> list[tf.Tensor]:
        outputs: list[tf.Tensor] = self.layer(make_ids())
        return outputs

    def trained(self) -> list[Any]:
        variables: list[Any] = self.layer.trainable_variables
        return variables

    def taped(self, tape: tf.GradientTape) -> Any:
        return dmp.DistributedGradientTape(tape)

    def estimate(self) -> dict[str, float]:
        report = self.layer.report(**self.known)
        return {"estimated_forward_ms": 1e3 * report.lookup, "estimated_step_ms": 1e3 * report.step}
