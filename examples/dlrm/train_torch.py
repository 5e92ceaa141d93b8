# SPDX-License-Identifier: Apache-2.0
"""Trains the DLRM in PyTorch: `torchrun --nproc_per_node 2 -m examples.dlrm.train_torch --data demo/data`."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import sparse_operation_kit.torch as sok

from . import failure, training
from .options import parse
from .settings import Settings
from .torch_model import TorchModel, choose_device


class TorchRanks:
    """Implements training.Ranks."""

    def __init__(self) -> None:
        self.rank = sok.rank()
        self.num_ranks = sok.num_ranks()

    def sum(self, array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See training.Ranks."""
        total: npt.NDArray[np.float64] = sok.communication.allreduce(torch.from_numpy(array)).numpy()
        return total


def main() -> None:
    """Command line; one process, or as many as torchrun starts."""
    settings = parse(Settings, "Train a DLRM in PyTorch, on one process or under torchrun.")
    with failure.reported(settings.progress):
        _run(settings)


def join(settings: Settings) -> tuple[int | None, torch.device, int]:
    """Makes this process a rank of those that torchrun started, or one alone. Returns the number of its GPU or None,
    its device, and how many ranks its host has."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // local_ranks))
    gpu, device = choose_device(settings.device, int(os.environ.get("LOCAL_RANK", "0")), local_ranks)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo" if gpu is None else "cpu:gloo,cuda:nccl")
    # DDP averages dense gradients over the ranks; "mean" does the same for those of the tables.
    sok.init(gradient="mean", seed=settings.seed)
    return gpu, device, local_ranks


def _run(settings: Settings) -> None:
    gpu, device, local_ranks = join(settings)
    model = TorchModel(settings, device)
    metrics = training.run("PyTorch", model, TorchRanks(), settings, gpu=gpu, local_ranks=local_ranks)
    if sok.rank() == 0:
        print(f"PyTorch: AUC {metrics.auc:.4f}, {metrics.samples_per_second:,.0f} samples/s")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
