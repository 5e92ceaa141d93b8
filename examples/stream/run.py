# SPDX-License-Identifier: Apache-2.0
"""Learns a stream of ids with dynamic tables that hold a tenth of them, and draws what became of it.

python -m examples.stream.run [--frontend torch|tensorflow] [--steps N] [--out DIR]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from examples.stream.stream import Array, Batch, Stream

DIMENSION = 8
LEARNING_RATE = 0.5
_AT_ONCE = 20  # steps a point of a curve stands for


class Learner(Protocol):
    """A model over one dynamic table, in one of the frameworks."""

    def train(self, batch: Batch) -> float:
        """One step; the mean loss before it."""

    def keys(self) -> Array:
        """Those that the table holds, [n] int64."""


@dataclasses.dataclass
class Curves:
    """One number for each _AT_ONCE steps."""

    loss: list[float] = dataclasses.field(default_factory=list)
    found: list[float] = dataclasses.field(default_factory=list)
    size: list[int] = dataclasses.field(default_factory=list)
    fresh: list[float] = dataclasses.field(default_factory=list)


def learn(learner: Learner, stream: Stream, steps: int, title: str) -> Curves:
    """Trains on the stream.

    loss: the mean; found: the share of a batch's ids that had a row before it; size: rows held; fresh: the share of
    these whose ids are still in use.
    """
    curves, losses = Curves(), collections.deque[float](maxlen=_AT_ONCE)
    for step, batch in enumerate(tqdm(stream.batches(steps), title, steps, disable=None), 1):
        if step % _AT_ONCE == 0:
            keys = learner.keys()
            curves.found.append(float(np.isin(batch.ids, keys).mean()))
            curves.size.append(len(keys))
            curves.fresh.append(float(np.isin(keys, stream.live_ids(step - 1)).mean()))
        losses.append(learner.train(batch))
        if step % _AT_ONCE == 0:
            curves.loss.append(float(np.mean(losses)))
    return curves


def draw(results: dict[str, Curves], capacity: int, file: Path) -> None:
    """The curves of all tables, one below the other."""
    import matplotlib as mpl  # here: importing it takes a second

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        "loss": "mean loss",
        "found": "share of ids found",
        "size": "rows held",
        "fresh": "share of rows still in use",
    }
    figure, axes = plt.subplots(len(panels), sharex=True, figsize=(8, 10), layout="constrained")
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for title, curves in results.items():
            values = getattr(curves, name)
            axis.plot(_AT_ONCE * np.arange(1, len(values) + 1), values, label=title)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[2].axhline(capacity, color="grey", linestyle=":", linewidth=1)
    axes[0].legend()
    axes[-1].set_xlabel("step")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.stream.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--frontend", choices=("torch", "tensorflow"), default="torch")
    parser.add_argument("--steps", type=int, default=600, help="batches to learn from (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("stream"), help="where the chart goes (default: %(default)s/)")
    chosen = parser.parse_args(arguments)
    stream = Stream()
    capacity = stream.num_ids(chosen.steps) // 10
    if capacity < stream.batch * stream.ids_per_sample:  # all ids of a step have to fit
        parser.error("too few --steps: a tenth of their ids is less than a batch has")
    tables: dict[str, dict[str, Any]] = {
        "unbounded": {"var_type": "hbm"},
        "LRU, a tenth of the ids": {"max_capacity": capacity, "evict_strategy": "lru"},
        "LFU, a tenth of the ids": {"max_capacity": capacity, "evict_strategy": "lfu"},
    }
    make = importlib.import_module(f"examples.stream.learn_{chosen.frontend}").Learner
    results = {
        title: learn(make(stream, DIMENSION, LEARNING_RATE, options), stream, chosen.steps, title)
        for title, options in tables.items()
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    document = {title: dataclasses.asdict(curves) for title, curves in results.items()}
    (chosen.out / "stream.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(results, capacity, chosen.out / "stream.png")
    print(f"{'':26}{'loss':>8}{'ids found':>12}{'rows':>10}{'in use':>9}")
    for title, curves in results.items():
        print(f"{title:26}{curves.loss[-1]:8.4f}{curves.found[-1]:12.1%}{curves.size[-1]:10,}{curves.fresh[-1]:9.1%}")
    print(f"{chosen.out / 'stream.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
