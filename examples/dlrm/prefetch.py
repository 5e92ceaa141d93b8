# SPDX-License-Identifier: Apache-2.0
"""Runs an iterator on a thread, a few items ahead of its consumer."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class _End:
    """Last item in the queue: the iterator is exhausted, or it raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """Iterates over `items`, of which up to `depth` wait ready. An exception of `items` is raised to the consumer.

    Use it in a `with` statement: leaving it, early or not, stops the thread.
    """

    def __init__(self, items: Iterable[T], depth: int = 4) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._items = items
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._finished:
            raise StopIteration
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self._finished = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the thread and waits until it has let go of the iterator. May be called twice."""
        self._finished = True
        self._stopped.set()
        # The thread may wait for room in the queue; each item taken out lets it see that it should stop.
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.01)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._produce()
        except BaseException as caught:  # whatever it is, the consumer must see it
            error = caught
        self._queue.put(_End(error))

    def _produce(self) -> None:
        iterator = iter(self._items)
        try:
            for item in iterator:
                self._queue.put(item)
                if self._stopped.is_set():
                    break
        finally:
            # A generator holds files open: close it on the thread that ran it.
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
