# SPDX-License-Identifier: Apache-2.0
"""What trainers are told, and their command line (`options`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from . import columns, options
from .architecture import Architecture
from .features import CriteoLayout
from .layout import LabelledBatch, Layout
from .options import Option

# Keras starts Adagrad's accumulator at 0.1 and PyTorch at 0. The gradient of a row, seen in few samples of a batch, is
# about 1e-4: from 0.1 rows hardly move, from 0 the first steps follow the mere sign of a gradient, rounding included.
ADAGRAD_ACCUMULATOR = 1e-4
ADAGRAD_EPSILON = 1e-10

# Those whose default depends on the model.
BatchSize = Annotated[int, Option("rows of a global batch, over all ranks", least=1)]
LearningRate = Annotated[float, Option("of the optimizer")]


@dataclasses.dataclass(frozen=True)
class Training:
    """What the training loop is told, whatever the model."""

    data: Annotated[
        Path,
        Option("a file or a directory; or a directory with train/ and valid/, otherwise each tenth row is held out"),
    ]
    epochs: Annotated[int, Option("passes over the training rows", least=1)] = 1
    batch_size: BatchSize = 2048
    max_steps: Annotated[int, Option("stop training after so many global batches (0: never)", least=0)] = 0
    evaluate_every: Annotated[
        int, Option("steps after which the held-out rows are looked at (0: only at the end)", least=0)
    ] = 0
    learning_rate: LearningRate = 0.005
    seed: Annotated[int, Option("of the initial values", least=0)] = 0
    threads: Annotated[
        int, Option("threads a rank computes with (0: the cores divided by the ranks on this host)", least=0)
    ] = 0
    readers: Annotated[
        int,
        Option("processes a rank reads with (0: on a GPU as many as there are cores for, else a thread)", least=0),
    ] = 0
    metrics: Annotated[Path | None, Option("JSON file that rank 0 writes at the end")] = None
    progress: Annotated[
        Path | None, Option("file that rank 0 reports its progress to, for another process to show")
    ] = None
    dump: Annotated[Path | None, Option("directory to leave a checkpoint of the model in")] = None
    dump_after: Annotated[int, Option("steps after which that is done (0: at the end)", least=0)] = 0
    load: Annotated[Path | None, Option("directory of a checkpoint to go on from")] = None

    def __post_init__(self) -> None:
        options.check(self)
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate must be positive, not {self.learning_rate}")

    def layout(self) -> Layout[Any, LabelledBatch]:
        """The columns of the data, and what the model gets of them."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Settings(Training):
    """Settings of one training. Both trainers given the same ones train the same model on the same batches."""

    embedding_dim: Annotated[int, Option("columns of the embedding tables", least=1)] = 16
    max_table_rows: Annotated[
        int,
        Option("most rows of a table; ids are taken modulo the rows (with --dynamic: most rows on a rank)", least=1),
    ] = 100_000
    dynamic: Annotated[
        bool,
        Option("tables without a vocabulary: ids are keys as they are, and rows that were not used for long make room"),
    ] = False
    device: Annotated[
        str, Option("gpu: one a rank; auto: the same, where there are as many", choices=("auto", "cpu", "gpu"))
    ] = "auto"
    precision: Annotated[
        str, Option("of the dense layers' arithmetic; weights stay float32", choices=("float32", "tf32", "bfloat16"))
    ] = "float32"
    compiled: Annotated[
        bool, Option("the dense layers are compiled, once for each number of rows: by XLA, or by torch.compile")
    ] = False
    optimizer: Annotated[str, Option("for tables and dense layers alike", choices=("adagrad", "sgd"))] = "adagrad"

    def layout(self) -> Layout[Any, LabelledBatch]:
        """Criteo's columns."""
        return CriteoLayout(self.table_rows())

    def architecture(self) -> Architecture:
        """The dense layers."""
        return Architecture(self.embedding_dim)

    def table_rows(self) -> tuple[int | None, ...]:
        """Rows of the 26 tables; None of dynamic ones."""
        rows = columns.table_rows(self.max_table_rows)
        return (None,) * len(rows) if self.dynamic else rows
