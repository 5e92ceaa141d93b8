# SPDX-License-Identifier: Apache-2.0
"""The demo's model in the project's TensorFlow frontend, for benchmarks.whole_job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsFloat

import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from benchmarks.whole_job_data import Job
from examples.dlrm.tensorflow_model import Prepared, TensorflowModel
from examples.dlrm.train_tensorflow import join


class Subject:
    version = f"tensorflow {tf.__version__}"

    def __init__(self, job: Job) -> None:
        self.gpu, device = join(job)
        self.rank, self.num_ranks = sok.rank(), sok.num_ranks()
        with tf.device(device):
            self._model = TensorflowModel(job, device)
        self.prepare = self._model.prepare

    def train(self, batches: Iterator[Prepared]) -> Iterator[SupportsFloat]:
        """The sum of the losses of each batch, which is trained with when it is asked for."""
        return map(self._model.train, batches)
