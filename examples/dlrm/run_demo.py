# SPDX-License-Identifier: Apache-2.0
"""The demo: one data set, one model, trained in TensorFlow and in PyTorch, and handed over from one to the other.

    python -m examples.dlrm.run_demo

It writes Criteo-shaped data (or takes yours: --data), trains under `torchrun --nproc_per_node 2` and then, from the
same initial values on the same batches, under `horovodrun -np 2`. Half-way TensorFlow leaves a checkpoint, which
PyTorch takes over on as many ranks, to train on, and on one. Tables and a chart compare them. Everything it writes goes
to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import dataset, report
from .generate import Recipe
from .launch import Trainer, status
from .options import add_arguments, names
from .settings import Settings
from .training import Metrics
from .writing import generate

_TRAINERS = {
    "tensorflow": Trainer("TensorFlow", "horovodrun", "examples.dlrm.train_tensorflow"),
    "torch": Trainer("PyTorch", "torchrun", "examples.dlrm.train_torch"),
}
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
        chosen: dict[str, Any] = {name: getattr(options, name) for name in names(Settings) if hasattr(options, name)}
        told = Settings(**chosen | {"data": data.resolve()})
        recipe = Recipe(rows=options.rows, valid_rows=options.valid_rows, max_cardinality=options.max_table_rows)
    except ValueError as error:
        parser.error(str(error))
    return status(lambda: _demo(options, data, recipe, told))


def _demo(options: argparse.Namespace, data: Path, recipe: Recipe, told: Settings) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    achievable_auc = None if options.data else _achievable_auc(generate(data, recipe))
    # Looks at the files here already: an error is then the first thing to be seen, not the last lines of a log.
    dataset.find(data)
    frameworks = [options.only] if options.only else list(_TRAINERS)
    out = options.out.resolve()
    # PyTorch first: how many steps there are is known only afterwards.
    alone = {name: _train(name, options.world_size, told, out) for name in reversed(frameworks[1:])}
    handover: list[Metrics] = []
    if alone:
        told = _with_checkpoint(told, alone["torch"], out / "checkpoint")
    alone[frameworks[0]] = _train(frameworks[0], options.world_size, told, out)
    trainings = [alone[name] for name in frameworks]
    if len(trainings) > 1:
        handover = _hand_over(told, options.world_size, out)
    chart = options.out / "loss.png"
    report.draw(trainings, chart, handover)
    report.print_table(trainings, achievable_auc)
    if len(trainings) == 2:
        print(f"Largest difference between the losses of a step: {report.largest_difference(trainings):.1e}")
    if handover:
        report.print_handover(trainings[0], handover)
    print(f"Chart: {chart}. Metrics and logs: {options.out}.")
    allowed = report.same_auc(trainings[0])
    if handover and report.handover_difference(trainings[0], handover) > allowed:
        print(f"error: the AUC changed by more than {allowed:.0e} in the hand-over", file=sys.stderr)
        return 1
    return 0


def _with_checkpoint(told: Settings, whole: Metrics, folder: Path) -> Settings:
    """Half-way through the first epoch of a training that has been done before."""
    return dataclasses.replace(told, dump=folder, dump_after=max(1, whole.steps // told.epochs // 2))


def _hand_over(told: Settings, num_ranks: int, out: Path) -> list[Metrics]:
    """PyTorch goes on from the checkpoint: on as many ranks to the end; and on one rank, where it is only looked at."""
    loading = dataclasses.replace(told, load=told.dump, dump=None, dump_after=0)
    looking = dataclasses.replace(loading, max_steps=told.dump_after)
    if told.dynamic:  # the rows of all ranks are to fit into those of one
        looking = dataclasses.replace(looking, max_table_rows=num_ranks * told.max_table_rows)
    trainings = [_train("torch", num_ranks, loading, out, "handover")]
    return trainings if num_ranks == 1 else [*trainings, _train("torch", 1, looking, out, "handover-1")]


def _train(framework: str, num_ranks: int, told: Settings, out: Path, name: str = "") -> Metrics:
    note = " from TensorFlow's checkpoint" if told.load else ""
    return _TRAINERS[framework].train(num_ranks, told, out, name or framework, note)


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
    parser.add_argument("--only", choices=tuple(_TRAINERS), help="train with this one alone")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model on a little data, to see that everything works"
    )
    parser.add_argument(
        "--rows", type=int, default=recipe.rows, help="training rows to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--valid-rows", type=int, default=recipe.valid_rows, help="held-out rows to generate (default: %(default)s)"
    )
    add_arguments(Settings, parser, leave_out=("data", "metrics", "progress", "dump", "dump_after", "load"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
