# SPDX-License-Identifier: Apache-2.0
"""What the reader has to be told of a data set: which columns it has, and what a batch of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import DataError

Part = TypeVar("Part")
B = TypeVar("B", covariant=True)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a file: their columns, and their numbers in the file (from 1) for messages."""

    file: Path
    numbers: npt.NDArray[np.int64]
    columns: pa.RecordBatch

    def error(self, index: int, column: str, problem: str) -> DataError:
        """The error for row `index` of these rows."""
        return DataError(self.file, problem, row=int(self.numbers[index]), column=column)


class Layout(Protocol[Part, B]):
    """The columns of a data set: Criteo's (`features.CriteoLayout`), or arrays (`arrays.ArrayLayout`)."""

    @property
    def names(self) -> Sequence[str]:
        """The columns that every file must have."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the arrays of a batch for each of its rows. Batches that take more come slower from processes."""

    def extract(self, rows: Rows) -> Part:
        """Converts rows of one file. Raises DataError for the first malformed field found."""

    def batch(self, index: int, global_rows: int, parts: Sequence[Part]) -> B:
        """This rank's rows of global batch `index`, which has `global_rows` over all ranks: those of the parts, of
        which there may be none."""


class LabelledBatch(Protocol):
    """What the training loop has to know of a batch."""

    @property
    def index(self) -> int:
        """Which global batch it is of."""

    @property
    def global_rows(self) -> int:
        """Rows of that, over all ranks."""

    @property
    def labels(self) -> npt.NDArray[np.float32]:
        """[n], of this rank's rows: 0 or 1."""
