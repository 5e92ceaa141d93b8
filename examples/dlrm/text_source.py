# SPDX-License-Identifier: Apache-2.0
"""Reads Criteo text: one row a line, separated by tabs or commas, with a header line or without."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import csv

from . import columns
from .errors import DataError
from .sources import Chunk, IsWanted

_BLOCK_BYTES = 4 << 20
_FIRST_LINE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Layout:
    delimiter: str
    names: tuple[str, ...]
    has_header: bool


class TextSource:
    """Text files, also compressed ones (.gz, .bz2, .zst). Without a header line the columns are label, I1.., C1.. ."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._layouts = [(file, _layout(file)) for file in files]

    @property
    def rows(self) -> None:
        """Unknown: only reading the text would tell."""
        return None

    def chunks(self, is_wanted: IsWanted) -> Iterator[Chunk]:
        """See Source. Text cannot be skipped: every chunk has its columns."""
        del is_wanted
        for file, layout in self._layouts:
            first = 0
            for batch in _batches(file, layout):
                yield Chunk(file, first, batch.num_rows, batch)
                first += batch.num_rows


def _layout(file: Path) -> _Layout:
    try:
        with pa.input_stream(file, compression="detect") as stream:
            start = stream.read(_FIRST_LINE_BYTES)
    except OSError as error:
        raise DataError(file, f"cannot be read ({error})") from None
    try:
        line = start.partition(b"\n")[0].rstrip(b"\r").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(file, "not text") from None
    delimiter = "\t" if "\t" in line else ","
    fields = [field.strip().strip('"') for field in line.split(delimiter)]
    if columns.LABEL in fields:
        missing = [name for name in columns.ALL if name not in fields]
        if missing:
            raise DataError(file, f"columns missing in the header line: {', '.join(missing)}")
        return _Layout(delimiter, tuple(fields), has_header=True)
    if len(fields) != len(columns.ALL):
        raise DataError(
            file,
            f"{len(fields)} fields in the first line; expected {len(columns.ALL)} separated by tabs or commas "
            f"(label, I1..I13, C1..C26), or a header line that names them",
        )
    return _Layout(delimiter, columns.ALL, has_header=False)


def _batches(file: Path, layout: _Layout) -> Iterator[pa.RecordBatch]:
    # Every column is read as text and converted later: an error can then name the row, the column and the text.
    bad_lines: list[csv.InvalidRow] = []

    def note(line: csv.InvalidRow) -> str:
        bad_lines.append(line)
        return "error"

    try:
        with csv.open_csv(
            file,
            read_options=csv.ReadOptions(
                use_threads=False,
                block_size=_BLOCK_BYTES,
                column_names=list(layout.names),
                skip_rows=int(layout.has_header),
            ),
            parse_options=csv.ParseOptions(delimiter=layout.delimiter, invalid_row_handler=note),
            convert_options=csv.ConvertOptions(
                column_types={name: pa.string() for name in columns.ALL}, include_columns=list(columns.ALL)
            ),
        ) as reader:
            yield from reader
    except pa.ArrowInvalid as error:
        if bad_lines:
            line = bad_lines[0]
            row = None if line.number is None else line.number - int(layout.has_header)
            problem = f"{line.actual_columns} fields where {line.expected_columns} are expected"
            raise DataError(file, problem, row=row) from None
        raise DataError(file, str(error)) from None
