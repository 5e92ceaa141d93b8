# SPDX-License-Identifier: Apache-2.0
"""Tables for servers: keys and rows alone, some of the rows or all, as servers of embeddings read them.

    PATH/T/key, PATH/T/emb_vector     n int64 and n x dimension float32, bare: a model of HugeCTR's hierarchical
                                      parameter server (HPS), which is given PATH/T
    PATH, ending in .safetensors      tensors "T/key" [n] int64, "T/emb_vector" [n, dimension] float32, float16 or int8,
                                      and with int8 "T/scale" [n] float32: row i is emb_vector[i] * scale[i]

T is the table's name without TensorFlow's ":0", its punctuation replaced by "_". The order of rows means nothing.
"""

import contextlib
import math
import operator
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import archives, files, names
from .errors import MismatchError, storage_errors
from .group import Group, SingleProcess, agree
from .plan import to_int64
from .progress import bar
from .reader import Dump, DumpTable
from .source import Array, Rows, Source
from .tables import Table
from .variables import check_same_names
from .verify import Piece, read

ENDING = ".safetensors"
DTYPES = ("float32", "float16", "int8")
SCORE = "score"
_LARGEST_INT8 = 127
_CHUNK_BYTES = 8 << 20
_MOST_OPEN = 128  # files


@dataclass(frozen=True)
class Choice:
    """Which rows are written, and how.

    dtype:      one of DTYPES
    min_norm:   rows of a smaller L2 norm are left out; one with a NaN has none, and is written
    min_score:  likewise rows that the table's strategy of eviction ranks lower; tables without scores are written whole
    """

    dtype: str = "float32"
    min_norm: float | None = None
    min_score: int | None = None

    def check_thresholds(self) -> None:
        """Raises TypeError and ValueError for what is no number, and for a negative one."""
        thresholds: tuple[tuple[str, Any], ...] = (("min_norm", self.min_norm), ("min_score", self.min_score))
        for name, value in thresholds:
            if value is None:
                continue
            kind = "an integer" if name == "min_score" else "a number"
            try:
                if isinstance(value, (bool, str)):
                    raise TypeError
                number = operator.index(value) if name == "min_score" else float(value)
            except (TypeError, ValueError):
                raise TypeError(f"{name} must be {kind}, got {value!r}") from None
            if not number >= 0:
                raise ValueError(f"{name} must be {kind} that is not negative, got {value!r}")

    def check(self, path: str, tables: Sequence[Table]) -> None:
        """Raises as check_thresholds, ValueError for another dtype, MismatchError for what path or tables do not
        have.
        """
        self.check_thresholds()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {list(DTYPES)}")
        if self.dtype != "float32" and not path.endswith(ENDING):
            raise MismatchError(
                f"cannot have rows of {self.dtype}, because HPS reads float32",
                file=path,
                expected=f"a path that ends in {ENDING}",
            )
        if self.min_score is not None and not any(SCORE in table.kept for table in tables):
            raise MismatchError("min_score is given, but none of the tables keeps scores", expected="tables that evict")

    def of(self, rows: Rows) -> Rows:
        """Those of some rows that are written."""
        kept = np.ones(len(rows.keys), np.bool_)
        if self.min_norm is not None:
            kept &= ~(np.linalg.norm(rows.weights.astype(np.float64), axis=1) < self.min_norm)  # a NaN stays
        if self.min_score is not None and SCORE in rows.states:
            kept &= rows.states[SCORE].reshape(-1) >> 32 >= self.min_score
        return rows if kept.all() else Rows(rows.keys[kept], rows.weights[kept], {})

    def takes_all(self, table: Table) -> bool:
        """Whether every row of the table is written."""
        return self.min_norm is None and (self.min_score is None or SCORE not in table.kept)


def export_for_serving(
    path: str | os.PathLike[str],
    describe: Callable[[], Sequence[Source]],
    choice: Choice,
    *,
    group: Group | None = None,
    progress: bool | None = None,
) -> dict[str, int]:
    """Writes all ranks' rows to `path`, where nothing may be. Called by every rank of `group`.

    describe:  gives this rank's rows, the same tables in the same order on every rank; where rows are chosen by a
               threshold their chunks are asked for twice. What it raises on one rank ends the export on all
    progress:  see progress.bar

    Returns how many rows of each table were written, by its name. What is written appears whole or not at all; a
    process that is killed leaves PATH.sok-tmp-*. All ranks raise when one does: ValueError, TypeError, MismatchError,
    TableNameError, NoSpaceError and StorageError, PeerError.
    """
    target, group = os.fspath(path), group or SingleProcess()
    sources: list[Source] = []

    def prepare() -> list[str]:
        sources.extend(describe())
        return _check(target, [source.table for source in sources], choice)

    check_same_names(agree(group, prepare))
    tables = [source.table for source in sources]
    # Where rows are chosen they are read once to count them.
    passes = [1 if choice.takes_all(table) else 2 for table in tables]
    total = sum(source.rows * _row_bytes(source.table) * times for source, times in zip(sources, passes, strict=True))
    with bar("export", total, group.rank, progress) as advance:
        counts = agree(group, lambda: [_count(source, choice, advance) for source in sources])
        layout = _Layout(tables, [sum(column) for column in zip(*counts, strict=True)], target, choice.dtype)
        before = [sum(column) for column in zip(*([0] * len(tables), *counts[: group.rank]), strict=True)]
        with _Temporary(target, group, layout) as temporary:

            def write() -> None:
                for number, source in enumerate(sources):
                    _write(source, choice, layout, number, before[number], temporary, advance)
                temporary.sync()

            agree(group, write)
            temporary.commit()
    return dict(zip((_plain(table) for table in tables), layout.rows, strict=True))


def sources_of(dump: Dump, tables: Sequence[str] | None = None) -> list[Source]:
    """The tables of an open dump, or those of these names, as sources of a single process; chunks are compared with
    their checksums.
    """
    others = (names.candidates_name, names.gone_name)  # of which keys alone are there
    beside = {names.tensor_name(name(stored.table.name)) for stored in dump.tables.values() for name in others}
    everything = [stored for stored in dump.tables.values() if stored.table.name not in beside]
    chosen = everything if tables is None else [dump.table(name) for name in tables]
    return [Source(stored.table, stored.rows, _chunks_of(stored)) for stored in chosen]


def _chunks_of(stored: DumpTable) -> Callable[[int], Iterator[Rows]]:
    wanted = [stored.key, stored.weight]
    kept = stored.states.get((names.KEPT, SCORE))
    wanted += [] if kept is None else [kept]

    def chunks(_: int) -> Iterator[Rows]:
        for chunk, (first, end) in enumerate(stored.bounds.tolist()):
            buffers = [np.empty((end - first) * file.spec.row_bytes, np.uint8) for file in wanted]
            keys, weights, *scores = read(wanted, stored, Piece(chunk, first, end), False, buffers)
            states = {SCORE: scores[0]} if scores else {}
            yield Rows(to_int64(keys[:, 0], stored.key.file.path), weights, states)

    return chunks


def _plain(table: Table) -> str:
    return table.name.removesuffix(":0")


def _check(path: str, tables: Sequence[Table], choice: Choice) -> list[str]:
    if not tables:
        raise MismatchError("there are no tables to export")
    plain = [_plain(table) for table in tables]
    names.stems(plain)
    choice.check(path, tables)
    files.check_is_new(path)
    return plain


def _row_bytes(table: Table) -> int:
    return table.dimension * np.dtype(table.value_dtype).itemsize


def _chunks(source: Source) -> Iterator[Rows]:
    if source.rows:
        yield from source.chunks(max(1, _CHUNK_BYTES // _row_bytes(source.table)))


def _count(source: Source, choice: Choice, advance: Callable[[int], None]) -> int:
    if choice.takes_all(source.table):
        return source.rows
    count = 0
    for rows in _chunks(source):
        count += len(choice.of(rows).keys)
        advance(rows.weights.nbytes)
    return count


class _Layout:
    """Where the arrays of tables lie. rows: of each table, those of all ranks."""

    def __init__(self, tables: Sequence[Table], rows: Sequence[int], path: str, dtype: str) -> None:
        self.rows = list(rows)
        self.files: dict[str, tuple[bytes, int]] = {}  # below PATH, "" is PATH itself -> (its beginning, bytes)
        self._places: dict[tuple[int, str], tuple[str, int, int]] = {}  # -> (file, offset, bytes a row)
        arrays: list[tuple[int, str, archives.Description]] = []
        for number, (table, count) in enumerate(zip(tables, rows, strict=True)):
            stem = names.stem(_plain(table))
            arrays.append((number, "key", archives.Description(f"{stem}/key", np.dtype(np.int64), (count,))))
            shape = (count, table.dimension)
            arrays.append((number, "emb_vector", archives.Description(f"{stem}/emb_vector", np.dtype(dtype), shape)))
            if dtype == "int8":
                arrays.append((number, "scale", archives.Description(f"{stem}/scale", np.dtype(np.float32), (count,))))
        if path.endswith(ENDING):
            # The widest elements first, so that each array is aligned.
            arrays.sort(key=lambda entry: -entry[2].dtype.itemsize)
            begin = archives.safetensors_header([array for _, _, array in arrays], {"format": "sok-serving"})
            offset = len(begin)
            for number, name, array in arrays:
                self._places[number, name] = ("", offset, array.nbytes // max(1, array.shape[0]))
                offset += array.nbytes
            self.files[""] = (begin, offset)
        else:
            for number, name, array in arrays:
                self._places[number, name] = (array.name, 0, array.nbytes // max(1, array.shape[0]))
                self.files[array.name] = (b"", array.nbytes)

    def place(self, table: int, array: str, row: int) -> tuple[str, int]:
        """(file, offset) of a row of an array."""
        file, offset, row_bytes = self._places[table, array]
        return file, offset + row * row_bytes


class _Temporary:
    """What becomes PATH: made on rank 0, written by all; removed unless `commit` has happened."""

    def __init__(self, path: str, group: Group, layout: _Layout) -> None:
        self._target, self._group, self._layout = path, group, layout
        self._path = ""
        self._open: dict[str, int] = {}

    def __enter__(self) -> "_Temporary":
        made = f"{self._target}.sok-tmp-{secrets.token_hex(8)}" if self._group.rank == 0 else ""
        try:
            # A path need not be text.
            chosen = agree(self._group, lambda: self._create(made) if made else None)[0]
            self._path = os.fsdecode(bytes.fromhex(chosen))
        except BaseException:
            self._path = made
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._remove()

    def _create(self, path: str) -> str:
        with storage_errors(self._target, "make its files"):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            for name, (begin, size) in self._layout.files.items():
                file = self._join(path, name)
                os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
                with open(file, "xb") as out:
                    out.write(begin)
                    out.truncate(size)
        return os.fsencode(path).hex()

    @staticmethod
    def _join(path: str, name: str) -> str:
        return os.path.join(path, name) if name else path

    def write(self, name: str, array: Array, offset: int) -> None:
        """Writes at an offset of a file."""
        with storage_errors(self._join(self._target, name), f"write {array.nbytes} bytes"):
            if name not in self._open:
                if len(self._open) >= _MOST_OPEN:
                    self.sync()
                self._open[name] = os.open(self._join(self._path, name), os.O_WRONLY | os.O_CLOEXEC)
            files.write_at(self._open[name], files.byte_view(array), offset)

    def sync(self) -> None:
        """What this rank has written is on the disk afterwards, and its files are closed."""
        with storage_errors(self._target, "sync to disk"):
            for name in list(self._open):
                os.fsync(self._open[name])
                os.close(self._open.pop(name))

    def commit(self) -> None:
        """Rank 0 gives it the name PATH."""

        def rename() -> None:
            if self._group.rank != 0:
                return
            with storage_errors(self._target, "put it in place"):
                folders = {os.path.dirname(self._join(self._path, name)) for name in self._layout.files}
                for folder in sorted(folders | {self._path} if os.path.isdir(self._path) else ()):
                    _sync_folder(folder)
                os.rename(self._path, self._target)
                _sync_folder(os.path.dirname(self._target) or ".")

        agree(self._group, rename)

    def _remove(self) -> None:
        if self._group.rank == 0 and self._path:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._path) if os.path.isdir(self._path) else os.unlink(self._path)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(
    source: Source,
    choice: Choice,
    layout: _Layout,
    number: int,
    first: int,
    temporary: _Temporary,
    advance: Callable[[int], None],
) -> None:
    row = first
    for rows in _chunks(source):
        chosen = choice.of(rows)
        for name, array in _encoded(chosen, choice.dtype, source.table.name).items():
            file, offset = layout.place(number, name, row)
            temporary.write(file, array, offset)
        row += len(chosen.keys)
        advance(rows.weights.nbytes)


def _encoded(rows: Rows, dtype: str, table: str) -> dict[str, Array]:
    """The arrays of some rows, by name."""
    arrays = {"key": np.ascontiguousarray(rows.keys, np.int64)}
    if dtype == "float32":
        arrays["emb_vector"] = np.ascontiguousarray(rows.weights, np.float32)
        return arrays
    if dtype == "float16":
        with np.errstate(over="ignore"):
            arrays["emb_vector"] = np.ascontiguousarray(rows.weights, np.float16)
        _check_finite(arrays["emb_vector"], rows, dtype, table)
        return arrays
    _check_finite(rows.weights, rows, dtype, table)
    arrays["emb_vector"], arrays["scale"] = quantized(rows.weights)
    return arrays


def quantized(rows: Array) -> tuple[Array, Array]:
    """(q [n, dimension] int8, s [n] float32) of finite rows: |x - q s| <= s / 2 for each element x of a row."""
    exact = rows.astype(np.float64)
    least = np.abs(exact).max(axis=1, initial=0.0) / _LARGEST_INT8
    scale = least.astype(np.float32)
    # Rounded up, so that no element is beyond 127 scales: also where the scale is a denormal number, or would be 0.
    scale = np.where(scale < least, np.nextafter(scale, np.float32(math.inf)), scale)
    quotients = exact / np.where(scale > 0, scale, 1).astype(np.float64)[:, None]
    return np.rint(quotients).astype(np.int8), scale


def _check_finite(values: Array, rows: Rows, dtype: str, table: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if wrong.size:
        raise MismatchError(
            f"table {table!r}: the row of key {int(rows.keys[wrong[0]])} has an element that {dtype} does not hold",
            expected="finite rows within its range",
        )
