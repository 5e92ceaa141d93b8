# SPDX-License-Identifier: Apache-2.0
"""sok_manifest.json: what it says, how it is written, and how one that somebody else wrote is read without trust.

The file is one JSON object. It begins with a member whose value is the XXH3-128 of every byte after it, so that each
byte is covered and the check runs before anything is parsed. docs/FORMAT.md describes it byte by byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from . import header, strict_json, tables
from .errors import CheckpointError, ManifestError
from .names import MANIFEST, stems
from .tables import Layout, Optimizer, State, StoredTable, Table

FORMAT = "sok-checkpoint"
VERSION = (1, 0)
ALGORITHM = "xxh3_128"
MAX_BYTES = strict_json.MAX_BYTES
MAX_CHUNK_BYTES = 64 << 20
MAX_WORLD_SIZE = 1 << 20
_PREFIX = b'{"manifest_xxh3_128": "'
_HEX = 2 * tables.DIGEST_SIZE


@dataclass(frozen=True)
class Manifest:
    """writer: {"name", "version"}, and "frontend" where one is known; world_size: ranks that wrote; step, extra: the
    user's.
    """

    tables: Sequence[StoredTable]
    world_size: int
    optimizer: Optimizer | None = None
    step: int | None = None
    extra: Any = None
    writer: Mapping[str, str] = field(default_factory=dict)


def check_user_data(optimizer: Optimizer | None, step: Any, extra: Any) -> None:
    """Raises ManifestError for what could not be written, or not be read again: before any row is written."""
    if step is not None and (type(step) is not int or not -(1 << 63) <= step < 1 << 63):
        raise ManifestError(f"cannot be written: step is {step!r}", file=MANIFEST, expected="an int64, or None")
    try:
        strict_json.check({"extra": extra, "optimizer": optimizer_to_json(optimizer)})
    except ValueError as error:
        raise ManifestError(f"cannot be written: {error}", file=MANIFEST) from error


def encode(manifest: Manifest) -> bytes:
    """The bytes of the file. Raises ManifestError where a manifest of this content could not be read again."""
    document = {
        "format": FORMAT,
        "version": list(VERSION),
        "writer": dict(manifest.writer),
        "world_size": manifest.world_size,
        "step": manifest.step,
        "extra": manifest.extra,
        "optimizer": optimizer_to_json(manifest.optimizer),
        "checksum": ALGORITHM,
        "tables": [_stored_to_json(stored) for stored in manifest.tables],
    }
    try:
        text = strict_json.dumps(document)
    except ValueError as error:
        raise ManifestError(f"cannot be written: {error}", file=MANIFEST) from error
    rest = b'", ' + text[1:] + b"\n"
    data = _PREFIX + xxhash.xxh3_128_hexdigest(rest).encode("ascii") + rest
    if len(data) > MAX_BYTES or data.count(b",") + data.count(b"[") + data.count(b"{") > strict_json.MAX_VALUES:
        raise ManifestError(
            "cannot be written: too much in one dump", file=MANIFEST, expected=f"at most {MAX_BYTES} bytes"
        )
    return data


def decode(data: bytes, file: str = MANIFEST) -> Manifest:
    """Reads the bytes of a manifest. ManifestError names `file`, the member at fault and what was expected."""
    return _from_json(parse(data, file), file)


def parse(data: bytes, file: str = MANIFEST) -> dict[str, Any]:
    """The JSON object of a manifest, its checksum, format and version checked, its other members not."""
    end = len(_PREFIX) + _HEX
    if len(data) > MAX_BYTES:
        raise ManifestError(f"is {len(data)} bytes long", file=file, expected=f"at most {MAX_BYTES} bytes")
    if not data.startswith(_PREFIX) or len(data) < end:
        raise ManifestError("is not a manifest", file=file, expected=f"that it begins with {_PREFIX.decode()}")
    digest = xxhash.xxh3_128_hexdigest(data[end:])
    if data[len(_PREFIX) : end] != digest.encode("ascii"):
        raise ManifestError("its bytes do not match its checksum", file=file, expected=f"the XXH3-128 {digest}")
    try:
        document = strict_json.loads(data)
    except ValueError as error:
        raise ManifestError(f"is not strict JSON: {error}", file=file) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ManifestError("has another format", file=file, expected=f'"format": "{FORMAT}"')
    version = document.get("version")
    if not (
        isinstance(version, list) and len(version) == 2 and all(type(part) is int and part >= 0 for part in version)
    ):
        raise ManifestError(f"version is {str(version)[:40]}", file=file, expected="[major, minor]")
    if version[0] != VERSION[0]:
        raise ManifestError(
            f"has format version {version[0]}.{version[1]}; a newer sparse_operation_kit may read it",
            file=file,
            expected=f"major version {VERSION[0]}",
        )
    return document


def optimizer_to_json(optimizer: Optimizer | None) -> Any:
    if optimizer is None:
        return None
    return {
        "name": optimizer.name,
        "iterations": optimizer.iterations,
        "hyperparameters": dict(optimizer.hyperparameters),
    }


def table_to_json(table: Table) -> dict[str, Any]:
    """A table's own members, without the files."""
    return {
        "name": table.name,
        "dimension": table.dimension,
        "key_dtype": table.key_type,
        "value_dtype": table.value_dtype,
        "kind": table.kind,
        "mode": table.mode,
        "seed": table.seed,
        "initializer": table.initializer,
        "optimizer": table.optimizer,
        "states": [
            {"slot": slot, "dtype": state.dtype, "columns": state.columns} for slot, state in table.states.items()
        ],
        **({} if table.row_dtype is None else {"row_dtype": table.row_dtype}),
        **({"kept": [{"name": name, "dtype": dtype} for name, dtype in table.kept.items()]} if table.kept else {}),
    }


def _stored_to_json(stored: StoredTable) -> dict[str, Any]:
    rows = stored.layout.rows
    return {
        **table_to_json(stored.table),
        "rows": rows,
        "parts": list(stored.layout.parts),
        "chunk_rows": stored.layout.chunk_rows,
        "files": [
            {"name": file.name, "bytes": file.size(rows), "digests": stored.digests[file.name].hex()}
            for file in stored.table.files()
        ],
    }


class _Reader:
    """Takes typed members out of one JSON object; errors name file, object and member."""

    def __init__(self, document: Any, where: str, file: str) -> None:
        self._where, self._file = where, file
        if not isinstance(document, dict):
            raise ManifestError(f"{where} is {type(document).__name__}", file=file, expected="an object")
        self._document = document

    def fail(self, member: str, expected: str) -> ManifestError:
        text = repr(self._document.get(member, "missing"))
        short = text if len(text) <= 60 else text[:60] + "..."
        return ManifestError(f"{self._where}: {member} is {short}", file=self._file, expected=expected)

    def integer(self, member: str, low: int, high: int) -> int:
        value = self._document.get(member)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(member, f"an integer in [{low}, {high}]")
        return value

    def optional_integer(self, member: str, low: int, high: int) -> int | None:
        return None if self.any(member) is None else self.integer(member, low, high)

    def text(self, member: str, allowed: Sequence[str] | None = None) -> str:
        value = self._document.get(member)
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            raise self.fail(member, "a string" if allowed is None else f"one of {', '.join(allowed)}")
        return value

    def array(self, member: str, limit: int) -> list[Any]:
        value = self._document.get(member)
        if not isinstance(value, list) or len(value) > limit:
            raise self.fail(member, f"an array of at most {limit}")
        return value

    def object(self, member: str) -> dict[str, Any]:
        value = self._document.get(member)
        if not isinstance(value, dict):
            raise self.fail(member, "an object")
        return value

    def any(self, member: str) -> Any:
        if member not in self._document:
            raise self.fail(member, "a value")
        return self._document[member]


def _from_json(document: dict[str, Any], file: str) -> Manifest:
    reader = _Reader(document, "manifest", file)
    reader.text("checksum", (ALGORITHM,))
    world_size = reader.integer("world_size", 1, MAX_WORLD_SIZE)
    writer = reader.object("writer")
    if not all(isinstance(value, str) for value in writer.values()):
        raise reader.fail("writer", "an object of strings")
    stored = []
    for index, item in enumerate(reader.array("tables", strict_json.MAX_VALUES)):
        stored.append(_stored_from_json(item, f"tables[{index}]", world_size, file))
    try:
        stems(entry.table.name for entry in stored)
    except CheckpointError as error:
        raise ManifestError(str(error), file=file) from error
    return Manifest(
        tables=tuple(stored),
        world_size=world_size,
        optimizer=optimizer_from_json(reader.any("optimizer"), file),
        step=reader.optional_integer("step", -(1 << 63), (1 << 63) - 1),
        extra=reader.any("extra"),
        writer=writer,
    )


def optimizer_from_json(document: Any, file: str) -> Optimizer | None:
    if document is None:
        return None
    reader = _Reader(document, "optimizer", file)
    return Optimizer(
        reader.text("name"),
        reader.optional_integer("iterations", 0, (1 << 63) - 1),
        reader.object("hyperparameters"),
    )


def table_from_json(document: Any, where: str, file: str) -> Table:
    """A table's own members, all checked."""
    reader = _Reader(document, where, file)
    states: dict[str, State] = {}
    for index, item in enumerate(reader.array("states", 64)):
        state = _Reader(item, f"{where}.states[{index}]", file)
        slot = state.text("slot")
        if slot in states:
            raise state.fail("slot", "distinct slots")
        columns = state.integer("columns", 1, tables.MAX_DIMENSION)
        states[slot] = State(state.text("dtype", header.VALUE_DTYPES), columns)
    kept: dict[str, str] = {}
    for index, item in enumerate(reader.array("kept", 64) if "kept" in document else ()):
        entry = _Reader(item, f"{where}.kept[{index}]", file)
        name = entry.text("name")
        if name in kept:
            raise entry.fail("name", "distinct names")
        kept[name] = entry.text("dtype", header.KEY_DTYPES)
    table = Table(
        name=reader.text("name"),
        dimension=reader.integer("dimension", 1, tables.MAX_DIMENSION),
        value_dtype=reader.text("value_dtype", header.VALUE_DTYPES),
        kind=reader.text("kind", (tables.STATIC, tables.DYNAMIC)),
        mode=reader.text("mode"),
        key_dtype=reader.text("key_dtype", header.KEY_DTYPES),
        seed=reader.optional_integer("seed", -(1 << 63), (1 << 64) - 1),
        initializer=reader.any("initializer"),
        optimizer=None if reader.any("optimizer") is None else reader.text("optimizer"),
        states=states,
        row_dtype=reader.text("row_dtype", (header.BFLOAT16,)) if "row_dtype" in document else None,
        kept=kept,
    )
    try:
        table.check()
    except ValueError as error:
        raise ManifestError(f"{where}: {error}", file=file) from error
    return table


def _stored_from_json(document: Any, where: str, world_size: int, file: str) -> StoredTable:
    table = table_from_json(document, where, file)
    reader = _Reader(document, where, file)
    rows = reader.integer("rows", 0, tables.MAX_ROWS)
    parts = reader.array("parts", world_size)
    if not all(type(part) is int and 0 <= part <= rows for part in parts) or sum(parts) != rows:
        raise reader.fail("parts", f"at most {world_size} row counts whose sum is {rows}")
    layout = Layout(tuple(parts), reader.integer("chunk_rows", 1, tables.MAX_ROWS))
    expected = list(table.files())
    widest = max(entry.row_bytes for entry in expected)
    if layout.chunk_rows > 1 and layout.chunk_rows * widest > MAX_CHUNK_BYTES:
        raise reader.fail("chunk_rows", f"1, or chunks of at most {MAX_CHUNK_BYTES} bytes")
    files = reader.array("files", len(expected))
    if len(files) != len(expected):
        raise reader.fail("files", f"{len(expected)} files")
    digests = {}
    for index, (entry, item) in enumerate(zip(expected, files, strict=True)):
        stored = _Reader(item, f"{where}.files[{index}]", file)
        stored.text("name", (entry.name,))
        size = entry.size(rows)
        stored.integer("bytes", size, size)
        text = stored.text("digests")
        if len(text) != layout.num_chunks * _HEX or not set(text) <= set("0123456789abcdef"):
            raise stored.fail("digests", f"{layout.num_chunks} digests of {_HEX} lowercase hexadecimal digits")
        digests[entry.name] = bytes.fromhex(text)
    return StoredTable(table, layout, digests)
