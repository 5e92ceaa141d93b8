# SPDX-License-Identifier: Apache-2.0
"""Reads Parquet files a row group at a time, and skips row groups of which no row is wanted."""

from __future__ import annotations

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
                first = 0
                for group in range(reader.num_row_groups):
                    length = reader.metadata.row_group(group).num_rows
                    if is_wanted(before + first, before + first + length):
                        yield from self._group(reader, file, group, first)
                    else:
                        yield Chunk(file, first, length, None)
                    first += length
                before += first

    def _group(self, reader: pq.ParquetFile, file: Path, group: int, first: int) -> Iterator[Chunk]:
        rows = self._chunk_rows(reader.metadata.row_group(group))
        threads = pa.cpu_count() > 1  # to hand all work to a single one takes a seventh longer
        try:
            for batch in reader.iter_batches(rows, row_groups=[group], columns=self._names, use_threads=threads):
                yield Chunk(file, first, batch.num_rows, batch)
                first += batch.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(file, f"damaged in row group {group} ({error})") from None

    def _chunk_rows(self, group: pq.RowGroupMetaData) -> int:
        found = [group.column(place) for place in range(group.num_columns)]
        values = sum(column.num_values for column in found if column.path_in_schema.partition(".")[0] in self._names)
        return max(1, min(_CHUNK_ROWS, _CHUNK_VALUES * group.num_rows // max(values, 1)))


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise DataError(file, f"not a readable Parquet file ({error})") from None
