# SPDX-License-Identifier: Apache-2.0
"""The demo's model in the project's TensorFlow frontend, for benchmarks.whole_job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsFloat

import horovod.tensorflow as hvd
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.whole_job_data import Job
from examples.dlrm.tensorflow_model import Prepared, TensorflowModel, choose_device, use_threads


class Subject:
    version = f"tensorflow {tf.__version__}"

    def __init__(self, job: Job, threads: int) -> None:
        hvd.init()
        use_threads(threads)
        self.rank, self.num_ranks = hvd.rank(), hvd.size()
        self.gpu, device = choose_device(job.device, hvd.local_rank(), hvd.local_size())
        sok.init(gradient="mean", seed=job.seed)
        with tf.device(device):
            self._model = TensorflowModel(job, device)
        self.prepare = self._model.prepare

    def train(self, batches: Iterator[Prepared]) -> Iterator[SupportsFloat]:
        """The sum of the losses of each batch, which is trained with when it is asked for."""
        return map(self._model.train, batches)
