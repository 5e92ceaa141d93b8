# SPDX-License-Identifier: Apache-2.0
"""Writes generated data to Parquet: training and held-out rows, and what is known of them.

Rows are made and written one row group at a time, so the data set may be larger than memory. Every row group has its
own random stream, drawn from (seed, split, group): the rows do not depend on how many files they are spread over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from . import options
from .auc import StreamingAuc
from .options import Option

SUMMARY = "dataset.json"
_VERSION = 1

# Those whose default depends on the data set.
TrainingRows = Annotated[int, Option("training rows to generate", least=1)]
HeldOutRows = Annotated[int, Option("held-out rows to generate", least=1)]

Made = tuple[pa.Table, npt.NDArray[np.float64], npt.NDArray[Any]]


class RowMaker(Protocol):
    """Makes the rows of one group after another."""

    def make(self, split: int, group: int, rows: int) -> Made:
        """The group's table, the probabilities from which its labels were drawn, and the labels; both [rows]."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that determines the generated rows and files; those of a data set have more fields."""

    rows: TrainingRows = 1_000_000
    valid_rows: HeldOutRows = 50_000
    seed: Annotated[int, Option("of all that is random", least=0)] = 0
    files: Annotated[int, Option("files of each split", least=1)] = 4
    rows_per_group: Annotated[
        int, Option("rows of a Parquet row group: ranks skip the groups of which they need no row", least=1)
    ] = 2048

    def __post_init__(self) -> None:
        options.check(self)

    def maker(self) -> RowMaker:
        """What makes the rows."""
        raise NotImplementedError


def generate(directory: Path, recipe: Recipe) -> dict[str, Any]:
    """Writes DIR/train/*.parquet, DIR/valid/*.parquet and, last, DIR/dataset.json; returns what that file says.

    A directory that already holds this recipe's data is left as it is. Otherwise its train and valid are replaced, if
    it was written by this function, and a FileExistsError is raised if not.
    """
    summary_file = directory / SUMMARY
    wanted = {"version": _VERSION, **dataclasses.asdict(recipe)}
    if summary_file.exists():
        found: dict[str, Any] = json.loads(summary_file.read_text())
        if found.get("complete") and found.get("recipe") == wanted:
            return found
    elif any((directory / split).exists() for split in ("train", "valid")):
        raise FileExistsError(f"{directory} holds train or valid but no {SUMMARY}: choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"complete": False, "recipe": wanted}
    summary_file.write_text(json.dumps(summary) + "\n")
    maker = recipe.maker()
    for split, (name, rows) in enumerate((("train", recipe.rows), ("valid", recipe.valid_rows))):
        summary[name] = _write_split(directory / name, maker, recipe, split, rows)
    summary["complete"] = True
    summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _write_split(directory: Path, maker: RowMaker, recipe: Recipe, split: int, rows: int) -> dict[str, float]:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir()
    groups = -(-rows // recipe.rows_per_group)
    files = min(recipe.files, groups)
    auc = StreamingAuc()
    positives = 0
    with tqdm(total=rows, desc=f"writing {directory.name}", unit=" rows", unit_scale=True, disable=None) as bar:
        for file in range(files):
            writer: pq.ParquetWriter | None = None
            try:
                for group in range(groups * file // files, groups * (file + 1) // files):
                    first = group * recipe.rows_per_group
                    table, probabilities, labels = maker.make(split, group, min(recipe.rows_per_group, rows - first))
                    if writer is None:
                        writer = pq.ParquetWriter(directory / f"part-{file:04d}.parquet", table.schema)
                    writer.write_table(table, row_group_size=table.num_rows)
                    auc.update(probabilities, labels)
                    positives += int(labels.sum())
                    bar.update(table.num_rows)
            finally:
                if writer is not None:
                    writer.close()
    return {"rows": rows, "click_rate": positives / rows, "achievable_auc": auc.value()}


def main(cls: type[Recipe], program: str, description: str) -> None:
    """Command line of a data set's generator."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--out", type=Path, required=True, help=f"directory that gets train/, valid/ and {SUMMARY}")
    options.add_arguments(cls, parser)
    arguments = vars(parser.parse_args())
    try:
        print(json.dumps(generate(arguments.pop("out"), cls(**arguments)), indent=2))
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
