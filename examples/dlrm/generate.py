# SPDX-License-Identifier: Apache-2.0
"""Writes a Criteo-shaped data set to Parquet: `python -m examples.dlrm.generate --out DIR --rows 400000`.

Rows are made and written one row group at a time, so the data set may be larger than memory. Every row group has its
own random stream, drawn from (seed, split, group): the rows do not depend on how many files they are spread over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from . import columns
from .auc import StreamingAuc
from .planted import PlantedRule
from .power_law import BoundedPowerLaw, scatter

SUMMARY = "dataset.json"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that determines the generated rows and files."""

    rows: int = 1_000_000
    """Training rows."""
    valid_rows: int = 50_000
    max_cardinality: int = 100_000
    exponent: float = 1.05
    seed: int = 0
    files: int = 4
    """Files a split."""
    rows_per_group: int = 2048
    """Rows a Parquet row group: ranks skip the groups of which they need no row."""

    def __post_init__(self) -> None:
        for field in ("rows", "valid_rows", "max_cardinality", "files", "rows_per_group"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")


class _RowMaker:
    """Makes the rows of one group."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._cardinalities = columns.table_rows(recipe.max_cardinality)
        self._ranks = [BoundedPowerLaw(cardinality, recipe.exponent) for cardinality in self._cardinalities]
        self._rule = PlantedRule(self._cardinalities, len(columns.DENSE), recipe.seed)
        # Counts spread over several powers of ten, differently in each column, like Criteo's.
        shape = np.random.default_rng([recipe.seed, 2])
        self._log_mean = shape.uniform(0.5, 5.0, len(columns.DENSE))
        self._log_deviation = shape.uniform(0.8, 1.6, len(columns.DENSE))

    def make(self, split: int, group: int, rows: int) -> tuple[pa.Table, np.ndarray, np.ndarray]:
        """The group's table, the probabilities from which its labels were drawn, and the labels; both [rows]."""
        generator = np.random.default_rng([self._recipe.seed, 3, split, group])
        normal = generator.normal(size=(rows, len(columns.DENSE)))
        counts = np.floor(np.exp(np.minimum(normal * self._log_deviation + self._log_mean, 20.0))).astype(np.int32)
        dense_missing = generator.random(normal.shape) < columns.DENSE_MISSING
        ids = np.stack(
            [
                scatter(ranks.sample(generator, rows), cardinality, self._recipe.seed)
                for ranks, cardinality in zip(self._ranks, self._cardinalities, strict=True)
            ],
            axis=1,
        )
        id_missing = generator.random(ids.shape) < columns.CATEGORICAL_MISSING
        logits = self._rule.logits(np.where(dense_missing, 0.0, normal), ids, ~id_missing)
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        labels = (generator.random(rows) < probabilities).astype(np.int8)
        arrays = [pa.array(labels)]
        arrays += [pa.array(counts[:, i], mask=dense_missing[:, i]) for i in range(counts.shape[1])]
        arrays += [pa.array(ids[:, i], mask=id_missing[:, i]) for i in range(ids.shape[1])]
        return pa.table(arrays, names=list(columns.ALL)), probabilities, labels


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
    maker = _RowMaker(recipe)
    for split, (name, rows) in enumerate((("train", recipe.rows), ("valid", recipe.valid_rows))):
        summary[name] = _write_split(directory / name, maker, recipe, split, rows)
    summary["complete"] = True
    summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _write_split(directory: Path, maker: _RowMaker, recipe: Recipe, split: int, rows: int) -> dict[str, float]:
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


def main() -> None:
    """Command line."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(
        prog="python -m examples.dlrm.generate",
        description="Write a Criteo-shaped data set with a planted signal to Parquet.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory that gets train/, valid/ and dataset.json")
    parser.add_argument("--rows", type=int, default=defaults.rows, help="training rows")
    parser.add_argument("--valid-rows", type=int, default=defaults.valid_rows, help="validation rows")
    parser.add_argument("--max-cardinality", type=int, default=defaults.max_cardinality, help="most ids in a column")
    parser.add_argument("--exponent", type=float, default=defaults.exponent, help="of the power law of the ids")
    parser.add_argument("--files", type=int, default=defaults.files, help="files in each split")
    parser.add_argument("--rows-per-group", type=int, default=defaults.rows_per_group, help="rows a row group")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = vars(parser.parse_args())
    print(json.dumps(generate(arguments.pop("out"), Recipe(**arguments)), indent=2))


if __name__ == "__main__":
    main()
