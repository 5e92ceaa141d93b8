# SPDX-License-Identifier: Apache-2.0
"""Sets trainings side by side: a table on the terminal, and a chart of their losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from .training import Metrics

COLORS = ("#0072b2", "#d55e00")
_HANDED_OVER = "#009e73"
_SMOOTHING = 0.05
SAME_AUC = {"float32": 5e-5, "tf32": 1e-3, "bfloat16": 1e-3}
"""How much the AUC may change in a hand-over, by precision. Of float32 less than the digits that are printed: sums in
another order change it by about 1e-7. The others keep 11 and 8 bits of a number."""

_LAUNCHERS = {
    "TensorFlow": "horovodrun",
    "PyTorch": "torchrun",
    "Horovod": "horovodrun",
    "tf.distribute": "examples.workers",
}

_INVISIBLE = 1e-9  # below the rounding of a float32 loss; a logarithmic axis cannot show 0


def print_table(
    trainings: Sequence[Metrics], achievable_auc: float | None, console: Console | None = None, title: str = "DLRM"
) -> None:
    """One column a training and, for two, their difference. `achievable_auc` is that of the rule behind the labels."""
    table = Table(title=title, title_style="bold", title_justify="left")
    table.add_column("")
    for training in trainings:
        table.add_column(training.framework, justify="right")
    compare = len(trainings) == 2
    if compare:
        table.add_column("difference", justify="right")

    def add(title: str, values: Sequence[float], form: str, difference: str = "") -> None:
        cells = [format(value, form) for value in values]
        if compare:
            cells.append(format(abs(values[0] - values[1]), difference) if difference else "")
        table.add_row(title, *cells)

    table.add_row("started by", *(_launcher(training) for training in trainings))
    add("ranks", [training.num_ranks for training in trainings], "d")
    add("training rows", [training.rows for training in trainings], ",d")
    add("steps", [training.steps for training in trainings], ",d")
    add("first loss", [training.losses[0] for training in trainings], ".6f", ".1e")
    add("last loss", [training.losses[-1] for training in trainings], ".6f", ".1e")
    add("held-out loss", [training.valid_loss for training in trainings], ".6f", ".1e")
    add("held-out AUC", [training.auc for training in trainings], ".4f", ".1e")
    if achievable_auc is not None:
        add("AUC of the hidden rule", [achievable_auc] * len(trainings), ".4f")
    add("samples/s", [training.samples_per_second for training in trainings], ",.0f")
    add("of that reading", [training.reading for training in trainings], ".0%")
    add("training seconds", [training.seconds for training in trainings], ".1f")
    (console or Console()).print(table)


def largest_difference(trainings: Sequence[Metrics]) -> float:
    """Of the losses of the same step of the first two trainings."""
    return float(np.max(_difference(trainings)))


def print_handover(source: Metrics, targets: Sequence[Metrics], console: Console | None = None) -> None:
    """What the checkpoint of `source` came to in `targets`, a column each."""
    assert source.checkpoint is not None
    title = f"Hand-over after step {source.checkpoint.step}: {source.framework} dumps, {targets[0].framework} loads"
    table = Table(title=title, title_style="bold", title_justify="left")
    table.add_column("")
    for training in (source, *targets):
        table.add_column(training.framework, justify="right")
    points = [training.checkpoint for training in (source, *targets)]
    table.add_row("ranks", *(str(training.num_ranks) for training in (source, *targets)))
    table.add_row("held-out AUC at the hand-over", *(f"{point.auc:.4f}" for point in points if point))
    table.add_row("held-out loss at the hand-over", *(f"{point.valid_loss:.6f}" for point in points if point))
    trained = [training for training in (source, *targets) if training.steps]
    table.add_row("trained on to step", *(f"{training.first_step + training.steps:,d}" for training in trained))
    table.add_row("held-out AUC at the end", *(f"{training.auc:.4f}" for training in trained))
    table.add_row("held-out loss at the end", *(f"{training.valid_loss:.6f}" for training in trained))
    (console or Console()).print(table)
    (console or Console()).print(
        f"The AUC at the hand-over is the same to {handover_difference(source, targets):.1e} "
        f"(allowed: {same_auc(source):.0e})"
    )


def same_auc(training: Metrics) -> float:
    """How much the AUC may change when its checkpoint is handed over."""
    return SAME_AUC[training.settings["precision"]]


def handover_difference(source: Metrics, targets: Sequence[Metrics]) -> float:
    """The largest difference of AUC at the hand-over."""
    aucs = [training.checkpoint.auc for training in (source, *targets) if training.checkpoint]
    return max(aucs) - min(aucs)


def draw(trainings: Sequence[Metrics], file: Path, handover: Sequence[Metrics] = ()) -> None:
    """Writes a PNG with the loss of each step, and for two trainings with the difference below it; and with the
    trainings that went on from the first one's checkpoint.
    """
    # Here, not at the top: importing matplotlib takes a second, and a screen is not needed.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    compare = len(trainings) == 2
    figure, axes = plt.subplots(
        1 + compare,
        1,
        sharex=True,
        squeeze=False,
        figsize=(8, 6 if compare else 4.5),
        height_ratios=(3, 1) if compare else (1,),
        layout="constrained",
    )
    top = axes[0][0]
    for place, (training, color) in enumerate(zip(trainings, COLORS, strict=False)):
        steps = np.arange(1, training.steps + 1)
        # The second curve lies on the first one: a dashed line leaves both visible.
        style = {"linestyle": "--" if place else "-", "linewidth": 1.8 if place else 3.0}
        top.plot(steps, training.losses, color=color, alpha=0.2, linewidth=0.8)
        top.plot(steps, smooth(training.losses), color=color, label=label(training), **style)
    going_on = [training for training in handover if training.steps]
    for training in going_on:
        steps = np.arange(1, training.steps + 1) + training.first_step
        top.plot(steps, training.losses, color=_HANDED_OVER, alpha=0.2, linewidth=0.8)
        title = f"{label(training)}, from the checkpoint"
        whole = [*trainings[0].losses[: training.first_step], *training.losses]  # its average goes on from the source's
        average = smooth(whole)[training.first_step :]
        top.plot(steps, average, color=_HANDED_OVER, label=title, linestyle=":", linewidth=2.2)
        top.axvline(training.first_step + 0.5, color="#555555", linewidth=0.8, linestyle="--")
    top.set_ylabel("loss (binary cross-entropy)")
    top.set_title("DLRM: loss of each global batch (thin) and its moving average")
    top.legend()
    top.grid(alpha=0.3)
    if compare:
        bottom = axes[1][0]
        difference = np.maximum(_difference(trainings), _INVISIBLE)
        bottom.plot(np.arange(1, len(difference) + 1), difference, color=COLORS[1], linewidth=0.8)
        for training in going_on:
            rest = np.array(trainings[0].losses[training.first_step :], np.float64)
            rest = np.maximum(np.abs(rest - training.losses), _INVISIBLE)
            bottom.plot(np.arange(rest.size) + training.first_step + 1, rest, color=_HANDED_OVER, linewidth=0.8)
        bottom.set_yscale("log")
        bottom.set_ylabel(f"difference to\n{trainings[0].framework}")
        bottom.grid(alpha=0.3)
    axes[-1][0].set_xlabel("step")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def label(training: Metrics) -> str:
    """A training in the legend of a chart."""
    ranks = "1 rank" if training.num_ranks == 1 else f"{training.num_ranks} ranks"
    return f"{training.framework}, {ranks}: AUC {training.auc:.4f}, {training.samples_per_second:,.0f} samples/s"


def _launcher(training: Metrics) -> str:
    if training.num_ranks == 1:
        return "python"
    return _LAUNCHERS[training.framework]


def _difference(trainings: Sequence[Metrics]) -> npt.NDArray[np.float64]:
    first, second = (np.array(training.losses, np.float64) for training in trainings[:2])
    steps = min(first.size, second.size)
    return np.abs(first[:steps] - second[:steps])


def smooth(losses: Sequence[float]) -> npt.NDArray[np.float64]:
    """Exponential moving average that starts at the first loss without a bias towards it."""
    averages = np.empty(len(losses), np.float64)
    total = weight = 0.0
    for place, loss in enumerate(losses):
        total += _SMOOTHING * (loss - total)
        weight += _SMOOTHING * (1.0 - weight)
        averages[place] = total / weight
    return averages
