# SPDX-License-Identifier: Apache-2.0
"""What the readers of the two file formats have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`length` rows that follow each other in `file`, from row `first` (counted from 0) on. `columns` is None if nobody
    wanted them."""

    file: Path
    first: int
    length: int
    columns: pa.RecordBatch | None


IsWanted = Callable[[int, int], bool]
"""Asked with rows [first, last) of a source: is there one that will be used?"""


class Source(Protocol):
    """Files read one after another, a chunk at a time."""

    @property
    def rows(self) -> int | None:
        """Rows of all files together; None where only reading them to the end would tell."""

    def chunks(self, is_wanted: IsWanted) -> Iterator[Chunk]:
        """All rows in order. A chunk that is not wanted may come without its columns. Raises DataError."""
