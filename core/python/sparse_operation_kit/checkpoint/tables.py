# SPDX-License-Identifier: Apache-2.0
"""What a dump says about its tables: the data behind the manifest and, for dumps of SOK 2.x, behind the file names."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import header, names

DISTRIBUTED = -1
STATIC, DYNAMIC = "static", "dynamic"
MAX_DIMENSION = 1 << 24  # a row is read whole, so this bounds a reader's memory
MAX_ROWS = 1 << 60
DIGEST_SIZE = 16  # bytes of one XXH3-128

_MODE = re.compile(r"distributed|localized:(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class State:
    """One optimizer state of a table: `columns` elements a row, the table's dimension or 1."""

    dtype: str
    columns: int


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a dump.

    name:             its class as the file names have it, e.g. "Adam"
    iterations:       steps done, or None
    hyperparameters:  plain JSON data; what the frontend needs to set the optimizer up again
    """

    name: str
    iterations: int | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table as a whole, over all ranks.

    name:         the variable's name, e.g. "table0:0"
    dimension:    elements a row
    key_dtype:    one of header.KEY_DTYPES; None chooses as SOK does: int64, for a localized static table uint64
    value_dtype:  one of header.VALUE_DTYPES
    row_dtype:    "bfloat16" where the rows had that dtype: it is stored as float32, which holds every bfloat16
    kind:         "static": the keys are 0, 1, ..., rows - 1, each once; "dynamic": any distinct integers
    mode:         "distributed" or "localized:RANK"
    seed, initializer:  how rows that are not in the dump would begin; JSON data, for the frontend
    optimizer:    name of the optimizer whose states follow, or None
    states:       slot -> State, in the order in which they are written
    kept:         name -> dtype (one of header.KEY_DTYPES) of what else there is one number of for each row, such as
                  the "score" that rows are evicted by; names are not those of states
    """

    name: str
    dimension: int
    value_dtype: str = "float32"
    kind: str = STATIC
    mode: str = "distributed"
    key_dtype: str | None = None
    seed: int | None = None
    initializer: Any = None
    optimizer: str | None = None
    states: Mapping[str, State] = field(default_factory=dict)
    row_dtype: str | None = None
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The T of the file names."""
        return names.stem(self.name)

    @property
    def owner(self) -> int:
        """The rank that holds the whole table, or DISTRIBUTED."""
        return parse_mode(self.mode)

    @property
    def key_type(self) -> str:
        """`key_dtype` with the default filled in."""
        if self.key_dtype is not None:
            return self.key_dtype
        return "uint64" if self.kind == STATIC and self.owner != DISTRIBUTED else "int64"

    def check(self) -> None:
        """Raises TableNameError or ValueError where a member is not as described above."""
        names.stem(self.name)
        _check_integer("dimension", self.dimension, 1, MAX_DIMENSION)
        header.dtype_name(self.value_dtype, header.VALUE_DTYPES)
        header.dtype_name(self.key_type, header.KEY_DTYPES)
        if self.kind not in (STATIC, DYNAMIC):
            raise ValueError(f"kind is {self.kind!r}; expected {STATIC!r} or {DYNAMIC!r}")
        if self.row_dtype is not None and (self.row_dtype, self.value_dtype) != (header.BFLOAT16, "float32"):
            raise ValueError(f"rows of {self.row_dtype} stored as {self.value_dtype}; expected bfloat16 as float32")
        parse_mode(self.mode)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.states and self.optimizer is None:
            raise ValueError("states need the name of their optimizer")
        for slot, state in self.states.items():
            names.state_file(self.stem, self.optimizer or "", slot)
            header.dtype_name(state.dtype, header.VALUE_DTYPES)
            if state.columns not in (1, self.dimension):
                raise ValueError(f"state {slot!r} has {state.columns} columns; expected {self.dimension} or 1")
        for name, dtype in self.kept.items():
            names.state_file(self.stem, names.KEPT, name)
            header.dtype_name(dtype, header.KEY_DTYPES)
            if name in self.states:
                raise ValueError(f"{name!r} is kept and a state")

    def files(self) -> Iterator["File"]:
        """The table's files: keys, weights, states, what else is kept."""
        stem = self.stem
        yield File(names.key_file(stem), header.Header(header.Kind.KEY, "", self.key_type), 1)
        yield File(names.weight_file(stem), header.Header(header.Kind.WEIGHT, "", self.value_dtype), self.dimension)
        for slot, state in self.states.items():
            file_name = names.state_file(stem, self.optimizer or "", slot)
            yield File(file_name, header.Header(header.Kind.STATE, slot, state.dtype), state.columns)
        for name, dtype in self.kept.items():
            file_name = names.state_file(stem, names.KEPT, name)
            yield File(file_name, header.Header(header.Kind.STATE, name, dtype), 1)


@dataclass(frozen=True)
class File:
    """One file of a table: its name, its header and how many elements a row takes."""

    name: str
    header: header.Header
    columns: int

    @property
    def dtype(self) -> "np.dtype[Any]":
        return header.DTYPES[self.header.dtype]

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    def size(self, rows: int) -> int:
        """Bytes of the file with `rows` rows."""
        return header.SIZE + rows * self.row_bytes


@dataclass(frozen=True)
class Layout:
    """How the rows of a table lie in its files.

    parts:       rows that each writing rank wrote, in file order
    chunk_rows:  rows a chunk; each part is cut into chunks of its own, the last of which may be shorter
    """

    parts: tuple[int, ...]
    chunk_rows: int

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def num_chunks(self) -> int:
        return sum(-(-part // self.chunk_rows) for part in self.parts)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first row, end row) of each chunk, in file order."""
        begin = 0
        for part in self.parts:
            for first in range(begin, begin + part, self.chunk_rows):
                yield first, min(first + self.chunk_rows, begin + part)
            begin += part


@dataclass(frozen=True)
class StoredTable:
    """A table in a dump. `digests`: file name -> the chunks' XXH3-128, one after another; empty without a manifest."""

    table: Table
    layout: Layout
    digests: Mapping[str, bytes] = field(default_factory=dict)


def parse_mode(mode: str) -> int:
    """The owner that a mode of the format names; ValueError for another text."""
    match = _MODE.fullmatch(mode) if isinstance(mode, str) else None
    if match is None:
        raise ValueError(f'mode is {mode!r}; expected "distributed" or "localized:RANK"')
    return DISTRIBUTED if match.group(1) is None else int(match.group(1))


def chunk_rows(table: Table, rows: int, chunk_bytes: int) -> int:
    """Rows a chunk, so that no file's chunk takes more than `chunk_bytes` unless a single row does."""
    widest = max(file.row_bytes for file in table.files())
    return max(1, min(chunk_bytes // widest, rows))


def _check_integer(what: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{what} is {value!r}; expected an integer in [{low}, {high}]")
