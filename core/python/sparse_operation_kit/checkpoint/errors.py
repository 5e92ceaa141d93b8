# SPDX-License-Identifier: Apache-2.0
"""Everything that this package raises on purpose.

    CheckpointError
    |-- TableNameError        ValueError          a table's name cannot name a file, or two tables' names collide
    |-- MismatchError         ValueError          dump and variables do not fit: dimension, dtype, rows, optimizer
    |-- FormatError           ValueError          a file is not what the format demands of it
    |   |-- ManifestError                         sok_manifest.json: too large, not strict JSON, wrong members
    |   |-- HeaderError                           the 296 bytes at the head of a file
    |   |-- SizeError                             too short, too long, does not divide
    |   |-- ChecksumError                         right size, wrong bytes
    |   |-- KeysError                             keys out of range, repeated, missing
    |   `-- MissingFileError  FileNotFoundError   listed or required, not there
    |-- StorageError          OSError             the file system refused; errno is kept
    |   `-- NoSpaceError                          no space, quota or file size limit
    `-- PeerError             RuntimeError        another rank failed; its message is repeated

Each has `file` (path or name of the file at fault, or None) and `expected` (what should have been there, or None), and
its message holds both.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(Exception):
    """Base of the tree."""

    def __init__(self, problem: str, *, file: str | None = None, expected: str | None = None) -> None:
        self.problem = problem
        self.file = file
        self.expected = expected
        message = problem if file is None else f"{file}: {problem}"
        super().__init__(message if expected is None else f"{message}; expected {expected}")

    def __str__(self) -> str:
        # OSError formats itself from errno and strerror; the message given here says more.
        return str(self.args[0])


class TableNameError(CheckpointError, ValueError):
    """A table's name cannot name a file, or two names give the same file."""


class MismatchError(CheckpointError, ValueError):
    """The dump is sound, but it is not a dump of these variables."""


class FormatError(CheckpointError, ValueError):
    """A file is not what the format demands of it."""


class ManifestError(FormatError):
    """`sok_manifest.json` is not a manifest that this version reads."""


class HeaderError(FormatError):
    """The header of a file does not say what the file must be."""


class SizeError(FormatError):
    """A file is shorter or longer than it must be."""


class ChecksumError(FormatError):
    """A file has the right size and the wrong bytes."""


class KeysError(FormatError):
    """The keys of a table are out of range, repeated or incomplete."""


class MissingFileError(FormatError, FileNotFoundError):
    """A file that must be there is not."""


class StorageError(CheckpointError, OSError):
    """The operating system refused; `errno` says why."""

    def __init__(self, problem: str, *, file: str | None = None, expected: str | None = None, number: int = 0) -> None:
        super().__init__(problem, file=file, expected=expected)
        self.errno = number or None


class NoSpaceError(StorageError):
    """No space, quota or file size limit left."""


class PeerError(CheckpointError, RuntimeError):
    """Another rank failed."""


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def storage_errors(file: str, action: str) -> Iterator[None]:
    """Turns an OSError of the body into a StorageError that names `file` and `action`."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number else str(error)
        kind = NoSpaceError if number in _NO_SPACE else StorageError
        raise kind(f"cannot {action}: {reason}", file=file, number=number) from error
