# SPDX-License-Identifier: Apache-2.0
"""The training loop, the same for both frameworks: epochs, evaluation, metrics. No framework is imported here."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Protocol

import numpy as np
import numpy.typing as npt

from . import columns, dataset
from .auc import StreamingAuc
from .prefetch import Prefetch
from .progress import Reporter, State, reporter_for
from .reader import Batch, Reader
from .settings import Settings

# The first steps trace, compile and allocate: samples/s counts from the end of the last of them.
_WARM_UP_STEPS = 5


class Model(Protocol):
    """A model on one of several ranks, in some framework."""

    def train(self, batch: Batch) -> float:
        """One step, taken by all ranks together; returns the sum of the losses of this rank's rows before it."""

    def logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits [n] of this rank's rows; called by all ranks together."""


class Ranks(Protocol):
    """The processes that train together."""

    rank: int
    num_ranks: int

    def sum(self, array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sum of the arrays of all ranks, on every rank."""


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What a training came to."""

    framework: str
    num_ranks: int
    steps: int
    rows: int
    """Training rows of all ranks, all epochs."""
    losses: list[float]
    """Mean loss of each global batch, before the step that it causes."""
    seconds: float
    """Of training, without its first five steps."""
    samples_per_second: float
    """All ranks' training rows a second, without the first five steps."""
    valid_rows: int
    valid_loss: float
    """Mean over the held-out rows."""
    auc: float
    """Of the held-out rows."""
    settings: dict[str, str]


def run(framework: str, model: Model, ranks: Ranks, settings: Settings) -> Metrics:
    """Trains, evaluates, and on rank 0 writes the metrics file. Every rank returns the same metrics but times."""
    data = dataset.find(settings.data)
    table_rows = columns.table_rows(settings.max_table_rows)
    reporter = reporter_for(ranks.rank, framework, settings.progress)
    placing = {"rank": ranks.rank, "num_ranks": ranks.num_ranks}
    try:
        train_reader = Reader(data.train, settings.batch_size, table_rows, **placing)
        losses, rows, seconds, timed_rows = _train(model, ranks, settings, train_reader, reporter)
        valid_reader = Reader(data.valid, settings.batch_size, table_rows, **placing)
        valid_rows, valid_loss, auc = _evaluate(model, ranks, valid_reader, reporter)
    finally:
        reporter.close()
    metrics = Metrics(
        framework=framework,
        num_ranks=ranks.num_ranks,
        steps=len(losses),
        rows=rows,
        losses=losses,
        seconds=seconds,
        samples_per_second=timed_rows / seconds if seconds > 0 else 0.0,
        valid_rows=valid_rows,
        valid_loss=valid_loss,
        auc=auc,
        settings={name: str(value) for name, value in dataclasses.asdict(settings).items()},
    )
    if ranks.rank == 0 and settings.metrics is not None:
        settings.metrics.parent.mkdir(parents=True, exist_ok=True)
        settings.metrics.write_text(json.dumps(dataclasses.asdict(metrics), indent=2) + "\n")
    return metrics


def _train(
    model: Model, ranks: Ranks, settings: Settings, reader: Reader, reporter: Reporter
) -> tuple[list[float], int, float, int]:
    """Mean losses of the global batches; rows; seconds and rows after the warm-up."""
    local_losses: list[float] = []
    sizes: list[int] = []
    start = time.perf_counter()
    rows = 0
    warm_rows = 0
    steps = None if reader.batches is None else settings.epochs * reader.batches
    if settings.max_steps:
        steps = settings.max_steps if steps is None else min(steps, settings.max_steps)
    for _ in range(settings.epochs):
        with Prefetch(reader) as batches:
            for batch in batches:
                local_losses.append(model.train(batch))
                sizes.append(batch.global_rows)
                rows += batch.global_rows
                if len(sizes) == _WARM_UP_STEPS:
                    start = time.perf_counter()
                    warm_rows = rows
                speed = (rows - warm_rows) / max(time.perf_counter() - start, 1e-9)
                shown = local_losses[-1] / max(len(batch.labels), 1)
                reporter.report(State("train", len(sizes), steps, shown, speed))
                if len(sizes) == settings.max_steps:
                    break
        if len(sizes) == settings.max_steps:
            break
    if not sizes:
        raise ValueError(f"{settings.data} holds no training rows")
    seconds = time.perf_counter() - start
    losses = ranks.sum(np.array(local_losses, np.float64)) / np.array(sizes)
    return losses.tolist(), rows, seconds, rows - warm_rows


def _evaluate(model: Model, ranks: Ranks, reader: Reader, reporter: Reporter) -> tuple[int, float, float]:
    """Rows, mean loss and AUC of the held-out rows of all ranks; NaN where there are none."""
    auc = StreamingAuc()
    loss = 0.0
    rows = 0
    start = time.perf_counter()
    with Prefetch(reader) as batches:
        for batch in batches:
            logits = model.logits(batch).astype(np.float64)
            auc.update(1.0 / (1.0 + np.exp(-logits)), batch.labels)
            loss += float(np.sum(np.logaddexp(0.0, logits) - batch.labels * logits))
            rows += batch.global_rows
            speed = rows / max(time.perf_counter() - start, 1e-9)
            reporter.report(State("valid", batch.index + 1, reader.batches, loss / rows * ranks.num_ranks, speed))
    sums = ranks.sum(np.concatenate([[loss], auc.counts.astype(np.float64).ravel()]))
    auc.load(sums[1:].reshape(auc.counts.shape).astype(np.int64))
    return rows, float(sums[0] / rows) if rows else float("nan"), auc.value()
