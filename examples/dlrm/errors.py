# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the data, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class DataError(ValueError):
    """Malformed data. The message names the file and, where known, the row (from 1, header not counted) and column."""

    def __init__(self, file: Path, problem: str, *, row: int | None = None, column: str | None = None) -> None:
        place = str(file)
        if row is not None:
            place += f", row {row}"
        if column is not None:
            place += f", column {column}"
        super().__init__(f"{place}: {problem}")
        self.file = file
        self.problem = problem
        self.row = row
        self.column = column

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.file, self.problem, self.row, self.column)


def _again(file: Path, problem: str, row: int | None, column: str | None) -> DataError:
    return DataError(file, problem, row=row, column=column)
