# SPDX-License-Identifier: Apache-2.0
"""From a reader to what a model takes: the next batches are read, and copied to its GPU, during a step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from .prefetch import Prefetch
from .processes import ReadingProcesses
from .reader import Reader

_AHEAD = 2
"""Batches that wait ready for the model, on its GPU if it has one."""
_MOST_PROCESSES = 16

B = TypeVar("B")
P = TypeVar("P")


class Feed(Generic[P]):
    """Iterates over what `prepare` makes of a reader's batches. `seconds` is how long they were waited for, `waited`
    how long the latest was.

    prepare: called on a thread of its own; what it returns must not share memory with the batch. processes: 0 reads on
    that thread too. gpu: the number of the GPU that batches are copied to. Use it in a `with` statement.
    """

    def __init__(
        self, reader: Reader[Any, B], prepare: Callable[[B], P], *, processes: int = 0, gpu: int | None = None
    ) -> None:
        self.seconds = self.waited = 0.0
        self._stack = contextlib.ExitStack()
        batches: Iterable[B] = reader
        if processes:
            batches = self._stack.enter_context(ReadingProcesses(reader, processes, gpu))
        self._prepared = self._stack.enter_context(Prefetch(_prepared(batches, prepare), depth=_AHEAD))

    def __enter__(self) -> Feed[P]:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        start = time.perf_counter()
        try:
            return next(self._prepared)
        finally:
            self.waited = time.perf_counter() - start
            self.seconds += self.waited


def processes_for(gpu: int | None, ranks_of_host: int) -> int:
    """How many processes a rank should read with: on a CPU none, since its cores are busy."""
    if gpu is None:
        return 0
    cores = len(os.sched_getaffinity(0)) // ranks_of_host
    return max(1, min(_MOST_PROCESSES, cores - 2))  # the trainer, and the thread that prepares


def _prepared(batches: Iterable[B], prepare: Callable[[B], P]) -> Iterator[P]:
    iterator = iter(batches)
    try:
        for batch in iterator:
            yield prepare(batch)
    finally:
        # A generator holds files open: it is closed on the thread that ran it.
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
