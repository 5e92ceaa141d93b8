# SPDX-License-Identifier: Apache-2.0
"""Rows of a dynamic table in files of a local disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from .checkpoint.errors import NoSpaceError, StorageError, storage_errors
from .row_store import Array, RowStore

_SIGN = np.uint64(1 << 63)
_KEY_BYTES = 8


class DiskStore(RowStore):
    """Records in files of a local disk, by LMDB: ``pip install 'sparse-operation-kit[store]'``.

    Changes are transactions, so a process that is killed leaves the store as it was between two of them. They reach the
    disk when the system likes, or with `flush`: where the host itself goes down, what is there later may be of no use.
    A table's rows are in memory too, so what one run leaves is never a whole table for the next: `sok.dump` is.

    Args:
      path: a directory of its own for each table and rank; made where it is not there.
      existing: what to do where an earlier run has left a store there. "refuse": FileExistsError; "clear": begin anew;
        "keep": open it, to look at what it holds (a table takes an empty store alone).
      max_bytes: the most that it may take; addresses are reserved for them, no memory and no disk.

    Raises:
      ModuleNotFoundError: LMDB is not installed.
      FileExistsError: see `existing`; BlockingIOError: another store, of any process, has the directory open.
      ValueError: another `existing`, or used after `close`.
      sparse_operation_kit.checkpoint.StorageError (an OSError), and of these NoSpaceError: what the disk refuses.
    """

    def __init__(self, path: str | os.PathLike[str], *, existing: str = "refuse", max_bytes: int = 1 << 40) -> None:
        if existing not in ("refuse", "clear", "keep"):
            raise ValueError(f'existing is {existing!r}; it must be "refuse", "clear" or "keep"')
        try:
            import lmdb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "sok.DiskStore needs LMDB: python -m pip install 'sparse-operation-kit[store]', or lmdb", name="lmdb"
            ) from error
        self.path = os.fspath(path)
        self._lmdb, self._environment = lmdb, None
        with storage_errors(self.path, "make the directory"):
            os.makedirs(self.path, exist_ok=True)
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock()
            file = os.path.join(self.path, "data.mdb")
            if existing == "refuse" and os.path.exists(file):
                raise FileExistsError(
                    f"{self.path} has a store of an earlier run, whose table is gone: give another path, or "
                    'DiskStore(path, existing="clear")'
                )
            if existing == "clear":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)
            with self._errors("open"):
                # One process and one call at a time, as the lock of the directory and the table say: no lock of LMDB's.
                # Files are not mapped for writing, or a full disk would end the process.
                options = {"sync": False, "metasync": False, "lock": False, "readahead": False}
                self._environment = lmdb.open(self.path, map_size=max_bytes, **options)
        except BaseException:
            os.close(self._folder)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                error.errno, f"{self.path} is open as the store of a table: each table and each rank has its own"
            ) from None

    def read(self, keys: Array) -> tuple[Array, Array]:
        """See RowStore."""
        order = np.argsort(keys)
        with self._errors("read"), self._begin(buffers=True) as transaction, transaction.cursor() as cursor:
            found = cursor.getmulti(_encoded(keys[order]))
            names, values = b"".join(name for name, _ in found), b"".join(value for _, value in found)
        is_there = np.zeros(len(keys), np.bool_)
        if not found:
            return is_there, np.zeros((0, 0), np.uint8)
        places = order[np.searchsorted(keys[order], _decoded(names))]
        is_there[places] = True
        records = np.frombuffer(values, np.uint8).reshape(len(found), -1)
        return is_there, records[np.argsort(places)]

    def write(self, keys: Array, records: Array) -> None:
        """See RowStore."""
        order = np.argsort(keys)
        values, size = np.ascontiguousarray(records[order], np.uint8).tobytes(), records.shape[1]
        pieces = (values[first : first + size] for first in range(0, len(values), size))
        with self._errors("write"), self._begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(zip(_encoded(keys[order]), pieces, strict=True))

    def erase(self, keys: Array) -> None:
        """See RowStore."""
        with self._errors("write"), self._begin(write=True) as transaction:
            for key in _encoded(np.sort(keys)):
                transaction.delete(key)

    def keys(self, size: int) -> Iterator[Array]:
        """See RowStore: ascending."""
        after = b""
        while True:
            with self._errors("read"), self._begin() as transaction, transaction.cursor() as cursor:
                found = []
                if cursor.set_range(after):
                    for key in cursor.iternext(keys=True, values=False):
                        found.append(key)
                        if len(found) == size:
                            break
            if not found:
                return
            after = found[-1] + b"\0"
            yield _decoded(b"".join(found))

    def size(self) -> int:
        """See RowStore."""
        with self._errors("read"), self._begin() as transaction:
            return int(transaction.stat()["entries"])

    def flush(self) -> None:
        """See RowStore: on the disk."""
        with self._errors("sync to disk"):
            self._open().sync(True)

    def close(self) -> None:
        """See RowStore. A second call does nothing."""
        if self._environment is not None:
            self._environment.close()
            os.close(self._folder)
            self._environment = None

    def _open(self) -> Any:
        if self._environment is None:
            raise ValueError(f"the store {self.path} is closed")
        return self._environment

    def _begin(self, **options: Any) -> Any:
        return self._open().begin(**options)

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (self._lmdb.MapFullError, self._lmdb.DiskError) as error:
            raise NoSpaceError(f"cannot {action}: {error}", file=self.path) from error
        except self._lmdb.Error as error:
            raise StorageError(f"cannot {action}: {error}", file=self.path) from error


def _encoded(keys: Array) -> Iterator[bytes]:
    """Keys as bytes of the same order."""
    text = (keys.astype(np.int64).view(np.uint64) ^ _SIGN).astype(">u8").tobytes()
    return (text[first : first + _KEY_BYTES] for first in range(0, len(text), _KEY_BYTES))


def _decoded(text: bytes) -> Array:
    return (np.frombuffer(text, ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)
