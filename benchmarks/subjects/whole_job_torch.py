# SPDX-License-Identifier: Apache-2.0
"""The demo's model in the project's PyTorch frontend, for benchmarks.whole_job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import SupportsFloat

import torch
import torch.distributed as dist

import sparse_operation_kit.torch as sok
from benchmarks.whole_job_data import Job
from examples.dlrm.torch_model import Prepared, TorchModel, choose_device

PLACE = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
"""What torchrun tells a rank, and what holds without it."""


class Subject:
    version = f"torch {torch.__version__}"

    def __init__(self, job: Job, threads: int) -> None:
        torch.set_num_threads(threads)
        local_rank, local_ranks = (int(os.environ.get(name, default)) for name, default in PLACE)
        self.gpu, device = choose_device(job.device, local_rank, local_ranks)
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo" if self.gpu is None else "cpu:gloo,cuda:nccl")
        sok.init(gradient="mean", seed=job.seed)
        self.rank, self.num_ranks = sok.rank(), sok.num_ranks()
        self._model = TorchModel(job, device)
        self.prepare = self._model.prepare

    def train(self, batches: Iterator[Prepared]) -> Iterator[SupportsFloat]:
        """The sum of the losses of each batch, which is trained with when it is asked for."""
        return map(self._model.train, batches)
