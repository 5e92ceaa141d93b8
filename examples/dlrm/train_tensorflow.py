# SPDX-License-Identifier: Apache-2.0
"""Trains the DLRM in TensorFlow: `horovodrun -np 2 python -m examples.dlrm.train_tensorflow --data demo/data`."""

from __future__ import annotations

import os

import horovod.tensorflow as hvd
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

from . import failure, training
from .options import parse
from .settings import Settings
from .tensorflow_model import TensorflowModel, choose_device, use_threads
from .tensorflow_ranks import TensorflowRanks


def main() -> None:
    """Command line; one process, or as many as horovodrun starts."""
    settings = parse(Settings, "Train a DLRM in TensorFlow, on one process or under horovodrun.")
    with failure.reported(settings.progress):
        _run(settings)


def join(settings: Settings) -> tuple[int | None, str]:
    """Makes this process a rank of those that horovodrun started, or one alone. Returns the number of its GPU or None,
    and its device."""
    hvd.init()
    use_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    gpu, device = choose_device(settings.device, hvd.local_rank(), hvd.local_size())
    # DistributedGradientTape averages dense gradients over the ranks; "mean" does the same for those of the tables.
    sok.init(gradient="mean", seed=settings.seed)
    return gpu, device


def _run(settings: Settings) -> None:
    gpu, device = join(settings)
    with tf.device(device):
        model = TensorflowModel(settings, device)
    ranks = TensorflowRanks()
    metrics = training.run("TensorFlow", model, ranks, settings, gpu=gpu, local_ranks=hvd.local_size())
    if sok.rank() == 0:
        print(f"TensorFlow: AUC {metrics.auc:.4f}, {metrics.samples_per_second:,.0f} samples/s")


if __name__ == "__main__":
    main()
