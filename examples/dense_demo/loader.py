# SPDX-License-Identifier: Apache-2.0
"""A loader for scripts written for NVTabular's KerasSequenceLoader, which reads Parquet on the CPU, without cuDF."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import tensorflow as tf

from ..dlrm.arrays import ArrayBatch, ArrayColumn, ArrayLayout, Ragged, column_of
from ..dlrm.dataset import Split
from ..dlrm.errors import DataError
from ..dlrm.parquet_source import ParquetSource
from ..dlrm.prefetch import Prefetch
from ..dlrm.reader import Reader
from .shuffle import shuffled

Feature: TypeAlias = Any  # a tensor, or a pair of them
Batch = tuple[dict[str, Feature], Any]

_PARQUET = ("parquet", None)


class KerasSequenceLoader:
    """Iterates over the batches of Parquet files, read on a thread a few batches ahead: memory holds those and, with
    `shuffle`, the buffer. Every iteration begins anew. It stands in for

        from nvtabular.loader.tensorflow import KerasSequenceLoader

    Args:
      paths_or_dataset: a list of files, read in its order, or a pattern such as "data/*.parquet".
      batch_size: rows of this rank's batches. With several ranks those of a step are `global_size` times as many.
      label_names, cat_names, cont_names: columns, of integers or floats or of lists of them, nested to any depth.
      engine: "parquet" or None.
      shuffle: whether rows change places, among those of this rank that are in the buffer together; by `seed`, and
        differently in each iteration.
      buffer_size: how many rows that is: below 1 a fraction of this machine's memory, below batch_size a number of
        batches, otherwise of rows. At least a batch. Without effect unless rows are shuffled.
      global_size, global_rank: this rank of how many. Each row goes to one rank: any number of files will do, of any
        lengths. All ranks get the same number of batches; of a last one that is short some get fewer rows, or none.
      drop_last: leave out a last batch that is short.
      sparse_as_dense: rows of a column of lists all have the shape of the file's first one: another is a DataError.

    Gives (features, labels). Features are by name: of a column of numbers a tensor [n, 1]; of a column of lists
    (values [total, 1], nnzs [n, 1]), all numbers in them, row by row, and how many each row has, int64. The only label
    is a tensor [n, 1]; several are a list of them. Integers are int64, floats float32.

    Raises:
      ValueError: no columns or no files, another engine, sizes out of range.
      DataError (a ValueError): files that cannot be read, or lack columns; when iterated, fields that are not as
        said. It names the file, the row and the column.
    """

    def __init__(
        self,
        paths_or_dataset: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch_size: int,
        label_names: Sequence[str] | None = None,
        cat_names: Sequence[str] | None = None,
        cont_names: Sequence[str] | None = None,
        engine: str | None = None,
        shuffle: bool = True,
        buffer_size: float = 0.1,
        global_size: int | None = None,
        global_rank: int | None = None,
        drop_last: bool = False,
        sparse_as_dense: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        if engine not in _PARQUET:
            raise ValueError(f"engine must be 'parquet', not {engine!r}")
        if not buffer_size > 0:
            raise ValueError(f"buffer_size must be positive, not {buffer_size}")
        self._labels = list(label_names or [])
        self._features = [*(cat_names or []), *(cont_names or [])]
        if not self._features:
            raise ValueError("cat_names or cont_names must name a column")
        files = _files(paths_or_dataset)
        split = Split(ParquetSource(files, [*self._features, *self._labels]))
        columns = _columns(files[0], [*self._features, *self._labels])
        if sparse_as_dense:
            columns = _shaped(files[0], columns, split)
        self._rank, self._ranks = global_rank or 0, global_size or 1
        self._batch_size, self._shuffle, self._buffer_size = batch_size, shuffle, buffer_size
        self._drop_last, self._seed, self._epoch = drop_last, seed, 0
        self._reader = Reader(
            split, batch_size * self._ranks, ArrayLayout(columns), rank=self._rank, num_ranks=self._ranks
        )
        self._rows = split.rows or 0

    def __len__(self) -> int:
        """Batches of an iteration, the same on every rank."""
        whole, rest = divmod(self._rows, self._batch_size * self._ranks)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        with Prefetch(self._batches(epoch)) as batches:
            yield from batches

    def _batches(self, epoch: int) -> Iterator[Batch]:
        batches = iter(self._reader)
        if self._drop_last:
            whole = self._batch_size * self._ranks
            batches = (batch for batch in batches if batch.global_rows == whole)
        if self._shuffle:
            generator = np.random.default_rng([self._seed, epoch, self._rank])
            batches = shuffled(batches, self._buffer_bytes(), self._buffer_batches(), generator)
        for batch in batches:
            yield self._tensors(batch)

    def _buffer_bytes(self) -> float:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return self._buffer_size * memory / self._ranks if self._buffer_size < 1 else float("inf")

    def _buffer_batches(self) -> float:
        if self._buffer_size < 1:
            return float("inf")
        return self._buffer_size if self._buffer_size < self._batch_size else self._buffer_size // self._batch_size

    def _tensors(self, batch: ArrayBatch) -> Batch:
        features = {name: _feature(batch.arrays[name]) for name in self._features}
        labels = [_feature(batch.arrays[name]) for name in self._labels]
        return features, labels[0] if len(labels) == 1 else labels


def _feature(array: npt.NDArray[Any] | Ragged) -> Feature:
    if isinstance(array, Ragged):
        ends = array.splits[0]
        for splits in array.splits[1:]:
            ends = splits[ends]
        return _column(array.values), _column(np.diff(ends))
    if array.ndim == 1:
        return _column(array)
    return _column(array.ravel()), tf.fill([len(array), 1], tf.constant(int(np.prod(array.shape[1:])), tf.int64))


def _column(values: npt.NDArray[Any]) -> tf.Tensor:
    return tf.constant(values.reshape(-1, 1))


def _files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    if isinstance(paths, (str, os.PathLike)):
        files = [Path(name) for name in sorted(glob.glob(os.fspath(paths)))]
    else:
        files = [Path(path) for path in paths]
    if not files:
        raise ValueError(f"there is no file to read: paths_or_dataset is {paths!r}")
    for file in files:
        if not file.is_file():
            raise DataError(file, "no such file")
    return files


def _columns(file: Path, names: Sequence[str]) -> list[ArrayColumn]:
    schema = pq.read_schema(file)
    return [column_of(name, schema.field(name).type) for name in names]


def _shaped(file: Path, columns: Sequence[ArrayColumn], split: Split) -> list[ArrayColumn]:
    """The columns with the lengths that the first row has."""
    first = next(iter(Reader(split, 1, ArrayLayout(columns))), None)
    if first is None:
        return list(columns)
    return [ArrayColumn(column.name, _shape(first.arrays[column.name]), column.dtype) for column in columns]


def _shape(array: npt.NDArray[Any] | Ragged) -> tuple[int, ...]:
    """That of the one row of an array; of different lists that of the first, and then the reader refuses the row."""
    if isinstance(array, Ragged):
        return tuple(int(np.diff(splits[:2]).sum()) for splits in array.splits)
    return array.shape[1:]
