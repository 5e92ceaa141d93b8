# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libsok_core.so, once a process, and turns its statuses into Python exceptions.

Both framework frontends load the library here before they load their op libraries, so that the `NEEDED libsok_core.so`
of those is answered by the copy that is already in the process (the dynamic linker matches it by SONAME).
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

ABI_VERSION = 5
"""SOK_ABI_VERSION of the headers that this package was written against."""

PATH_VARIABLE = "SOK_CORE_LIBRARY"
"""Environment variable: the path of another libsok_core.so to load (a sanitizer build, for example)."""

# sok_status of core/include/sok/status.h. Numbers are part of the ABI.
OK = 0
INVALID_ARGUMENT = 1
OUT_OF_RANGE = 2
RESOURCE_EXHAUSTED = 3
FAILED_PRECONDITION = 4
UNIMPLEMENTED = 5
UNAVAILABLE = 6
INTERNAL = 7

EXCEPTIONS: dict[int, type[Exception]] = {
    INVALID_ARGUMENT: ValueError,
    OUT_OF_RANGE: IndexError,
    RESOURCE_EXHAUSTED: MemoryError,
    FAILED_PRECONDITION: RuntimeError,
    UNIMPLEMENTED: NotImplementedError,
    UNAVAILABLE: OSError,
    INTERNAL: SystemError,
}
"""What `check` raises for each status that is not OK."""

_BUILD_HINT = (
    "Install the package (`pip install .`) or, in a source checkout, build the core with "
    "`python tools/build.py core` (needs g++, cmake and ninja). "
    f"To load a library from elsewhere set {PATH_VARIABLE} to its path."
)

_lock = threading.Lock()


def path() -> pathlib.Path:
    """The absolute path of the library that `load` opens: $SOK_CORE_LIBRARY, or the one built into this package."""
    override = os.environ.get(PATH_VARIABLE)
    if override:
        return pathlib.Path(override).expanduser().resolve()
    return pathlib.Path(__file__).resolve().parents[1] / "lib" / "libsok_core.so"


def load() -> ctypes.CDLL:
    """Loads libsok_core.so at the first call and returns the same handle ever after.

    Raises:
      ImportError: there is no such file, the dynamic linker refuses it, or it speaks another version of the C ABI.
    """
    with _lock:
        return _load_once()


@functools.cache
def _load_once() -> ctypes.CDLL:
    file = path()
    if not file.is_file():
        raise ImportError(f"the compiled core of sparse_operation_kit is missing: no file {file}. {_BUILD_HINT}")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise ImportError(f"{file} cannot be loaded: {error}. {_BUILD_HINT}") from error
    try:
        library.sok_abi_version.restype = ctypes.c_int
        library.sok_last_error_message.restype = ctypes.c_char_p
        library.sok_status_name.restype = ctypes.c_char_p
        library.sok_status_name.argtypes = [ctypes.c_int]
        version = library.sok_abi_version()
    except AttributeError as error:
        raise ImportError(f"{file} is not a libsok_core: {error}. {_BUILD_HINT}") from error
    if version != ABI_VERSION:
        raise ImportError(
            f"{file} speaks version {version} of the C interface of the core, this package version {ABI_VERSION}: "
            f"the two come from different builds. {_BUILD_HINT}"
        )
    return library


def load_ops(
    file: pathlib.Path,
    title: str,
    version: str,
    load_library: Callable[[str], Any],
    failures: tuple[type[Exception], ...] = (OSError,),
) -> Any:
    """Loads a frontend's op library, after the core, which it needs and finds by its SONAME.

    Args:
      file: the library; beside it, with the suffix .built_for, is the version of the framework it was compiled for.
      title, version: of the framework in this process.
      load_library: the framework's function for it, whose result is returned.
      failures: what that raises where the library does not fit.

    Raises:
      ImportError: there is no such file, it was compiled for another series of the framework, or it cannot be loaded.
    """
    load()
    hint = (
        f"Build it for this one: `pip install --no-build-isolation .` in the sources of this package or, in a checkout "
        f"that is installed editable, `python tools/build.py {file.stem.removeprefix('libsok_')}`."
    )
    if not file.is_file():
        raise ImportError(f"the {title} ops of sparse_operation_kit are missing: no file {file}. {hint}")
    record = file.with_suffix(".built_for")
    built_for = record.read_text().strip() if record.is_file() else ""
    if built_for and built_for.split(".")[:2] != version.split(".")[:2]:
        raise ImportError(f"{file} was compiled for {title} {built_for}, and this is {title} {version}. {hint}")
    try:
        return load_library(str(file))
    except failures as error:
        raise ImportError(f"{file} cannot be loaded by {title} {version}: {error}. {hint}") from error


def check(status: int) -> None:
    """Raises the exception of `status` with the core's message; does nothing for OK.

    A status that this package does not know is a SystemError: the library is newer than the package.
    """
    if status == OK:
        return
    library = load()
    message = (library.sok_last_error_message() or b"").decode("utf-8", "replace")
    if status not in EXCEPTIONS:
        raise SystemError(f"libsok_core returned the unknown status {status}: {message}")
    name = (library.sok_status_name(status) or b"").decode()
    raise EXCEPTIONS[status](message or name)
