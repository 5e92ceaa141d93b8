# SPDX-License-Identifier: Apache-2.0
"""Bar charts of the kept results."""

from __future__ import annotations

import pathlib
from typing import Any

OURS = "#2a6f97"
PEER = "#b8bcc2"


def plot_cases(reports: list[dict[str, Any]], ours: set[str], phase: str, title: str, path: pathlib.Path) -> None:
    """One panel a case, one bar a subject, in milliseconds; the project's own subjects are coloured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(reports), figsize=(4.6 * len(reports), 3.2), squeeze=False)
    for axis, report in zip(axes[0], reports, strict=False):
        subjects = sorted(report["subjects"].items(), key=lambda item: -item[1][f"{phase}_ms"])
        values = [subject[f"{phase}_ms"] for _, subject in subjects]
        labels = [name.replace("_", " ") for name, _ in subjects]
        bars = axis.barh(labels, values, color=[OURS if name in ours else PEER for name, _ in subjects])
        axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.set_xlim(0, max(values) * 1.18)
        axis.set_title(report["title"].replace(", ", "\n", 1), fontsize=10)
        axis.set_xlabel("ms")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
