# SPDX-License-Identifier: Apache-2.0
"""The demo: one data set, one model, trained in TensorFlow and in PyTorch; a table and a chart that compare them.

    python -m examples.dlrm.run_demo

It writes Criteo-shaped data (or takes yours: --data), trains under `horovodrun -np 2` and then, from the same initial
values on the same batches, under `torchrun --nproc_per_node 2`. Everything it writes goes to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import dataset, launch, report, settings
from .errors import DataError
from .generate import Recipe, generate
from .settings import Settings
from .training import Metrics

_TITLES = {"tensorflow": "TensorFlow", "torch": "PyTorch"}
_QUICK = {
    "rows": 12_000,
    "valid_rows": 2000,
    "batch_size": 250,
    "max_table_rows": 500,
    "embedding_dim": 8,
    "learning_rate": 0.01,
    "threads": 1,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**_QUICK)
        options = parser.parse_args(arguments)
    if options.world_size < 1:
        parser.error(f"--world-size must be at least 1, not {options.world_size}")
    data = options.data or options.out / ("data-quick" if options.quick else "data")
    try:
        chosen: dict[str, Any] = {name: getattr(options, name, None) for name in settings.names()}
        told = Settings(**chosen | {"data": data.resolve()})
        recipe = Recipe(rows=options.rows, valid_rows=options.valid_rows, max_cardinality=options.max_table_rows)
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        achievable_auc = None if options.data else _achievable_auc(generate(data, recipe))
        # Looks at the files here already: an error is then the first thing to be seen, not the last lines of a log.
        dataset.find(data)
        frameworks = [options.only] if options.only else list(_TITLES)
        trainings = [_train(framework, options.world_size, told, options.out.resolve()) for framework in frameworks]
    except (DataError, FileExistsError, launch.TrainerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    chart = options.out / "loss.png"
    report.draw(trainings, chart)
    report.print_table(trainings, achievable_auc)
    if len(trainings) == 2:
        print(f"Largest difference between the losses of a step: {report.largest_difference(trainings):.1e}")
    print(f"Chart: {chart}. Metrics and logs: {options.out}.")
    return 0


def _train(framework: str, num_ranks: int, told: Settings, out: Path) -> Metrics:
    metrics = out / f"{framework}.json"
    metrics.unlink(missing_ok=True)
    progress = out / f"{framework}.progress"
    told = dataclasses.replace(told, metrics=metrics, progress=progress)
    command = launch.command(framework, num_ranks, settings.to_arguments(told))
    print(f"{_TITLES[framework]}: starting {num_ranks} rank{'s' if num_ranks > 1 else ''}", file=sys.stderr, flush=True)
    launch.run(_TITLES[framework], command, out / f"{framework}.log", progress)
    return Metrics(**json.loads(metrics.read_text()))


def _achievable_auc(summary: dict[str, Any]) -> float:
    return float(summary["valid"]["achievable_auc"])


def _parser() -> argparse.ArgumentParser:
    recipe = Recipe()
    parser = argparse.ArgumentParser(
        prog="python -m examples.dlrm.run_demo",
        description="Train one DLRM in TensorFlow and in PyTorch on the same data and compare the two.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="your data: Parquet or Criteo text, file or directory (examples/dlrm/README.md); generated if not given",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="directory for data, logs, metrics and chart (default: demo)"
    )
    parser.add_argument("--world-size", type=int, default=2, help="ranks, each a process on this machine (default: 2)")
    parser.add_argument("--only", choices=tuple(_TITLES), help="train with this one alone")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model on a little data, to see that everything works"
    )
    parser.add_argument(
        "--rows", type=int, default=recipe.rows, help="training rows to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--valid-rows", type=int, default=recipe.valid_rows, help="held-out rows to generate (default: %(default)s)"
    )
    settings.add_arguments(parser, leave_out=("data", "metrics", "progress"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
