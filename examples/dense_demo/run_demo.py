# SPDX-License-Identifier: Apache-2.0
"""The dense demo from end to end:

    python -m examples.dense_demo.run_demo

It writes samples of nested keys (or takes yours: --data), trains on several processes, looks at the held-out rows on
the way, and ends with a table and a chart. Everything it writes goes to --out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..dlrm import dataset
from ..dlrm.launch import Trainer, status
from ..dlrm.options import add_arguments, names
from ..dlrm.report import largest_difference, print_table
from ..dlrm.writing import generate
from . import report
from .generate import Recipe
from .settings import ENGINES, Settings

_MODULE = "examples.dense_demo.train"
_TRAINERS = {
    "horovod": Trainer("Horovod", "horovodrun", _MODULE),
    "tensorflow": Trainer("tf.distribute", "workers", _MODULE),
}
_SHAPE = ("slots", "keys", "vocabulary", "seed")
"""What both the data and the model are told."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = _parser()
    chosen = vars(parser.parse_args(arguments))
    if chosen["world_size"] < 1:
        parser.error(f"--world-size must be at least 1, not {chosen['world_size']}")
    out: Path = chosen["out"]
    data: Path = chosen["data"] or out / "data"
    engines = ENGINES if chosen["engine"] == "both" else (chosen["engine"],)
    try:
        recipe = Recipe(**{name: chosen[name] for name in names(Recipe)})
        told = {name: chosen[name] for name in names(Settings) if name in chosen} | {"data": data.resolve()}
        settings = [Settings(**told | {"engine": engine}) for engine in engines]
    except ValueError as error:
        parser.error(str(error))
    return status(lambda: _demo(data, None if chosen["data"] else recipe, settings, chosen["world_size"], out))


def _demo(data: Path, recipe: Recipe | None, settings: Sequence[Settings], num_ranks: int, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    achievable_auc = None if recipe is None else float(generate(data, recipe)["valid"]["achievable_auc"])
    # Looks at the files here already: an error is then the first thing to be seen, not the last lines of a log.
    dataset.find(data, settings[0].layout().names)
    trainings = [_TRAINERS[each.engine].train(num_ranks, each, out.resolve(), each.engine) for each in settings]
    chart = out / "training.png"
    report.draw(trainings, achievable_auc, chart)
    print_table(trainings, achievable_auc, title="Dense demo")
    if len(trainings) == 2:
        print(f"Largest difference between the losses of a step: {largest_difference(trainings):.1e}")
    print(f"Chart: {chart}. Metrics and logs: {out}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.dense_demo.run_demo",
        description="Train a dense embedding and fully connected layers on nested keys from Parquet.",
    )
    parser.add_argument(
        "--data", type=Path, help="your data, Parquet with `feature` and `label`; generated if not given"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo/dense"), help="directory for all that is written (default: %(default)s)"
    )
    parser.add_argument("--world-size", type=int, default=2, help="processes on this machine (default: %(default)s)")
    parser.add_argument(
        "--engine", choices=(*ENGINES, "both"), default=ENGINES[0], help="what joins them (default: %(default)s)"
    )
    add_arguments(Recipe, parser, leave_out=_SHAPE)
    add_arguments(Settings, parser, leave_out=("data", "engine", "metrics", "progress", "dump", "dump_after", "load"))
    parser.set_defaults(evaluate_every=20)
    return parser


if __name__ == "__main__":
    sys.exit(main())
