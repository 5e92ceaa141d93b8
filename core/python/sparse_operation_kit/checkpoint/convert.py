# SPDX-License-Identifier: Apache-2.0
"""convert: a dump to .npz or .safetensors and back, a dump of SOK 2.x to one with a manifest, and the files of SOK 1.x.
Rows stream.

In an archive a table's arrays are `T/key` [rows], `T/weight` [rows, dimension] and `T/<Optimizer>/<slot>` [rows,
columns]; what the manifest says else is text beside them. Without that text names, shapes and keys say what a table is.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..placement import Placement
from . import archives, header, manifest, names, sok1, strict_json, tables
from .archives import Archive, Stream
from .errors import FormatError, KeysError, ManifestError, MismatchError, storage_errors
from .files import byte_view, check_is_new
from .plan import plan
from .progress import bar
from .reader import Dump, DumpFile, DumpTable, open_dump
from .source import Array, Rows, Source
from .tables import Optimizer, State, Table
from .writer import dump as write_dump

ENDINGS = (".npz", ".safetensors")


@dataclass(frozen=True)
class _Content:
    """What is converted. columns: for each table its files' streams, in the order of Table.files()."""

    tables: list[tuple[Table, list[Stream]]]
    optimizer: Optimizer | None
    step: int | None
    extra: Any


def convert(
    source: str,
    destination: str,
    *,
    optimizer: str | None = None,
    dimension: int | None = None,
    to_sok1: bool = False,
    force: bool = False,
    progress: bool | None = None,
) -> None:
    """Converts `source` to `destination`; a path that ends in .npz or .safetensors is an archive, any other a dump. A
    source may also be a folder of SOK 1.x's Saver, whose tables are those with two files there.

    optimizer:  whose states to take, where a directory of SOK 2.x holds several
    dimension:  elements a row of SOK 1.x's tables, where their files could be of two
    to_sok1:    writes the files of SOK 1.x into a folder instead: keys and rows alone, float32
    force:      replace what is at `destination`

    CheckpointError names the file at fault; then `destination` is as it was.
    """
    if not force:
        check_is_new(destination, "a new path, or --force")
    with ExitStack() as stack:
        if source.endswith(ENDINGS):
            content = _from_archive(stack.enter_context(Archive(source)))
        elif tables_of_sok1 := sok1.names(source):
            content = _from_sok1([sok1.Files(source, name, dimension) for name in tables_of_sok1], tables_of_sok1)
        else:
            content = _from_dump(stack.enter_context(open_dump(source)), optimizer)
        if to_sok1:
            _to_sok1(destination, content)
            return
        total = sum(stream.nbytes for _, streams in content.tables for stream in streams)
        if not destination.endswith(ENDINGS):
            _to_dump(destination, content, progress)
            return
        with bar("convert", total, 0, progress) as advance:
            _to_archive(destination, content, advance)


def _from_dump(dump: Dump, optimizer: str | None) -> _Content:
    held = []
    for stored in dump.tables.values():
        table = stored.table if dump.manifest is not None else _legacy_table(stored, optimizer)
        states = [stored.states[table.optimizer or "", slot] for slot in table.states]
        states += [stored.states[names.KEPT, name] for name in table.kept]
        streams = [_dump_stream(stored, file) for file in [stored.key, stored.weight, *states]]
        streams[0] = replace(streams[0], shape=streams[0].shape[:1])
        held.append((table, streams))
    chosen = dump.optimizer
    if dump.manifest is None:
        used = {table.optimizer for table, _ in held} - {None}
        chosen = Optimizer(str(used.pop())) if len(used) == 1 else None
    return _Content(held, chosen, dump.step, dump.extra)


def _dump_stream(stored: DumpTable, file: DumpFile) -> Stream:
    def pieces(_: int) -> Iterator[Array]:
        size = stored.largest_chunk * file.spec.row_bytes
        for chunk, (first, end) in enumerate(stored.bounds.tolist()):
            rows = file.read_rows(first, end, np.empty(size, np.uint8))
            file.check(chunk, byte_view(rows))
            yield rows[:, 0] if file is stored.key else rows

    return Stream(file.spec.dtype, (stored.rows, file.spec.columns), pieces)


def _legacy_table(stored: DumpTable, optimizer: str | None) -> Table:
    table = stored.table
    there = stored.optimizers
    if optimizer is None and len(there) > 1:
        raise MismatchError(
            f"table {table.name} has states of {', '.join(there)}",
            file=stored.key.file.path,
            expected="one of them, named by --optimizer",
        )
    chosen = optimizer if optimizer is not None else (there[0] if there else None)
    states = {
        slot: State(file.spec.header.dtype, file.spec.columns)
        for (name, slot), file in stored.states.items()
        if name == chosen
    }
    if table.kind == tables.DYNAMIC and _is_static(stored):
        table = replace(table, kind=tables.STATIC)
    return replace(table, optimizer=chosen if states else None, states=states)


def _is_static(stored: DumpTable) -> bool:
    try:
        plan(stored, Placement(stored.rows, stored.table.dimension), stored.rows, "int64", lambda _: None)
    except KeysError:
        return False
    return True


def _from_sok1(found: list[sok1.Files], table_names: list[str]) -> _Content:
    held = []
    for files, name in zip(found, table_names, strict=True):
        shape = (files.rows, files.dimension)
        keys = Stream(np.dtype(files.key_dtype), shape[:1], functools.partial(_pieces, files, 0))
        rows = Stream(np.dtype(np.float32), shape, functools.partial(_pieces, files, 1))
        kind = tables.STATIC if _covers(keys) else tables.DYNAMIC
        table = Table(names.tensor_name(name), files.dimension, kind=kind, key_dtype=files.key_dtype)
        held.append((table, [keys, rows]))
    return _Content(held, None, None, None)


def _pieces(files: sok1.Files, which: int, rows: int) -> Iterator[Array]:
    for piece in files.pieces(rows):
        yield piece[which]


def _to_sok1(folder: str, content: _Content) -> None:
    with storage_errors(folder, "write"):
        os.makedirs(folder, exist_ok=True)
    with ExitStack() as stack:
        writers = []
        for table, (keys, rows, *_) in content.tables:
            name = names.stem(table.name.removesuffix(":0"))
            dtype = "uint32" if keys.dtype == np.uint32 else "int64"
            writers.append(stack.enter_context(sok1.Writer(folder, name, dtype)))
            for piece in zip(keys.pieces(sok1.ROWS_AT_A_TIME), rows.pieces(sok1.ROWS_AT_A_TIME), strict=True):
                writers[-1].append(*piece)
        for writer in writers:
            writer.commit()


def _to_archive(path: str, content: _Content, advance: Callable[[int], None]) -> None:
    document = {
        "format": manifest.FORMAT,
        "version": list(manifest.VERSION),
        "step": content.step,
        "extra": content.extra,
        "optimizer": manifest.optimizer_to_json(content.optimizer),
        "tables": [manifest.table_to_json(table) for table, _ in content.tables],
    }
    arrays = {}
    for table, streams in content.tables:
        for name, stream in zip(_array_names(table), streams, strict=True):
            arrays[name] = stream
    archives.write(path, arrays, strict_json.dumps(document), advance)


def _array_names(table: Table) -> list[str]:
    return [file.name.replace("-", "/") for file in table.files()]


def _from_archive(archive: Archive) -> _Content:
    if archive.metadata is None:
        return _guess(archive)
    file = archive.path
    try:
        document = strict_json.loads(archive.metadata)
    except ValueError as error:
        raise ManifestError(f"{archives.METADATA} is not strict JSON: {error}", file=file) from error
    if not isinstance(document, dict) or document.get("format") != manifest.FORMAT:
        raise ManifestError(f"{archives.METADATA} has another format", file=file, expected=manifest.FORMAT)
    listed = document.get("tables")
    step = document.get("step")
    if not isinstance(listed, list) or not (step is None or type(step) is int):
        raise ManifestError(f"{archives.METADATA} has no list of tables or a wrong step", file=file)
    held = []
    for index, item in enumerate(listed):
        table = manifest.table_from_json(item, f"tables[{index}]", file)
        held.append((table, _streams(archive, table)))
    optimizer = manifest.optimizer_from_json(document.get("optimizer"), file)
    return _Content(held, optimizer, step, document.get("extra"))


def _streams(archive: Archive, table: Table) -> list[Stream]:
    streams = []
    rows = -1
    for file, name in zip(table.files(), _array_names(table), strict=True):
        stream = archive.arrays.get(name)
        if stream is None:
            raise FormatError(f"holds no array {name}", file=archive.path, expected=f"what table {table.name!r} has")
        rows = stream.shape[0] if rows < 0 and stream.shape else rows
        shapes = [(rows, file.columns)] + [(rows,)] * (file.columns == 1)
        if stream.shape not in shapes or not archives.allowed(stream, (file.dtype.name,)):
            raise FormatError(
                f"{name} is {stream.dtype} {list(stream.shape)}",
                file=archive.path,
                expected=f"{file.dtype.name} {list(shapes[0])}",
            )
        streams.append(stream)
    return streams


def _guess(archive: Archive) -> _Content:
    """An archive of somebody else: arrays named `T/key`, `T/weight`, `T/<Optimizer>/<slot>`."""
    found = []
    optimizers = set()
    for name, stream in archive.arrays.items():
        prefix, _, tail = name.rpartition("/")
        if tail != names.KEY or not prefix:
            continue
        weight = archive.arrays.get(f"{prefix}/{names.WEIGHT}")
        if weight is None or len(weight.shape) != 2:
            raise FormatError(f"holds {name} and no matrix {prefix}/{names.WEIGHT}", file=archive.path)
        if not archives.allowed(stream, header.KEY_DTYPES) or not archives.allowed(weight, header.VALUE_DTYPES):
            raise FormatError(f"{name} is {stream.dtype}, its weight {weight.dtype}", file=archive.path)
        states: dict[str, State] = {}
        optimizer = None
        for other, values in archive.arrays.items():
            parts = other.removeprefix(prefix + "/").split("/")
            if other.startswith(prefix + "/") and len(parts) == 2 and len(values.shape) <= 2 and parts[0] != names.KEPT:
                optimizer = names.check_optimizer(parts[0])
                columns = values.shape[1] if len(values.shape) == 2 else 1
                states[names.check_slot(parts[1])] = State(values.dtype.name, columns)
                optimizers.add(optimizer)
        if not names.is_stem(prefix):
            raise FormatError(f"{prefix!r} is no table name without punctuation", file=archive.path)
        table = Table(
            prefix,
            weight.shape[1],
            weight.dtype.name,
            kind=tables.STATIC if _covers(stream) else tables.DYNAMIC,
            key_dtype=stream.dtype.name,
            optimizer=optimizer,
            states=states,
        )
        with _as_format_error(archive.path):
            table.check()
        found.append((table, _streams(archive, table)))
    if not found or len(optimizers) > 1:
        raise FormatError(
            "holds no tables" if not found else f"holds states of {', '.join(sorted(optimizers))}",
            file=archive.path,
            expected="arrays NAME/key and NAME/weight, and states of one optimizer at most",
        )
    return _Content(found, Optimizer(optimizers.pop()) if optimizers else None, None, None)


@contextlib.contextmanager
def _as_format_error(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise FormatError(str(error), file=path) from error


def _covers(stream: Stream) -> bool:
    """Whether the keys are [0, rows), each once."""
    seen = np.zeros(stream.shape[0], bool)
    for piece in stream.pieces(1 << 20):
        if len(piece) and not 0 <= piece.min() <= piece.max() < len(seen):
            return False
        seen[piece.reshape(-1).astype(np.int64)] = True
    return bool(seen.all())


def _to_dump(path: str, content: _Content, progress: bool | None) -> None:
    sources = []
    for table, streams in content.tables:
        sources.append(Source(table, streams[0].shape[0], _rows(table, streams)))
    write_dump(path, sources, optimizer=content.optimizer, step=content.step, extra=content.extra, progress=progress)


def _rows(table: Table, streams: list[Stream]) -> Callable[[int], Iterable[Rows]]:
    def chunks(size: int) -> Iterator[Rows]:
        for keys, weights, *states in zip(*(stream.pieces(size) for stream in streams), strict=True):
            yield Rows(keys.reshape(-1), weights, dict(zip((*table.states, *table.kept), states, strict=True)))

    return chunks
