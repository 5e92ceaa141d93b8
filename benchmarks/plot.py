# SPDX-License-Identifier: Apache-2.0
"""Bar charts of the kept results."""

from __future__ import annotations

import pathlib
from typing import Any

OURS = "#2a6f97"
PEER = "#b8bcc2"


def _pyplot() -> Any:
    """matplotlib.pyplot, for files and not for a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(figure: Any, title: str, path: pathlib.Path, bottom: float = 0.0) -> None:
    """Writes the figure, whose legend takes the part `bottom` of its height, and lets go of it."""
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


def plot_cases(reports: list[dict[str, Any]], ours: set[str], phase: str, title: str, path: pathlib.Path) -> None:
    """One panel a case, one bar a subject, in milliseconds; the project's own subjects are coloured."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(reports), figsize=(5.2 * len(reports), 3.2), squeeze=False)
    for axis, report in zip(axes[0], reports, strict=False):
        subjects = sorted(report["subjects"].items(), key=lambda item: -item[1][f"{phase}_ms"])
        values = [subject[f"{phase}_ms"] for _, subject in subjects]
        labels = [name.replace("_", " ") for name, _ in subjects]
        bars = axis.barh(labels, values, color=[OURS if name in ours else PEER for name, _ in subjects])
        axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.set_xlim(0, max(values) * 1.3)
        axis.set_title(report["title"].replace(", ", "\n", 1), fontsize=10)
        axis.set_xlabel("ms")
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, title, path)


def plot_steps(reports: list[dict[str, Any]], optimizers: list[str], title: str, path: pathlib.Path) -> None:
    """One panel an optimizer: a step's milliseconds of some subjects, side by side for each case (float32 rows)."""
    plt = _pyplot()
    shown_as = {
        "core": ("core", "#012a4a"),
        "torch_frontend": ("PyTorch, as it is by default", "#013a63"),
        "torch_frontend_concat": ("PyTorch, one output", "#2c7da0"),
        "torch_frontend_one_thread": ("PyTorch, backward on the calling thread", "#61a5c2"),
        "torch_frontend_graph": ("PyTorch in a CUDA graph", "#89c2d9"),
        "torch_stack": ("PyTorch, one stack", "#3d5a80"),
        "tensorflow_frontend": ("TensorFlow, as it is by default", "#7f4f24"),
        "tensorflow_frontend_concat": ("TensorFlow, one output", "#bc6c25"),
        "tensorflow_frontend_concrete": ("TensorFlow, concrete function", "#dda15e"),
        "tensorflow_frontend_steps": ("TensorFlow, twelve steps a call", "#e9b872"),
        "tensorflow_stack": ("TensorFlow, one stack, concrete function", "#99582a"),
        "fbgemm_tbe": ("FBGEMM TBE", PEER),
        "fbgemm_tbe_graph": ("FBGEMM TBE in a CUDA graph", "#8d9299"),
        "tensorflow_embedding_lookup_sparse": ("tf.nn.embedding_lookup_sparse", "#d9d9d9"),
    }
    figure, axes = plt.subplots(len(optimizers), 1, figsize=(11, 3.1 * len(optimizers)), squeeze=False)
    for axis, optimizer in zip(axes[:, 0], optimizers, strict=True):
        shown = [r for r in reports if r["optimizer"] == optimizer and r.get("dtype", "float32") == "float32"]
        figures = {
            report["case"]: {
                name: subject["step_together_ms"]
                for name, subject in report["subjects"].items()
                if name in shown_as and "step_together_ms" in subject
            }
            for report in shown
        }
        names = [name for name in shown_as if any(name in values for values in figures.values())]
        width = 0.86 / max(1, len(names))
        for i, name in enumerate(names):
            places = [j - 0.43 + (i + 0.5) * width for j, values in enumerate(figures.values()) if name in values]
            heights = [values[name] for values in figures.values() if name in values]
            label, color = shown_as[name]
            bars = axis.bar(places, heights, width, label=label, color=color)
            axis.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
        axis.set_xticks(range(len(figures)), list(figures))
        axis.set(ylabel="ms a step", title=optimizer.replace("_", " "))
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", fontsize=8, frameon=False, ncols=6)
    _save(figure, title, path, bottom=0.04)


def plot_ways(reports: dict[str, dict[str, float]], title: str, path: pathlib.Path) -> None:
    """One panel an optimizer, one bar a way to make a step, in milliseconds; a line at 1.5 times the first."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(reports), figsize=(6.4 * len(reports), 3.4), squeeze=False, sharey=True)
    for axis, (name, figures) in zip(axes[0], reports.items(), strict=True):
        labels, values = list(figures)[::-1], list(figures.values())[::-1]
        bars = axis.barh(labels, values, color=[PEER if label.startswith("PyTorch") else OURS for label in labels])
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.axvline(1.5 * values[-1], color="#bc6c25", linewidth=1, linestyle="--")
        axis.set_xlim(0, max(values) * 1.15)
        axis.set(title=name, xlabel="ms")
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, title, path)


def plot_times_static(reports: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """One panel an optimizer: for each case, steps of some subjects over the static step of their frontend."""
    plt = _pyplot()
    shown_as = {
        "torch_dynamic": ("PyTorch, dynamic", "#2c7da0"),
        "torch_dynamic_lru": ("PyTorch, dynamic, LRU", "#89c2d9"),
        "tensorflow_dynamic": ("TensorFlow, dynamic", "#dda15e"),
        "fbgemm_tbe": ("FBGEMM TBE, static", PEER),
        "dict_embedding_bag": ("dict and nn.EmbeddingBag", PEER),
        "tf_dense_hash_table": ("DenseHashTable and lookup", "#8d9299"),
    }
    optimizers = list(dict.fromkeys(report["optimizer"] for report in reports))
    figure, axes = plt.subplots(len(optimizers), 1, figsize=(10, 2.8 * len(optimizers)), squeeze=False)
    for axis, optimizer in zip(axes[:, 0], optimizers, strict=True):
        figures = {r["case"]: r["times_static"] for r in reports if r["optimizer"] == optimizer}
        names = [name for name in shown_as if any(name in values for values in figures.values())]
        width = 0.8 / max(1, len(names))
        for i, name in enumerate(names):
            places = [j - 0.4 + (i + 0.5) * width for j, values in enumerate(figures.values()) if name in values]
            heights = [values[name] for values in figures.values() if name in values]
            label, color = shown_as[name]
            bars = axis.bar(places, heights, width, label=label, color=color)
            axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
        axis.axhline(1.0, color="#bc6c25", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(figures)), list(figures))
        axis.set_yscale("log")
        highest = max((times for values in figures.values() for times in values.values()), default=1.0)
        ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50) if tick < 2 * highest]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set(title=optimizer, ylabel="times static", ylim=(0.4, 2 * ticks[-1]))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*_legend(axes), loc="lower center", fontsize=8, frameon=False, ncols=6)
    _save(figure, title, path, bottom=0.04)


def plot_whole_job(subjects: dict[str, dict[str, Any]], ours: set[str], title: str, path: pathlib.Path) -> None:
    """Million samples a second of each subject, from files and from batches in memory."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 0.9 + 0.8 * len(subjects)))
    for i, (name, found) in enumerate(reversed(subjects.items())):
        for source, place, alpha in (("files", i + 0.19, 1.0), ("memory", i - 0.19, 0.55)):
            speed = 1e-6 * found[source]["samples_per_second"]
            bars = axis.barh(place, speed, 0.36, color=OURS if name in ours else PEER, alpha=alpha)
            axis.bar_label(bars, [f"{speed:.3g} from {source}"], padding=3, fontsize=8)
    axis.set_yticks(range(len(subjects)), list(reversed(subjects)))
    axis.set_xlim(0, axis.get_xlim()[1] * 1.25)
    axis.set_xlabel("million samples a second")
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, title, path)


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    """The handles and labels of all panels."""
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return list(handles.values()), list(handles)
