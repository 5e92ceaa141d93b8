# SPDX-License-Identifier: Apache-2.0
"""How far a training is: a bar on a terminal, a line now and then elsewhere, or a file that another process shows.

A launcher such as horovodrun gives its ranks pipes, on which no bar can be drawn. Rank 0 then writes its state to a
file (`FileReporter`), and whoever started the launcher draws the bar from it (`Follower`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tqdm import tqdm

_LOG_SECONDS = 10.0
_FILE_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class State:
    """Where a training is: `step` of `steps` (None: unknown) of a `phase` ("train", "valid")."""

    phase: str
    step: int
    steps: int | None
    loss: float
    samples_per_second: float
    reading: float
    """The part of the time in which a batch was waited for."""


class Reporter(Protocol):
    """Is told after every step."""

    def report(self, state: State) -> None:
        """Shows the state, or not, if it has just shown another."""

    def close(self) -> None:
        """The training is over."""


class Silent:
    """The reporter of all ranks but the first."""

    def report(self, state: State) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Bar:
    """A tqdm bar for each phase; nothing where stderr is not a terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._phase = ""
        self._bar: tqdm | None = None

    def report(self, state: State) -> None:
        """Moves the bar."""
        if self._bar is not None and state.phase != self._phase:
            # The last state of a phase may have been replaced by the next phase's before anybody read it.
            self._bar.update((self._bar.total or self._bar.n) - self._bar.n)
            self.close()
        if self._bar is None:
            self._phase = state.phase
            title = f"{self._title} {state.phase}"
            self._bar = tqdm(
                total=state.steps, desc=title, disable=None, mininterval=0.1, bar_format=_bar_format(state)
            )
        self._bar.set_postfix_str(_numbers(state), refresh=False)
        self._bar.update(state.step - self._bar.n)

    def close(self) -> None:
        """Leaves the bar of the last phase as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Lines:
    """A line every ten seconds and at the end of a phase of known length."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._last = time.monotonic()

    def report(self, state: State) -> None:
        """Prints, if the last line is old enough."""
        now = time.monotonic()
        if now - self._last < _LOG_SECONDS and state.step != state.steps:
            return
        self._last = now
        of = "" if state.steps is None else f"/{state.steps}"
        print(f"{self._title} {state.phase}: step {state.step}{of}, {_numbers(state)}", flush=True)

    def close(self) -> None:
        """Does nothing."""


class FileReporter:
    """Keeps the latest state in a file, replaced as a whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last = 0.0

    def report(self, state: State) -> None:
        """Writes, if the last write is old enough."""
        now = time.monotonic()
        if now - self._last < _FILE_SECONDS and state.step != state.steps:
            return
        self._last = now
        new = self._file.with_name(self._file.name + ".new")
        new.write_text(json.dumps(dataclasses.asdict(state)))
        os.replace(new, self._file)

    def close(self) -> None:
        """Does nothing: the last state stays."""


class Follower:
    """Reads what a FileReporter of another process writes, and reports it here."""

    def __init__(self, file: Path, reporter: Reporter) -> None:
        self._file = file
        self._reporter = reporter

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.poll()
        self._reporter.close()

    def poll(self) -> None:
        """Reports the latest state, if there is one yet."""
        try:
            state = State(**json.loads(self._file.read_text()))
        except FileNotFoundError:
            return
        self._reporter.report(state)


def reporter_for(rank: int, title: str, file: Path | None) -> Reporter:
    """The reporter of a rank."""
    if rank != 0:
        return Silent()
    if file is not None:
        return FileReporter(file)
    return Bar(title) if sys.stderr.isatty() else Lines(title)


def _bar_format(state: State) -> str:
    # Without tqdm's own steps/s, which counts from the first state that it is told.
    if state.steps is None:
        return "{desc}: step {n_fmt} [{elapsed}{postfix}]"
    return "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def _numbers(state: State) -> str:
    return f"loss {state.loss:.4f}, {state.samples_per_second:,.0f} samples/s, reading {state.reading:.0%}"
