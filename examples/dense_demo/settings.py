# SPDX-License-Identifier: Apache-2.0
"""What the trainer is told."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from ..dlrm.layout import LabelledBatch, Layout
from ..dlrm.options import Option
from ..dlrm.settings import BatchSize, LearningRate, Training
from . import shape

ENGINES = ("horovod", "tensorflow")


@dataclasses.dataclass(frozen=True)
class Settings(Training):
    """Settings of one training; the same ones train the same model under both engines, on any number of ranks."""

    batch_size: BatchSize = 1024
    learning_rate: LearningRate = 0.002
    slots: shape.Slots = 10
    keys: shape.Keys = 5
    vocabulary: shape.Vocabulary = 1000
    embedding_dim: Annotated[int, Option("elements of a key's vector", least=1)] = 4
    layers: Annotated[int, Option("dense layers before the last one", least=1)] = 6
    units: Annotated[int, Option("units of each of these layers", least=1)] = 128
    optimizer: Annotated[
        str,
        Option(
            "plugin_adam: sok.optimizers.Adam steps the table, Keras's Adam the dense layers; adam, sgd: Keras's step "
            "both, the table within sok.OptimizerScope",
            choices=("plugin_adam", "adam", "sgd"),
        ),
    ] = "plugin_adam"
    engine: Annotated[
        str,
        Option("of several ranks: horovod, or tensorflow for a MultiWorkerMirroredStrategy", choices=ENGINES),
    ] = "horovod"

    def __post_init__(self) -> None:
        super().__post_init__()
        shape.check(self.slots, self.vocabulary)
        if (self.dump or self.load) and self.optimizer != "plugin_adam":
            raise ValueError(
                "--dump and --load take --optimizer plugin_adam: what an optimizer of Keras keeps of a table in "
                "OptimizerScope is not in a dump"
            )

    def layout(self) -> Layout[Any, LabelledBatch]:
        """Samples of that shape."""
        return shape.layout(self.slots, self.keys)
