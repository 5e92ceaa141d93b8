# SPDX-License-Identifier: Apache-2.0
"""How fast a training is, and its losses, which a GPU computes some steps later than they are asked for."""

from __future__ import annotations

import time
from typing import SupportsFloat


class Speed:
    """Counts rows and seconds from when it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._end: float | None = None
        self._paused = self._waited = 0.0
        self._rows = 0

    def trained(self, rows: int) -> None:
        """A step was taken."""
        self._rows += rows

    def waited(self, seconds: float) -> None:
        """A batch was waited for."""
        self._waited += seconds

    def pause(self, seconds: float) -> None:
        """Something else was done, which does not count."""
        self._paused += seconds

    def stop(self) -> None:
        """Ends it."""
        self._end = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of training."""
        return max((self._end or time.perf_counter()) - self._start - self._paused, 1e-9)

    @property
    def per_second(self) -> float:
        """Rows."""
        return self._rows / self.seconds

    @property
    def reading(self) -> float:
        """The part of the seconds in which a batch was waited for."""
        return self._waited / self.seconds


_MOST_PENDING = 16


class Losses:
    """Sums of the losses of each step's rows. They are looked at some steps later, all at once: in TensorFlow to look
    at one means to wait for all that a GPU has been given, and then it has nothing to do until the next step comes.
    """

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._pending: list[tuple[SupportsFloat, int]] = []
        self.latest = float("nan")
        """The mean loss of a step's rows, of the latest that was looked at."""

    def add(self, total: SupportsFloat, rows: int) -> None:
        """Of the next step."""
        if len(self._pending) >= (_MOST_PENDING if self._sums else 1):
            self.wait()
        self._pending.append((total, rows))

    def wait(self) -> list[float]:
        """All of them."""
        for total, rows in self._pending:
            self._sums.append(float(total))
            self.latest = self._sums[-1] / max(rows, 1)
        self._pending.clear()
        return self._sums
