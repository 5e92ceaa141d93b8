# SPDX-License-Identifier: Apache-2.0
"""dump(): every rank writes its share of every file, at its own offsets; rank 0 writes the manifest last.

A rank pulls chunks from its source, hands the writes to threads and computes the digests meanwhile, so that disk,
checksum and source overlap. It holds at most `_DEPTH` chunks.
"""

import concurrent.futures
import contextlib
import copy
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from .. import _version
from . import files, manifest, names
from .errors import MismatchError, StorageError, storage_errors
from .group import Group, SingleProcess, agree
from .manifest import Manifest
from .progress import bar
from .replace import Replacement
from .source import Array, Source, copied
from .tables import Layout, Optimizer, StoredTable, Table, chunk_rows

CHUNK_BYTES = 8 << 20
_MAX_DIGESTS = 1 << 18  # 8 MiB of manifest; larger dumps get larger chunks
_DEPTH = 3
_THREADS = 2
_COPY_THREADS = 4  # most of the time of a copy is the kernel's, which finds its memory
_MAX_WAITING = 128  # files that are open until they are synced
_SYNC_THREADS = 8  # a file system commits syncs that wait together at once: 400 small files in 0.1 s instead of 3 s
_LAYOUT_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def dump(
    path: str | os.PathLike[str],
    sources: Sequence[Source],
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    extra: Any = None,
    group: Group | None = None,
    frontend: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: bool | None = None,
) -> None:
    """Writes a dump of all ranks' rows to directory `path`, replacing a dump that is there. Called by every rank of
    `group`.

    sources:      this rank's rows, the same tables in the same order on every rank
    optimizer, step, extra, frontend:  for the manifest; rank 0's count
    chunk_bytes:  how much of a file is read, hashed and written at once; at most 64 MiB
    progress:     see progress.bar

    All ranks raise when one does, and the dump that was at `path` is then still there, whole. TableNameError,
    MismatchError (ranks disagree, a source yields other rows than it said), NoSpaceError and StorageError, PeerError.
    """
    options = Options(optimizer, step, extra, frontend, chunk_bytes)
    with contextlib.closing(Session(path, sources, options, group or SingleProcess())) as session:
        with bar("dump", session.num_bytes, session.group.rank, progress) as advance:
            digests = agree(session.group, lambda: session.write(advance))
        session.finish(digests)


@dataclass(frozen=True)
class Options:
    """Those of `dump`."""

    optimizer: Optimizer | None = None
    step: int | None = None
    extra: Any = None
    frontend: str | None = None
    chunk_bytes: int = CHUNK_BYTES


def _agree_on_layouts(
    sources: Sequence[Source], optimizer: Optimizer | None, group: Group, chunk_bytes: int
) -> list[tuple[Table, Layout]]:
    def describe() -> Any:
        if not 0 < chunk_bytes <= manifest.MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be in [1, {manifest.MAX_CHUNK_BYTES}]")
        names.stems(source.table.name for source in sources)
        if optimizer is not None:
            names.check_optimizer(optimizer.name)
        for source in sources:
            source.table.check()
            if source.table.optimizer not in (None, optimizer.name if optimizer else None):
                raise ValueError(
                    f"table {source.table.name!r} has states of {source.table.optimizer}, "
                    f"but the dump's optimizer is {optimizer.name if optimizer else None}"
                )
        return [[manifest.table_to_json(source.table), source.rows] for source in sources]

    everyone = agree(group, describe)
    for rank, others in enumerate(everyone):
        if [entry[0] for entry in others] != [entry[0] for entry in everyone[0]]:
            raise MismatchError(
                f"ranks 0 and {rank} dump different tables: "
                f"{_difference([entry[0] for entry in everyone[0]], [entry[0] for entry in others])}",
                expected="the same variables and optimizer, in the same order, on every rank",
            )
    result = []
    size = chunk_bytes
    while True:
        for index, source in enumerate(sources):
            parts = tuple(others[index][1] for others in everyone)
            result.append((source.table, Layout(parts, chunk_rows(source.table, sum(parts), size))))
        count = sum(layout.num_chunks * len(list(table.files())) for table, layout in result)
        if count <= _MAX_DIGESTS or 2 * size > manifest.MAX_CHUNK_BYTES:
            return result
        result.clear()
        size *= 2


def _difference(first: list[Any], second: list[Any]) -> str:
    for one, other in zip(first, second, strict=False):
        if one != other:
            members = [member for member in one if one[member] != other.get(member)]
            return f"{one['name']!r} and {other['name']!r} differ in {', '.join(members)}"
    return f"{len(first)} and {len(second)} tables"


def _join(layouts: list[tuple[Table, Layout]], digests: list[Any]) -> list[StoredTable]:
    """The ranks' digests, one after another: parts lie in rank order."""
    return [
        StoredTable(
            table,
            layout,
            {file.name: b"".join(bytes.fromhex(rank[file.name]) for rank in digests) for file in table.files()},
        )
        for table, layout in layouts
    ]


class Session:
    """One dump, from the first agreement of the ranks to its place at `path`. All but `write` is called by every rank.

    num_bytes: of this rank's rows.
    """

    def __init__(self, path: str | os.PathLike[str], sources: Sequence[Source], options: Options, group: Group) -> None:
        """Checks everything; rank 0 makes the temporary directory and every file in its full size, the others open
        it.
        """
        self.path, self.group = os.fspath(path), group
        self._sources, self._options = list(sources), options
        self._key = os.path.realpath(self.path), group.rank
        self._replacement: Replacement | None = None
        self._directory: files.Directory | None = None
        agree(group, self._check)
        self._layouts = _agree_on_layouts(sources, options.optimizer, group, options.chunk_bytes)
        self.num_bytes = sum(file.row_bytes * source.rows for source in sources for file in source.table.files())
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        manifest.check_user_data(self._options.optimizer, self._options.step, self._options.extra)
        if self._key in _pending:
            raise RuntimeError(f"a dump to {self.path} is being written; call its wait() before the next one")
        self._options = copy.deepcopy(self._options)  # it is JSON data, which is the caller's to change

    def _prepare(self) -> None:
        def create() -> str | None:
            if self.group.rank != 0:
                return None
            self._replacement = Replacement(self.path)
            self._create_files(self._replacement.fd, self._replacement.temporary_path)
            return os.fsencode(self._replacement.name).hex()  # a path need not be text

        name = os.fsdecode(bytes.fromhex(agree(self.group, create)[0]))
        folder = os.path.dirname(os.path.realpath(self.path))

        def enter() -> None:
            self._directory = files.Directory(os.path.join(folder, name))

        agree(self.group, enter)

    def copy_rows(self, advance: Callable[[int], None]) -> None:
        """Copies this rank's rows to memory: from now on `write` does not ask the sources, and no other dump of this
        process may go to the path.
        """

        def copy_tables() -> None:
            with ThreadPoolExecutor(_COPY_THREADS) as pool:
                for index, (_, layout) in enumerate(self._layouts):
                    source = self._sources[index]
                    self._sources[index] = copied(source, layout.chunk_rows, layout.rows, pool, advance)

        agree(self.group, copy_tables)
        _pending[self._key] = self

    def _create_files(self, directory: int, path: str) -> None:
        for table, layout in self._layouts:
            for file in table.files():
                with storage_errors(os.path.join(path, file.name), f"make a file of {file.size(layout.rows)} bytes"):
                    fd = os.open(file.name, _LAYOUT_FLAGS | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=directory)
                    try:
                        files.write_at(fd, file.header.encode(), 0)
                        os.ftruncate(fd, file.size(layout.rows))
                    finally:
                        os.close(fd)

    def write(self, advance: Callable[[int], None]) -> dict[str, str]:
        """Writes and syncs this rank's rows, in any thread; returns the digests in hexadecimal, by file name."""
        assert self._directory is not None
        digests: dict[str, str] = {}
        with ThreadPoolExecutor(_THREADS) as pool, ThreadPoolExecutor(_SYNC_THREADS) as syncs:
            waiting: deque[Future[None]] = deque()
            try:
                for source, (_, layout) in zip(self._sources, self._layouts, strict=True):
                    if source.rows == 0 and self.group.rank != 0:
                        digests.update(dict.fromkeys((file.name for file in source.table.files()), ""))
                        continue
                    while len(waiting) > _MAX_WAITING:
                        waiting.popleft().result()
                    part = _Part(source, layout, self.group.rank, self._directory, pool, advance)
                    try:
                        digests.update(part.write())
                    finally:
                        waiting.extend(part.sync_and_close(syncs))
                for future in waiting:
                    future.result()
            finally:
                concurrent.futures.wait(waiting)
        return digests

    def finish(self, digests: list[Any]) -> None:
        """Rank 0 writes the manifest and puts the dump in place; digests: what `write` returned on each rank."""
        options, writer = self._options, {"name": "sparse_operation_kit", "version": _version.__version__}
        if options.frontend is not None:
            writer["frontend"] = options.frontend
        content = Manifest(
            tables=_join(self._layouts, digests),
            world_size=self.group.size,
            optimizer=options.optimizer,
            step=options.step,
            extra=options.extra,
            writer=writer,
        )

        def commit() -> None:
            if self._replacement is None:
                return
            self._check_complete(self._replacement)
            path = os.path.join(self._replacement.temporary_path, names.MANIFEST)
            data = manifest.encode(content)
            with storage_errors(path, f"write {len(data)} bytes"):
                flags = _LAYOUT_FLAGS | os.O_CREAT | os.O_EXCL
                fd = os.open(names.MANIFEST, flags, 0o666, dir_fd=self._replacement.fd)
                try:
                    files.write_at(fd, data, 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
            self._replacement.commit()

        agree(self.group, commit)

    def _check_complete(self, replacement: Replacement) -> None:
        """Where locks do not reach other hosts, a dump there may have taken this one's directory for a leftover."""
        lacking = {file.name for table, _ in self._layouts for file in table.files()} - set(os.listdir(replacement.fd))
        if lacking:
            file = os.path.join(replacement.temporary_path, min(lacking))
            raise StorageError("was removed while the dump was being written", file=file, number=errno.ENOENT)

    def close(self) -> None:
        """Removes what is left, if `finish` did not happen the dump itself; once."""
        if _pending.get(self._key) is self:
            del _pending[self._key]
        self._sources.clear()
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()
        if self._replacement is not None:
            self._replacement.close()


_pending: dict[tuple[str, int], Session] = {}
"""By path and rank: dumps of this process that are put in place later, while something else goes on."""


class _Part:
    """This rank's part of one table: open files, offsets, digests."""

    def __init__(
        self,
        source: Source,
        layout: Layout,
        rank: int,
        directory: files.Directory,
        pool: ThreadPoolExecutor,
        advance: Callable[[int], None],
    ) -> None:
        self._source, self._layout, self._pool, self._advance = source, layout, pool, advance
        self._files = list(source.table.files())
        self._first = sum(layout.parts[:rank])
        self._path = directory.path
        self._fds: list[int] = []
        self._hashers = [xxhash.xxh3_128() for _ in self._files]
        self._digests: list[list[str]] = [[] for _ in self._files]
        self._lock = threading.Lock()
        try:
            for file in self._files:
                with storage_errors(directory.join(file.name), "open for writing"):
                    self._fds.append(os.open(file.name, _LAYOUT_FLAGS, dir_fd=directory.fd))
        except BaseException:
            self._close()
            raise

    def write(self) -> Mapping[str, str]:
        pending: deque[list[Future[None]]] = deque()
        try:
            for done, arrays in self._source.arrays(self._layout.chunk_rows, self._layout.rows):
                while len(pending) >= _DEPTH:
                    _wait(pending.popleft())
                pending.append(
                    [self._pool.submit(self._store, index, array, done) for index, array in enumerate(arrays)]
                )
                self._hash(arrays, done)
            while pending:
                _wait(pending.popleft())
        finally:
            # The files are closed next: no write may be under way then.
            concurrent.futures.wait([future for futures in pending for future in futures if not future.cancel()])
        return {file.name: "".join(digests) for file, digests in zip(self._files, self._digests, strict=True)}

    def _store(self, index: int, array: Array, row: int) -> None:
        file = self._files[index]
        offset = file.size(self._first + row)
        with storage_errors(os.path.join(self._path, file.name), f"write {array.nbytes} bytes"):
            files.write_at(self._fds[index], files.byte_view(array), offset)
        with self._lock:
            self._advance(array.nbytes)

    def _hash(self, arrays: list[Array], row: int) -> None:
        """Adds rows to the digests; a digest ends after each chunk_rows rows of this part and at its end."""
        size, end = self._layout.chunk_rows, row + len(arrays[0])
        while row < end:
            stop = min(end, (row // size + 1) * size)
            for index, array in enumerate(arrays):
                first = row - end + len(array)
                self._hashers[index].update(files.byte_view(array[first : first + stop - row]))
                if stop % size == 0 or stop == self._source.rows:
                    self._digests[index].append(self._hashers[index].hexdigest())
                    self._hashers[index].reset()
            row = stop

    def sync_and_close(self, pool: ThreadPoolExecutor) -> list[Future[None]]:
        """Starts the syncs; a table's files may be as large as the disk is slow, so the next table need not wait."""
        fds, self._fds = self._fds, []
        return [pool.submit(self._sync, file.name, fd) for file, fd in zip(self._files, fds, strict=True)]

    def _sync(self, name: str, fd: int) -> None:
        try:
            with storage_errors(os.path.join(self._path, name), "sync to disk"):
                os.fsync(fd)
        finally:
            os.close(fd)

    def _close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _wait(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()
