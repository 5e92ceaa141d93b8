# SPDX-License-Identifier: Apache-2.0
"""Arrays that are too large to be sure of memory for them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def folder_of(path: str | os.PathLike[str]) -> str:
    """The directory that `path` is in, for files beside it. TypeError for what is no path."""
    return os.path.dirname(os.path.abspath(os.fspath(path)))


def on_disk(folder: str | None) -> Callable[[tuple[int, ...]], Array]:
    """What makes arrays of float32 in files in `folder` (None: where temporary files go) that nobody else sees and that
    go with them; it raises OSError where the disk is full.
    """

    def make(shape: tuple[int, ...]) -> Array:
        size = 4 * int(np.prod(shape))
        if not size:
            return np.zeros(shape, np.float32)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, np.float32, "r+", shape=shape)

    return make


def in_memory(shape: tuple[int, ...]) -> Array:
    """An array of float32."""
    return np.empty(shape, np.float32)
