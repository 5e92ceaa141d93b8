# SPDX-License-Identifier: Apache-2.0
"""Trains the model of the dense demo, on one process or several:

horovodrun -np 2 python -m examples.dense_demo.train --data demo/dense/data
python -m examples.workers -np 2 python -m examples.dense_demo.train --data demo/dense/data --engine tensorflow
"""

from __future__ import annotations

import sparse_operation_kit as sok

from ..dlrm import failure, training
from ..dlrm.options import parse
from ..dlrm.tensorflow_ranks import TensorflowRanks
from . import engines
from .model import TrainedModel
from .settings import Settings


def main() -> None:
    """Command line."""
    settings = parse(Settings, "Train a dense embedding and fully connected layers, by the names of SOK 1.x.")
    with failure.reported(settings.progress):
        engine = engines.start(settings.engine, settings.threads)
        with engine.scope():
            sok.Init(seed=settings.seed)
        metrics = training.run(engine.title, TrainedModel(settings, engine), TensorflowRanks(), settings)
        if sok.rank() == 0:
            print(f"{engine.title}: AUC {metrics.auc:.4f}, {metrics.samples_per_second:,.0f} samples/s")


if __name__ == "__main__":
    main()
