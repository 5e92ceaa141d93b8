# SPDX-License-Identifier: Apache-2.0
"""The files of SparseOperationKit 1.x's Saver: two a table, in one folder.

    NAME_keys.file     the keys, int64 or uint32, each once
    NAME_values.file   their rows in the same order, float32

Little-endian, without a header. Which of the two the keys are, and how long a row is, their sizes say together with one
of the other two numbers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

import numpy as np

from .errors import FormatError, MissingFileError, SizeError, storage_errors
from .source import Array

KEYS, VALUES = "_keys.file", "_values.file"
KEY_DTYPES = ("int64", "uint32")

ROWS_AT_A_TIME = 1 << 16


def names(folder: str) -> list[str]:
    """The names of the tables in a folder; [] where it is none, or holds none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), storage_errors(folder, "list"):
        found = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        return sorted(
            file.removesuffix(KEYS)
            for file in found
            if file.endswith(KEYS) and file.removesuffix(KEYS) + VALUES in found
        )
    return []


class Files:
    """A table's files, whose sizes fit together.

    Attributes: rows, dimension, key_dtype ("int64" or "uint32").

    Args:
      folder, name: where they are.
      dimension: elements a row; None: what the sizes allow, where that is one number.

    Raises:
      MissingFileError: a file is not there.
      SizeError: a file is empty, or they do not fit together.
      FormatError: sizes that allow both key dtypes, without `dimension`.
    """

    def __init__(self, folder: str, name: str, dimension: int | None = None) -> None:
        self._keys, self._values = os.path.join(folder, name + KEYS), os.path.join(folder, name + VALUES)
        key_bytes, value_bytes = (_size(path) for path in (self._keys, self._values))
        fitting = {
            dtype: columns
            for dtype in KEY_DTYPES
            if (columns := _columns(key_bytes, value_bytes, np.dtype(dtype).itemsize))
            and columns == (dimension or columns)
        }
        if not fitting:
            raise SizeError(
                f"has {key_bytes} bytes, and {os.path.basename(self._values)} {value_bytes}",
                file=self._keys,
                expected="8 (int64) or 4 (uint32) bytes a row"
                + ("" if dimension is None else f" of {dimension} float32"),
            )
        if len(fitting) > 1 and not self._has_zero_words(key_bytes):
            raise FormatError(
                "may hold uint32 or int64 keys",
                file=self._keys,
                expected=f"a dimension, {fitting['uint32']} or {fitting['int64']}, to be named",
            )
        self.key_dtype, self.dimension = next(iter(fitting.items()))
        self.rows = key_bytes // np.dtype(self.key_dtype).itemsize

    def _has_zero_words(self, size: int) -> bool:
        """Whether two words of 4 bytes are 0, as no two of different uint32 keys are: small int64 keys have those."""
        words = np.memmap(self._keys, "<u4", "r", shape=(size // 4,))
        return bool(np.count_nonzero(words[: 1 << 20] == 0) > 1)

    def pieces(self, rows: int = ROWS_AT_A_TIME) -> Iterator[tuple[Array, Array]]:
        """(keys [n], values [n, dimension]) of about `rows` rows at a time, in the order of the files."""
        with contextlib.ExitStack() as stack:
            with storage_errors(self._keys, "open"):
                files = [stack.enter_context(open(path, "rb")) for path in (self._keys, self._values)]
            for first in range(0, self.rows, rows):
                count = min(rows, self.rows - first)
                keys = _read(files[0], self._keys, np.dtype(self.key_dtype), count)
                values = _read(files[1], self._values, np.dtype(np.float32), count * self.dimension)
                yield keys, values.reshape(count, self.dimension)

    def keys(self) -> Array:
        """All keys."""
        with storage_errors(self._keys, "open"), open(self._keys, "rb") as file:
            return _read(file, self._keys, np.dtype(self.key_dtype), self.rows)


def _size(path: str) -> int:
    try:
        with storage_errors(path, "open"):
            size = os.stat(path).st_size
    except OSError as error:
        if error.errno == 2:
            raise MissingFileError("is missing", file=path) from None
        raise
    if not size:
        raise SizeError("is empty", file=path)
    return size


def _columns(key_bytes: int, value_bytes: int, key_size: int) -> int:
    """Elements a row, 0 where the sizes do not divide."""
    rows, odd = divmod(key_bytes, key_size)
    return 0 if odd or not rows or value_bytes % (4 * rows) else value_bytes // (4 * rows)


def _read(file: IO[bytes], path: str, dtype: np.dtype[Any], count: int) -> Array:
    with storage_errors(path, "read"):
        data = file.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise SizeError("became shorter while it was read", file=path)
    return np.frombuffer(data, dtype.newbyteorder("<"))


class Writer:
    """Writes a table's files into a folder that exists; they appear when `commit` is called, or not at all.

    with Writer(folder, name, "int64") as writer:
        writer.append(keys, values)
        writer.commit()

    Raises StorageError for what the operating system refuses.
    """

    def __init__(self, folder: str, name: str, key_dtype: str) -> None:
        if os.path.basename(name) != name:
            raise FormatError(f"{name!r} cannot name files", file=folder, expected="a name without slashes")
        self._dtypes = (np.dtype(key_dtype).newbyteorder("<"), np.dtype("<f4"))
        self._paths = tuple(os.path.join(folder, name + ending) for ending in (KEYS, VALUES))
        ending = f".sok-tmp-{secrets.token_hex(8)}"
        self._temporary = tuple(path + ending for path in self._paths)
        self._files: list[IO[bytes]] = []
        try:
            for path, temporary in zip(self._paths, self._temporary, strict=True):
                with storage_errors(path, "write"):
                    self._files.append(open(temporary, "xb"))  # noqa: SIM115
        except BaseException:
            self.close()
            raise

    def append(self, keys: Array, values: Array) -> None:
        """More keys [n], and their rows [n, dimension]."""
        for file, path, array, dtype in zip(self._files, self._paths, (keys, values), self._dtypes, strict=True):
            with storage_errors(path, "write"):
                file.write(np.ascontiguousarray(array, dtype).tobytes())

    def commit(self) -> None:
        """Puts the files in place of those that were there."""
        for file, path in zip(self._files, self._paths, strict=True):
            with storage_errors(path, "write"):
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in zip(self._paths, self._temporary, strict=True):
            with storage_errors(path, "replace"):
                os.replace(temporary, path)
        self.close()

    def close(self) -> None:
        """Gives up what was not committed."""
        for file in self._files:
            file.close()
        for temporary in self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
