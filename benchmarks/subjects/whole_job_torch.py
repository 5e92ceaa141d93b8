# SPDX-License-Identifier: Apache-2.0
"""The demo's model in the project's PyTorch frontend, for benchmarks.whole_job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsFloat

import torch

import sparse_operation_kit.torch as sok
from benchmarks.whole_job_data import Job
from examples.dlrm.torch_model import Prepared, TorchModel, choose_device


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(self, job: Job, threads: int) -> None:
        torch.set_num_threads(threads)
        self.gpu, device = choose_device(job.device, 0, 1)
        sok.init(gradient="mean", seed=job.seed)
        self._model = TorchModel(job, device)
        self.prepare = self._model.prepare

    def train(self, batches: Iterator[Prepared]) -> Iterator[SupportsFloat]:
        """The sum of the losses of each batch, which is trained with when it is asked for."""
        return map(self._model.train, batches)
