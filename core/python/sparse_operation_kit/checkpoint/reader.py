# SPDX-License-Identifier: Apache-2.0
"""open_dump(): a dump's tables and files, checked for everything that can be checked without reading the rows.

With a manifest only the files it lists are looked at, and their names follow from the tables' names; the directory is
never searched. Without one (SOK 2.x) tables are found by their file names and dimensions follow from the sizes.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from . import header, manifest, names, replace, tables
from .errors import (
    ChecksumError,
    FormatError,
    HeaderError,
    MismatchError,
    MissingFileError,
    SizeError,
    StorageError,
    storage_errors,
)
from .files import Directory, OpenFile, byte_view
from .manifest import Manifest
from .source import Array
from .tables import DIGEST_SIZE, File, Layout, Optimizer, State, StoredTable, Table

_ATTEMPTS = 20  # while other processes replace the dump
_LEGACY_CHUNK_BYTES = 8 << 20
_KEY_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class DumpFile:
    """An open file of a dump: what it must be, and the chunks' digests (empty without a manifest)."""

    spec: File
    file: OpenFile
    digests: bytes

    def check(self, chunk: int, data: memoryview) -> None:
        """ChecksumError unless `data` are the bytes that were written as chunk `chunk`."""
        if not self.digests:
            return
        expected = self.digests[chunk * DIGEST_SIZE : (chunk + 1) * DIGEST_SIZE]
        found = xxhash.xxh3_128_digest(data)
        if found != expected:
            raise ChecksumError(
                f"chunk {chunk} has the XXH3-128 {found.hex()}", file=self.file.path, expected=expected.hex()
            )

    def read_rows(self, first: int, end: int, buffer: Array) -> Array:
        """Rows [first, end) as [rows, columns], in `buffer` (bytes, large enough)."""
        size = (end - first) * self.spec.row_bytes
        part = buffer[:size]
        self.file.read_into(part.data, self.spec.size(first))
        return part.view(self.spec.dtype).reshape(end - first, self.spec.columns)


@dataclass(frozen=True)
class DumpTable:
    """A table of a dump. `states`: (optimizer, slot) -> file. `bounds`: [chunks, 2], first and end row of each
    chunk.
    """

    table: Table
    layout: Layout
    key: DumpFile
    weight: DumpFile
    states: Mapping[tuple[str, str], DumpFile]
    bounds: Array

    @property
    def stem(self) -> str:
        return self.table.stem

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def largest_chunk(self) -> int:
        """Rows of the largest chunk."""
        return min(self.layout.chunk_rows, max(self.layout.parts, default=0))

    @property
    def files(self) -> list[DumpFile]:
        return [self.key, self.weight, *self.states.values()]

    @property
    def optimizers(self) -> list[str]:
        """The optimizers whose states are there; more than one only in a directory that SOK 2.x wrote twice."""
        return sorted({optimizer for optimizer, _ in self.states} - {names.KEPT})

    def state(self, optimizer: str, slot: str, aliases: bool) -> DumpFile:
        """The file of a state. aliases: also under the names that SOK 2.x gave some optimizers."""
        for name in names.sok_aliases(optimizer) if aliases else (optimizer,):
            if (name, slot) in self.states:
                return self.states[name, slot]
        there = ", ".join(file.spec.name for file in self.states.values()) or "no state"
        raise MismatchError(
            f"has no state {slot!r} of {optimizer} (it has {there})",
            file=os.path.join(os.path.dirname(self.key.file.path), names.state_file(self.stem, optimizer, slot)),
            expected=f"a dump made with {optimizer}",
        )

    def key_blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of chunks whose keys are read at once."""
        per_block = max(1, _KEY_BLOCK_BYTES // max(1, self.largest_chunk * self.key.spec.row_bytes))
        for first in range(0, len(self.bounds), per_block):
            yield first, min(first + per_block, len(self.bounds))

    def key_chunks(self) -> Iterator[tuple[int, Array]]:
        """(chunk, its keys) in file order, each checked against its digest. The arrays last until the next step."""
        buffer = np.empty(0, np.uint8)
        for begin, stop in self.key_blocks():
            first, end = int(self.bounds[begin, 0]), int(self.bounds[stop - 1, 1])
            if buffer.size < (end - first) * self.key.spec.row_bytes:
                buffer = np.empty((end - first) * self.key.spec.row_bytes, np.uint8)
            block = self.key.read_rows(first, end, buffer)[:, 0]
            for chunk in range(begin, stop):
                keys = block[self.bounds[chunk, 0] - first : self.bounds[chunk, 1] - first]
                self.key.check(chunk, byte_view(keys))
                yield chunk, keys


class Dump:
    """An open dump. Close it, or use it as a context manager; its descriptive members stay valid.

    path:        the directory as given
    manifest:    its manifest, or None for a dump of SOK 2.x
    tables:      stem -> DumpTable
    optimizer, step, extra, world_size:  the manifest's, or None
    identity:    a text that is equal for two opens of the same dump
    """

    def __init__(self, directory: Directory, path: str) -> None:
        self.path = path
        self.manifest: Manifest | None = None
        self.tables: dict[str, DumpTable] = {}
        self._directory = directory
        try:
            self._open()
        except BaseException:
            directory.close()
            raise

    @property
    def optimizer(self) -> Optimizer | None:
        return self.manifest.optimizer if self.manifest else None

    @property
    def step(self) -> int | None:
        return self.manifest.step if self.manifest else None

    @property
    def extra(self) -> Any:
        return self.manifest.extra if self.manifest else None

    @property
    def world_size(self) -> int | None:
        return self.manifest.world_size if self.manifest else None

    def table(self, name: str) -> DumpTable:
        """The table of a variable's name (or stem); MismatchError lists what there is."""
        stem = names.stem(name)
        if stem not in self.tables:
            there = ", ".join(sorted(self.tables)[:20]) or "none"
            raise MismatchError(
                f"holds no table {name!r} (file {names.key_file(stem)}); its tables are: {there}", file=self.path
            )
        return self.tables[stem]

    def close(self) -> None:
        self._directory.close()

    def __enter__(self) -> "Dump":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        try:
            file = self._directory.open(names.MANIFEST)
        except MissingFileError:
            self._open_legacy()
            return
        if file.size > manifest.MAX_BYTES:
            raise SizeError(
                f"is {file.size} bytes long", file=file.path, expected=f"at most {manifest.MAX_BYTES} bytes"
            )
        data = file.read(0, file.size)
        file.close()
        self.manifest = manifest.decode(data, file.path)
        self.identity = xxhash.xxh3_128_hexdigest(data)
        for stored in self.manifest.tables:
            self.tables[stored.table.stem] = self._open_table(stored)

    def _open_table(self, stored: StoredTable) -> DumpTable:
        opened = []
        for spec in stored.table.files():
            file = self._directory.open(spec.name)
            size = spec.size(stored.layout.rows)
            if file.size != size:
                raise SizeError(f"is {file.size} bytes long", file=file.path, expected=f"{size} bytes")
            if file.read(0, header.SIZE) != spec.header.encode():
                raise HeaderError("has another header", file=file.path, expected=spec.header.describe())
            opened.append(DumpFile(spec, file, stored.digests[spec.name]))
        optimizer = stored.table.optimizer or ""
        owners = [(optimizer, slot) for slot in stored.table.states] + [
            (names.KEPT, name) for name in stored.table.kept
        ]
        states = dict(zip(owners, opened[2:], strict=True))
        return DumpTable(stored.table, stored.layout, opened[0], opened[1], states, _bounds(stored.layout))

    def _open_legacy(self) -> None:
        entries = self._directory.list()
        found = {stem for stem in map(names.parse_key_file, entries) if stem is not None}
        found |= {stem for stem in map(names.parse_weight_file, entries) if stem is not None}
        if not found:
            raise MissingFileError(
                "is missing, and there are no files of SOK 2.x either",
                file=self._directory.join(names.MANIFEST),
                expected="a dump",
            )
        states = [state for state in map(names.parse_state_file, entries) if state and state.optimizer != names.KEPT]
        for stem in sorted(found):
            self.tables[stem] = self._legacy_table(stem, [state for state in states if state.stem == stem])
        parts = [f"{file.spec.name}:{file.file.size}" for table in self.tables.values() for file in table.files]
        self.identity = xxhash.xxh3_128_hexdigest("/".join(parts).encode())

    def _legacy_table(self, stem: str, states: Sequence[names.StateFile]) -> DumpTable:
        key = self._legacy_file(names.key_file(stem), header.Kind.KEY, "", None)
        rows = _divide(key.file, key.spec.dtype.itemsize, "keys")
        weight = self._legacy_file(names.weight_file(stem), header.Kind.WEIGHT, "", rows)
        dimension = weight.spec.columns
        if dimension > tables.MAX_DIMENSION:
            raise SizeError(
                f"has {dimension} elements a row", file=weight.file.path, expected=f"at most {tables.MAX_DIMENSION}"
            )
        opened = {}
        for state in states:
            name = names.state_file(stem, state.optimizer, state.slot)
            file = self._legacy_file(name, header.Kind.STATE, state.slot, rows)
            if rows and file.spec.columns not in (1, dimension):
                raise SizeError(
                    f"has {file.spec.columns} elements a row", file=file.file.path, expected=f"{dimension} or 1"
                )
            opened[state.optimizer, state.slot] = file
        localized = key.spec.header.dtype == "uint64"
        optimizers = sorted({optimizer for optimizer, _ in opened})
        table = Table(
            name=stem,
            dimension=dimension,
            value_dtype=weight.spec.header.dtype,
            kind=tables.STATIC if localized else tables.DYNAMIC,
            mode="localized:0" if localized else "distributed",
            key_dtype=key.spec.header.dtype,
            optimizer=optimizers[0] if len(optimizers) == 1 else None,
            states=(
                {slot: State(file.spec.header.dtype, file.spec.columns) for (_, slot), file in opened.items()}
                if len(optimizers) == 1
                else {}
            ),
        )
        layout = Layout((rows,), tables.chunk_rows(table, rows, _LEGACY_CHUNK_BYTES))
        return DumpTable(table, layout, key, weight, opened, _bounds(layout))

    def _legacy_file(self, name: str, kind: header.Kind, slot: str, rows: int | None) -> DumpFile:
        file = self._directory.open(name)
        if file.size < header.SIZE:
            raise SizeError(f"is {file.size} bytes long", file=file.path, expected=f"at least {header.SIZE} bytes")
        found = header.decode(file.read(0, header.SIZE), file.path)
        allowed = header.KEY_DTYPES if kind is header.Kind.KEY else header.VALUE_DTYPES
        if found.kind is not kind or found.state != slot or found.dtype not in allowed:
            wanted = header.Header(kind, slot, "/".join(allowed)).describe()
            raise HeaderError(f"has {found.describe()}", file=file.path, expected=wanted)
        itemsize = header.DTYPES[found.dtype].itemsize
        columns = 1
        if rows is not None:
            elements = _divide(file, itemsize, "elements")
            if rows == 0 and elements:
                raise SizeError("has rows, and the key file has none", file=file.path, expected=f"{header.SIZE} bytes")
            columns = max(1, _divide(file, itemsize * rows, f"rows of {rows} keys") if rows else 1)
            if rows and not elements:
                raise SizeError(
                    f"has no rows, and the key file has {rows}", file=file.path, expected="a row for each key"
                )
        return DumpFile(File(name, found, columns), file, b"")


def open_dump(path: str | os.PathLike[str]) -> Dump:
    """Opens the dump in directory `path` and checks manifest, headers and sizes.

    Memory: the manifest, and 16 bytes a chunk. FormatError and its kinds name the file at fault; StorageError where the
    system refuses. What is read later comes from this dump even when another one takes its place meanwhile.
    """
    text = os.fspath(path)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            directory = Directory(replace.find(text))
        except MissingFileError:
            if attempt == _ATTEMPTS:
                raise
            continue  # it may have been renamed since it was found, where a replacement takes two steps
        opened = os.fstat(directory.fd)
        try:
            return Dump(directory, text)
        except FormatError:
            if not _replaced(text, opened):
                raise
    raise StorageError("was replaced again and again while it was being opened", file=text, number=errno.EBUSY)


def has_dump(path: str | os.PathLike[str]) -> bool:
    """Whether there is a dump at `path` that `open_dump` would read, or say what is wrong with.

    Files that a dump begins with are enough. What an interrupted dump left of an older one counts. StorageError where
    the system refuses to say.
    """
    text = os.fspath(path)
    with storage_errors(text, "look for a dump"):
        try:
            entries = os.listdir(replace.find(text))
        except (FileNotFoundError, NotADirectoryError):
            return False
    return any(entry == names.MANIFEST or names.parse_key_file(entry) is not None for entry in entries)


def _replaced(path: str, opened: os.stat_result) -> bool:
    """Whether the directory that was opened is no longer the one to read for `path`."""
    try:
        return not os.path.samestat(os.stat(replace.find(path)), opened)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _bounds(layout: Layout) -> Array:
    return np.fromiter(layout.chunks(), np.dtype((np.int64, 2)), layout.num_chunks)


def _divide(file: OpenFile, unit: int, what: str) -> int:
    payload = file.size - header.SIZE
    if payload % unit:
        raise SizeError(
            f"its {payload} bytes after the header are no whole number of {what}",
            file=file.path,
            expected=f"a multiple of {unit}",
        )
    return payload // unit
