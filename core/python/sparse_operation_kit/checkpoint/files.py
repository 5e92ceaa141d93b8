# SPDX-License-Identifier: Apache-2.0
"""Directories and files as the reader and writer use them: relative to an open directory, never through a symbolic
link.
"""

import errno
import os
import resource
import stat
from types import TracebackType
from typing import Any

import numpy as np

from .errors import FormatError, MissingFileError, SizeError, StorageError, storage_errors

# Reads of this size ask the kernel for all of it at once: its own read-ahead is 128 KiB on many systems.
_ASK_AHEAD_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # not to hang on a FIFO


class Directory:
    """An open directory. Renaming or replacing its path does not change what it reads."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._files: list[OpenFile] = []
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingFileError("does not exist", file=path, expected="the directory of a dump") from None
        except NotADirectoryError:
            raise FormatError("is not a directory", file=path, expected="the directory of a dump") from None
        except OSError as error:
            raise StorageError(f"cannot open: {error.strerror}", file=path, number=error.errno or 0) from error

    def join(self, name: str) -> str:
        """The path of a file, for messages."""
        return os.path.join(self.path, name)

    def list(self) -> list[str]:
        with storage_errors(self.path, "list the directory"):
            return sorted(os.listdir(self.fd))

    def open(self, name: str) -> "OpenFile":
        """Opens a regular file for reading; it is closed with the directory."""
        path = self.join(name)
        try:
            fd = self._open(name)
        except FileNotFoundError:
            raise MissingFileError("is missing", file=path, expected="a file of the dump") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                what = "a symbolic link" if error.errno == errno.ELOOP else "a socket or device"
                raise FormatError(f"is {what}", file=path, expected="a regular file") from None
            raise StorageError(f"cannot open: {error.strerror}", file=path, number=error.errno or 0) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise FormatError("is not a regular file", file=path, expected="a regular file")
        file = OpenFile(fd, path, status.st_size)
        self._files.append(file)
        return file

    def _open(self, name: str) -> int:
        try:
            return os.open(name, _READ, dir_fd=self.fd)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        # A dump keeps its files open, so that a dump which replaces it meanwhile takes nothing away from a load.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20), hard)
        )
        return os.open(name, _READ, dir_fd=self.fd)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "Directory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class OpenFile:
    """A regular file open for reading: `path` for messages, `size` in bytes when it was opened."""

    def __init__(self, fd: int, path: str, size: int) -> None:
        self.fd, self.path, self.size = fd, path, size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fills `view` (bytes) from `offset`; SizeError when the file ends before."""
        done = 0
        with storage_errors(self.path, "read"):
            if len(view) >= _ASK_AHEAD_BYTES:
                os.posix_fadvise(self.fd, offset, len(view), os.POSIX_FADV_WILLNEED)
            while done < len(view):
                count = os.preadv(self.fd, [view[done:]], offset + done)
                if count == 0:
                    raise SizeError(
                        f"ends at byte {offset + done}", file=self.path, expected=f"{offset + len(view)} bytes at least"
                    )
                done += count

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def byte_view(array: "np.ndarray[Any, Any]") -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def check_is_new(path: str | os.PathLike[str], expected: str = "a new path") -> None:
    """Raises StorageError where something is at the path, a broken link too."""
    if os.path.lexists(path):
        raise StorageError("exists already", file=os.fspath(path), expected=expected)
