# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a data set and says which rows are for training and which are held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import columns
from .errors import DataError
from .parquet_source import ParquetSource
from .sources import Source
from .text_source import TextSource

HELD_OUT_EVERY = 10
"""Of data that is not divided into train/ and valid/, each tenth row is held out."""

_PARQUET = (".parquet", ".pq")
_PARQUET_MAGIC = b"PAR1"
_TEXT = (".txt", ".csv", ".tsv", ".gz", ".bz2", ".zst")


@dataclasses.dataclass(frozen=True)
class Split:
    """The rows of a source that take part: all, or (`held_out` True) each tenth, or (False) the others."""

    source: Source
    held_out: bool | None = None

    @property
    def rows(self) -> int | None:
        """Rows that take part, None if unknown."""
        return None if self.source.rows is None else self.count_before(self.source.rows)

    def count_before(self, row: int) -> int:
        """How many of the source's first `row` rows take part."""
        held_out = row // HELD_OUT_EVERY
        return row if self.held_out is None else held_out if self.held_out else row - held_out

    def mask(self, first: int, length: int) -> npt.NDArray[np.bool_]:
        """Which of the source's rows [first, first + length) take part."""
        if self.held_out is None:
            return np.ones(length, np.bool_)
        is_held_out: npt.NDArray[np.bool_] = np.arange(first, first + length) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return is_held_out if self.held_out else ~is_held_out


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Two splits."""

    train: Split
    valid: Split


def find(path: Path, names: Sequence[str] = columns.ALL) -> Dataset:
    """The data set with these columns at `path`: a file, or a directory of files of one format, read in the order of
    their names, or a directory with such directories train/ and valid/. Raises DataError."""
    if (path / "train").is_dir() and (path / "valid").is_dir():
        return Dataset(Split(_source(path / "train", names)), Split(_source(path / "valid", names)))
    source = _source(path, names)
    return Dataset(Split(source, held_out=False), Split(source, held_out=True))


def _source(path: Path, names: Sequence[str]) -> Source:
    if not path.exists():
        raise DataError(path, "no such file or directory")
    if path.is_file():
        return ParquetSource([path], names) if _is_parquet(path) else _text(path, [path], names)
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith((".", "_")))
    parquet = [file for file in files if file.suffix in _PARQUET]
    # Criteo's own files of one day each are called day_0 to day_23.
    text = [file for file in files if file.suffix in _TEXT or file.name.startswith("day_")]
    if parquet and text:
        raise DataError(path, f"holds Parquet ({parquet[0].name}) and text ({text[0].name}): name one file")
    if parquet:
        return ParquetSource(parquet, names)
    if text:
        return _text(path, text, names)
    raise DataError(path, f"holds no data; file names end in one of {', '.join(_PARQUET + _TEXT)}")


def _text(path: Path, files: Sequence[Path], names: Sequence[str]) -> TextSource:
    if tuple(names) != columns.ALL:
        raise DataError(path, f"text has Criteo's columns, and {', '.join(names)} are wanted: name Parquet files")
    return TextSource(files)


def _is_parquet(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC or file.suffix in _PARQUET
