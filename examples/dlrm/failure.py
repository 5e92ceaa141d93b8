# SPDX-License-Identifier: Apache-2.0
"""Carries the reason of a failure from the rank that failed first to the process that started the launcher.

A launcher's output ends with its own traces and those of ranks that lost their peer; the reason is somewhere above.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .errors import DataError


def reason_file(progress: Path) -> Path:
    """Where the reason goes, beside the progress file."""
    return progress.with_suffix(".failure")


@contextlib.contextmanager
def reported(progress: Path | None) -> Iterator[None]:
    """Writes down the exception that leaves this context, unless another rank has written down its own before."""
    try:
        yield
    except Exception as error:
        if progress is not None:
            text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(FileExistsError), reason_file(progress).open("x") as file:
                file.write(text)
        raise
