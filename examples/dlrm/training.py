# SPDX-License-Identifier: Apache-2.0
"""The training loop, the same for both frameworks: epochs, evaluation, metrics. No framework is imported here."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, TypeVar

import numpy as np
import numpy.typing as npt

from . import dataset
from .auc import StreamingAuc
from .feed import Feed, processes_for
from .layout import LabelledBatch
from .pace import Losses, Speed
from .progress import Reporter, State, reporter_for
from .reader import Reader
from .settings import Training

# The first steps trace, compile and allocate: samples/s counts from the end of the last of them.
_WARM_UP_STEPS = 5


B = TypeVar("B", bound=LabelledBatch, contravariant=True)
P = TypeVar("P")


class Model(Protocol[B, P]):
    """A model on one of several ranks, in some framework."""

    def prepare(self, batch: B) -> P:
        """What the other methods take of a batch, whose memory another batch gets afterwards: on a GPU, a copy there.
        Called on another thread than they are, while they run."""

    def train(self, batch: P) -> SupportsFloat:
        """One step, taken by all ranks together; returns the sum of the losses of this rank's rows before it. It may be
        a tensor that a GPU has yet to compute."""

    def logits(self, batch: P) -> npt.NDArray[np.float32]:
        """Logits [n] of this rank's rows; called by all ranks together."""

    def dump(self, folder: Path, step: int) -> None:
        """Leaves a checkpoint, as it is after so many steps; called by all ranks together."""

    def load(self, folder: Path) -> int:
        """Takes over a checkpoint of either framework and any number of ranks; returns its step."""


class Ranks(Protocol):
    """The processes that train together."""

    rank: int
    num_ranks: int

    def sum(self, array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sum of the arrays of all ranks, on every rank."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How good a model is on the held-out rows after so many steps."""

    step: int
    valid_loss: float
    auc: float


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
    """Of training, without its first five steps where there are more."""
    samples_per_second: float
    """All ranks' training rows in those seconds, a second."""
    reading: float
    """The part of those seconds in which rank 0 waited for a batch."""
    valid_rows: int
    valid_loss: float
    """Mean over the held-out rows."""
    auc: float
    """Of the held-out rows."""
    first_step: int
    """Steps that the checkpoint had seen which this training went on from; 0 without one."""
    checkpoint: Evaluation | None
    """The held-out rows when a checkpoint was left or taken over."""
    evaluations: list[Evaluation]
    """Those of --evaluate-every, and the one at the end."""
    settings: dict[str, str]


def run(
    framework: str,
    model: Model[Any, Any],
    ranks: Ranks,
    settings: Training,
    *,
    gpu: int | None = None,
    local_ranks: int = 1,
) -> Metrics:
    """Trains, evaluates, and on rank 0 writes the metrics file. Every rank returns the same metrics but times.

    gpu: the number of the GPU that the model is on; local_ranks: of this host.
    """
    loop = _Loop(framework, model, ranks, settings, gpu, settings.readers or processes_for(gpu, local_ranks))
    try:
        metrics = loop.run()
    finally:
        loop.reporter.close()
    if ranks.rank == 0 and settings.metrics is not None:
        settings.metrics.parent.mkdir(parents=True, exist_ok=True)
        settings.metrics.write_text(json.dumps(dataclasses.asdict(metrics), indent=2) + "\n")
    return metrics


def read_metrics(file: Path) -> Metrics:
    """What `run` wrote."""
    fields = json.loads(file.read_text())
    checkpoint, evaluations = fields.pop("checkpoint"), fields.pop("evaluations")
    return Metrics(
        **fields,
        checkpoint=None if checkpoint is None else Evaluation(**checkpoint),
        evaluations=[Evaluation(**each) for each in evaluations],
    )


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the loop keeps of a batch that the model has prepared."""

    index: int
    global_rows: int
    labels: npt.NDArray[np.float32]


class _Loop:
    def __init__(
        self,
        framework: str,
        model: Model[Any, Any],
        ranks: Ranks,
        settings: Training,
        gpu: int | None,
        processes: int,
    ) -> None:
        self._framework, self._model, self._ranks, self._settings = framework, model, ranks, settings
        self._gpu, self._processes = gpu, processes
        self._layout = settings.layout()
        self._data = dataset.find(settings.data, self._layout.names)
        self.reporter: Reporter = reporter_for(ranks.rank, framework, settings.progress)
        self._checkpoint: Evaluation | None = None
        self._evaluations: list[Evaluation] = []

    def run(self) -> Metrics:
        settings, first = self._settings, 0
        if settings.load is not None:
            first = self._model.load(settings.load)
            self._checkpoint = Evaluation(first, *self._evaluate()[1:])
        losses, rows, speed = self._train(first)
        valid_rows, valid_loss, auc = self._evaluate()
        last = Evaluation(first + len(losses), valid_loss, auc)
        if settings.dump is not None and not settings.dump_after:
            self._checkpoint = last
            self._model.dump(settings.dump, first + len(losses))
        return Metrics(
            framework=self._framework,
            num_ranks=self._ranks.num_ranks,
            steps=len(losses),
            rows=rows,
            losses=losses,
            seconds=speed.seconds,
            samples_per_second=speed.per_second,
            reading=speed.reading,
            valid_rows=valid_rows,
            valid_loss=valid_loss,
            auc=auc,
            first_step=first,
            checkpoint=self._checkpoint,
            evaluations=[*self._evaluations, last],
            settings={name: str(value) for name, value in dataclasses.asdict(settings).items()},
        )

    def _reader(self, split: dataset.Split, first_batch: int = 0) -> Reader[Any, LabelledBatch]:
        settings = self._settings
        return Reader(
            split,
            settings.batch_size,
            self._layout,
            rank=self._ranks.rank,
            num_ranks=self._ranks.num_ranks,
            first_batch=first_batch,
        )

    def _feed(self, reader: Reader[Any, LabelledBatch]) -> Feed[tuple[_Seen, Any]]:
        def prepare(batch: LabelledBatch) -> tuple[_Seen, Any]:
            return _Seen(batch.index, batch.global_rows, batch.labels.copy()), self._model.prepare(batch)

        # Of files that have to be read from the beginning all processes would read everything.
        processes = min(self._processes, 1) if reader.batches is None else self._processes
        return Feed(reader, prepare, processes=processes, gpu=self._gpu)

    def _train(self, first: int) -> tuple[list[float], int, Speed]:
        """Mean losses of the global batches after the first `first` ones; their rows; how fast it was.

        Where the number of batches is unknown, those `first` ones are all of the first epoch.
        """
        settings = self._settings
        batches = self._reader(self._data.train).batches
        total = None if batches is None else settings.epochs * batches
        if settings.max_steps:
            total = settings.max_steps if total is None else min(total, settings.max_steps)
        first_epoch, first_batch = (0, first) if not batches else divmod(first, batches)
        losses = Losses()
        sizes: list[int] = []
        speed = Speed()
        for epoch in range(first_epoch, settings.epochs):
            if total is not None and first + len(sizes) >= total:
                break
            with self._feed(self._reader(self._data.train, first_batch if epoch == first_epoch else 0)) as feed:
                for seen, batch in feed:
                    speed.waited(feed.waited)
                    losses.add(self._model.train(batch), len(seen.labels))
                    sizes.append(seen.global_rows)
                    step = first + len(sizes)
                    if len(sizes) == _WARM_UP_STEPS and step != total:
                        losses.wait()
                        speed = Speed()
                    else:
                        speed.trained(seen.global_rows)
                    self.reporter.report(State("train", step, total, losses.latest, speed.per_second, speed.reading))
                    speed.pause(self._look(step, step == total, losses))
                    if step == settings.max_steps:
                        break
        if not sizes and not first:
            raise ValueError(f"{settings.data} holds no training rows")
        sums = losses.wait()
        speed.stop()
        means = self._ranks.sum(np.array(sums, np.float64)) / np.array(sizes)
        return means.tolist(), sum(sizes), speed

    def _look(self, step: int, is_last: bool, losses: Losses) -> float:
        """Leaves a checkpoint and looks at the held-out rows where the settings say so; returns the seconds."""
        settings = self._settings
        is_dumped = settings.dump is not None and step == settings.dump_after
        is_evaluated = settings.evaluate_every > 0 and step % settings.evaluate_every == 0 and not is_last
        if not (is_dumped or is_evaluated):
            return 0.0
        losses.wait()
        start = time.perf_counter()
        found = Evaluation(step, *self._evaluate()[1:])
        if is_evaluated:
            self._evaluations.append(found)
        if is_dumped and settings.dump is not None:
            self._checkpoint = found
            self._model.dump(settings.dump, step)
        return time.perf_counter() - start

    def _evaluate(self) -> tuple[int, float, float]:
        """Rows, mean loss and AUC of the held-out rows of all ranks; NaN where there are none."""
        ranks, reader = self._ranks, self._reader(self._data.valid)
        auc = StreamingAuc()
        loss = 0.0
        rows = 0
        speed = Speed()
        with self._feed(reader) as feed:
            for seen, batch in feed:
                logits = self._model.logits(batch).astype(np.float64)
                auc.update(1.0 / (1.0 + np.exp(-logits)), seen.labels)
                loss += float(np.sum(np.logaddexp(0.0, logits) - seen.labels * logits))
                rows += seen.global_rows
                speed.waited(feed.waited)
                speed.trained(seen.global_rows)
                shown = loss / rows * ranks.num_ranks
                step = seen.index + 1
                self.reporter.report(State("valid", step, reader.batches, shown, speed.per_second, speed.reading))
        sums = ranks.sum(np.concatenate([[loss], auc.counts.astype(np.float64).ravel()]))
        auc.load(sums[1:].reshape(auc.counts.shape).astype(np.int64))
        return rows, float(sums[0] / rows) if rows else float("nan"), auc.value()
