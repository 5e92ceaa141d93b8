# SPDX-License-Identifier: Apache-2.0
"""What both trainers are told, and its command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from . import columns

# Keras starts Adagrad's accumulator at 0.1 and PyTorch at 0. The gradient of a row, seen in few samples of a batch, is
# about 1e-4: from 0.1 rows hardly move, from 0 the first steps follow the mere sign of a gradient, rounding included.
ADAGRAD_ACCUMULATOR = 1e-4
ADAGRAD_EPSILON = 1e-10

_HELP = {
    "data": "Parquet or Criteo text (tabs or commas, with a header line or without), a file or a directory; or "
    "a directory with train/ and valid/, otherwise each tenth row is held out",
    "epochs": "passes over the training rows",
    "batch_size": "rows of a global batch, over all ranks",
    "max_steps": "stop training after so many global batches (0: never)",
    "embedding_dim": "columns of the embedding tables",
    "max_table_rows": "most rows of a table; ids are taken modulo the rows (with --dynamic: most rows on a rank)",
    "dynamic": "tables without a vocabulary: ids are keys as they are, and rows that were not used for long make room",
    "optimizer": "for tables and dense layers alike",
    "learning_rate": "of that optimizer",
    "seed": "of the initial values",
    "threads": "threads a rank computes with (0: the cores divided by the ranks on this host)",
    "metrics": "JSON file that rank 0 writes at the end",
    "dump": "directory to leave a checkpoint of the model in",
    "dump_after": "steps after which that is done (0: at the end)",
    "load": "directory of a checkpoint, of either framework, to go on from",
    "progress": "file that rank 0 reports its progress to, for another process to show",
}
_PATHS = ("data", "metrics", "progress", "dump", "load")
_CHOICES = {"optimizer": ("adagrad", "sgd")}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one training. Both trainers given the same ones train the same model on the same batches."""

    data: Path
    epochs: int = 1
    batch_size: int = 2048
    max_steps: int = 0
    embedding_dim: int = 16
    max_table_rows: int = 100_000
    dynamic: bool = False
    optimizer: str = "adagrad"
    learning_rate: float = 0.005
    seed: int = 0
    threads: int = 0
    metrics: Path | None = None
    progress: Path | None = None
    dump: Path | None = None
    dump_after: int = 0
    load: Path | None = None

    def __post_init__(self) -> None:
        for field in ("epochs", "batch_size", "embedding_dim", "max_table_rows"):
            if getattr(self, field) < 1:
                raise ValueError(f"{_flag(field)} must be at least 1, not {getattr(self, field)}")
        for field in ("max_steps", "seed", "threads", "dump_after"):
            if getattr(self, field) < 0:
                raise ValueError(f"{_flag(field)} must not be negative, but is {getattr(self, field)}")
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate must be positive, not {self.learning_rate}")
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{_flag(field)} must be one of {', '.join(choices)}, not {getattr(self, field)}")


def add_arguments(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Adds an option for each setting, except those that the caller has its own way to set."""
    for field in dataclasses.fields(Settings):
        if field.name in leave_out:
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        kind = Path if field.name in _PATHS else type(default)
        if kind is bool:
            parser.add_argument(_flag(field.name), action="store_true", help=_HELP[field.name])
            continue
        text = _HELP[field.name] + ("" if default is None else " (default: %(default)s)")
        required = field.default is dataclasses.MISSING
        choices = _CHOICES.get(field.name)
        parser.add_argument(
            _flag(field.name), type=kind, default=default, required=required, help=text, choices=choices
        )


def table_rows(settings: Settings) -> tuple[int | None, ...]:
    """Rows of the 26 tables; None of dynamic ones."""
    rows = columns.table_rows(settings.max_table_rows)
    return (None,) * len(rows) if settings.dynamic else rows


def names() -> list[str]:
    """The names of the settings."""
    return [field.name for field in dataclasses.fields(Settings)]


def to_arguments(settings: Settings) -> list[str]:
    """The command line that gives these settings."""
    arguments = []
    for name in names():
        value = getattr(settings, name)
        if value is not None and value is not False:
            arguments += [_flag(name)] if value is True else [_flag(name), str(value)]
    return arguments


def parse(description: str, arguments: Sequence[str] | None = None) -> Settings:
    """The settings that a trainer's command line gives."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    parsed = vars(parser.parse_args(arguments))
    try:
        return Settings(**parsed)
    except ValueError as error:
        parser.error(str(error))


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
