# SPDX-License-Identifier: Apache-2.0
"""How fast a training is, and its losses, which a GPU computes a step later than they are asked for."""

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


class Losses:
    """Sums of the losses of each step's rows. The latest one is not looked at yet, so that a GPU can be given the next
    step meanwhile."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._pending: tuple[SupportsFloat, int] | None = None
        self.latest = float("nan")
        """The mean loss of a step's rows, of the last but one."""

    def add(self, total: SupportsFloat, rows: int) -> None:
        """Of the next step."""
        self.wait()
        self._pending = total, rows

    def wait(self) -> list[float]:
        """All of them."""
        if self._pending is not None:
            total, rows = self._pending
            self._pending = None
            self._sums.append(float(total))
            self.latest = self._sums[-1] / max(rows, 1)
        return self._sums
