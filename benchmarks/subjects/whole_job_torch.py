# SPDX-License-Identifier: Apache-2.0
"""The demo's model in the project's PyTorch frontend, for benchmarks.whole_job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsFloat

import torch

import sparse_operation_kit.torch as sok
from benchmarks.whole_job_data import Job
from examples.dlrm.torch_model import Prepared, TorchModel
from examples.dlrm.train_torch import join


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(self, job: Job) -> None:
        self.gpu, device, _ = join(job)
        self.rank, self.num_ranks = sok.rank(), sok.num_ranks()
        self._model = TorchModel(job, device)
        self.prepare = self._model.prepare

    def train(self, batches: Iterator[Prepared]) -> Iterator[SupportsFloat]:
        """The sum of the losses of each batch, which is trained with when it is asked for."""
        return map(self._model.train, batches)
