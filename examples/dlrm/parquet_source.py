# SPDX-License-Identifier: Apache-2.0
"""Reads Parquet files by chunks of rows, and skips row groups of which no row is wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from . import columns
from .errors import DataError
from .sources import Chunk, IsWanted

# Both bound the memory of a chunk, whatever the size of the row groups; the second one that of long lists.
_CHUNK_ROWS = 8192
_CHUNK_VALUES = 1 << 20


class ParquetSource:
    """Parquet files that have these columns, in any order, others beside them."""

    def __init__(self, files: Sequence[Path], names: Sequence[str] = columns.ALL) -> None:
        self._files = list(files)
        self._names = list(names)
        self._rows = 0
        for file in self._files:
            with _open(file) as reader:
                missing = [name for name in self._names if name not in reader.schema_arrow.names]
                if missing:
                    raise DataError(file, f"columns missing: {', '.join(missing)}")
                self._rows += reader.metadata.num_rows

    @property
    def rows(self) -> int:
        """Rows of all files together."""
        return self._rows

    def chunks(self, is_wanted: IsWanted) -> Iterator[Chunk]:
        """See Source."""
        before = 0
        for file in self._files:
            with _open(file) as reader:
                for run in _runs(reader.metadata, before, is_wanted):
                    if run.is_wanted:
                        yield from self._read(reader, file, run)
                    else:
                        yield Chunk(file, run.first, run.rows, None)
                before += reader.metadata.num_rows

    def _read(self, reader: pq.ParquetFile, file: Path, run: _Run) -> Iterator[Chunk]:
        rows = min(self._chunk_rows(reader.metadata.row_group(group)) for group in run.groups)
        threads = pa.cpu_count() > 1  # to hand all work to a single one takes a seventh longer
        first = run.first
        try:
            for batch in reader.iter_batches(rows, row_groups=run.groups, columns=self._names, use_threads=threads):
                yield Chunk(file, first, batch.num_rows, batch)
                first += batch.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            group = self._damaged(reader, run.groups)
            raise DataError(file, f"damaged in row group {group} ({error})") from None

    def _damaged(self, reader: pq.ParquetFile, groups: Sequence[int]) -> int:
        """The first of the groups that cannot be read; the last one where each alone can."""
        for group in groups:
            try:
                reader.read_row_group(group, columns=self._names)
            except (pa.ArrowInvalid, OSError):
                return group
        return groups[-1]

    def _chunk_rows(self, group: pq.RowGroupMetaData) -> int:
        found = [group.column(place) for place in range(group.num_columns)]
        values = sum(column.num_values for column in found if column.path_in_schema.partition(".")[0] in self._names)
        return max(1, min(_CHUNK_ROWS, _CHUNK_VALUES * group.num_rows // max(values, 1)))


@dataclasses.dataclass
class _Run:
    """Row groups of a file that follow each other, all of them wanted or none: to read them one by one takes Arrow half
    as long again."""

    is_wanted: bool
    first: int  # row of the file
    rows: int
    groups: list[int]


def _runs(metadata: pq.FileMetaData, before: int, is_wanted: IsWanted) -> Iterator[_Run]:
    """Those of a file, in order; `before`: rows of the source in earlier files."""
    run = None
    first = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        wanted = is_wanted(before + first, before + first + rows)
        if run is None or run.is_wanted != wanted:
            if run is not None:
                yield run
            run = _Run(wanted, first, 0, [])
        run.rows += rows
        run.groups.append(group)
        first += rows
    if run is not None:
        yield run


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise DataError(file, f"not a readable Parquet file ({error})") from None
