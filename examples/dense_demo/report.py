# SPDX-License-Identifier: Apache-2.0
"""Draws trainings: the loss of each step, and the AUC of the held-out rows on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..dlrm.report import COLORS, label, smooth
from ..dlrm.training import Metrics


def draw(trainings: Sequence[Metrics], achievable_auc: float | None, file: Path) -> None:
    """Writes a PNG. `achievable_auc` is that of the rule behind the labels."""
    # Here, not at the top: importing matplotlib takes a second, and a screen is not needed.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, aucs) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for place, (training, color) in enumerate(zip(trainings, COLORS, strict=False)):
        # The second curve lies on the first one: a dashed line leaves both visible.
        style = {"color": color, "linestyle": "--" if place else "-", "linewidth": 1.8 if place else 3.0}
        steps = np.arange(1, training.steps + 1) + training.first_step
        losses.plot(steps, training.losses, color=color, alpha=0.2, linewidth=0.8)
        losses.plot(steps, smooth(training.losses), label=label(training), **style)
        looks = training.evaluations
        aucs.plot([look.step for look in looks], [look.auc for look in looks], marker="o", markersize=4, **style)
    if achievable_auc is not None:
        aucs.axhline(achievable_auc, color="#555555", linewidth=1.0, linestyle=":", label="the hidden rule itself")
        aucs.legend(loc="lower right")
    losses.set_ylabel("loss (binary cross-entropy)")
    losses.set_title("Dense demo: loss of each global batch (thin) and its moving average")
    losses.legend()
    aucs.margins(y=0.1)
    aucs.set_ylabel("AUC of the held-out rows")
    aucs.set_xlabel("step")
    for axes in (losses, aucs):
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)
