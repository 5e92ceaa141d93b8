# SPDX-License-Identifier: Apache-2.0
"""A progress bar of bytes, where a person may be watching."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _ignore(_: int) -> None:
    pass


@contextmanager
def bar(what: str, total: int, rank: int, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes the bytes done since its last call.

    show: True or False; None shows on rank 0 of a terminal. Without tqdm nothing is shown.
    """
    if show is None:
        show = rank == 0 and sys.stderr.isatty()
    if not show or total <= 0:
        yield _ignore
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield _ignore
        return
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what) as shown:

        def advance(count: int) -> None:
            shown.update(count)

        yield advance
