# SPDX-License-Identifier: Apache-2.0
"""dump_async(): a dump of the rows as they are now, which a thread writes while they change.

What all ranks do together is done by the call and by `wait`. The thread only writes this rank's rows.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from .group import Group, SingleProcess, agree
from .progress import bar
from .source import Source
from .tables import Optimizer
from .writer import CHUNK_BYTES, Options, Session

_POLL_SECONDS = 0.1


def dump_async(
    path: str | os.PathLike[str],
    sources: Sequence[Source],
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    extra: Any = None,
    group: Group | None = None,
    frontend: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: bool | None = None,
    check: Callable[[str], None] | None = None,
) -> PendingDump:
    """Copies all ranks' rows to memory, and begins to write them to directory `path`. Called by every rank of `group`.

    Parameters are those of `dump`, and all but an error of writing is raised here. `sources` are not used afterwards.
    RuntimeError where a dump to `path` is pending already. check("wait") raises where `wait` cannot run.
    """
    options = Options(optimizer, step, extra, frontend, chunk_bytes)
    session = Session(path, sources, options, group or SingleProcess())
    try:
        with bar("copy", session.num_bytes, session.group.rank, progress) as advance:
            session.copy_rows(advance)
        return PendingDump(session, progress, check)
    except BaseException:
        session.close()
        raise


class PendingDump:
    """A dump whose rows are copied, and written by a thread. It is not at its path before `wait`; until then what was
    there stays. One that nobody waits for is given up with a RuntimeWarning, when this object goes or the process ends.
    """

    def __init__(self, session: Session, progress: bool | None, check: Callable[[str], None] | None) -> None:
        self._session, self._progress, self._check = session, progress, check
        self._writer = _Writer(session)
        self._given_up = weakref.finalize(self, _give_up, self._writer, os.getpid())
        self._is_over = False
        self._error: BaseException | None = None
        self._writer.start()

    @property
    def path(self) -> str:
        """Where the dump will be."""
        return self._session.path

    def done(self) -> bool:
        """Whether this rank has written its rows, or failed to: `wait` then waits for other ranks alone."""
        return not self._writer.is_alive()

    def wait(self) -> None:
        """Waits until the rows of all ranks are written, and puts the dump in place. Called by every rank, once in
        the same order as other calls of all ranks; again it ends as it did. All ranks raise when one does, what `dump`
        would; what was at the path is then still there, whole.
        """
        if self._is_over:
            if self._error is not None:
                raise self._error
            return
        if self._check is not None:
            self._check("wait")
        self._join()
        session = self._session
        try:
            session.finish(agree(session.group, self._writer.outcome.result))
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._is_over = True
            self._given_up.detach()
            session.close()

    def _join(self) -> None:
        """Shows the progress meanwhile: before, the bar would be in the way of what training prints."""
        if self.done():
            return
        with bar("dump", self._session.num_bytes, self._session.group.rank, self._progress) as advance:
            shown = 0
            while self._writer.is_alive():
                self._writer.join(_POLL_SECONDS)
                written = self._writer.written
                advance(written - shown)
                shown = written


class _GivenUp(Exception):
    """Ends the thread."""


class _Writer(threading.Thread):
    """Writes this rank's rows. outcome: what Session.write returned or raised; written: bytes so far."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="sok_dump", daemon=True)
        self.session = session
        self.outcome: Future[dict[str, str]] = Future()
        self.written = 0
        self._is_given_up = False

    def run(self) -> None:
        """See threading.Thread."""
        try:
            self.outcome.set_result(self.session.write(self._advance))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # of copies of rows
            self.outcome.set_exception(error)
        if self._is_given_up:
            self.session.close()

    def give_up(self) -> None:
        """Ends soon, and leaves nothing."""
        self._is_given_up = True
        if threading.current_thread() is not self:  # whose garbage collection may call this
            self.join()
            self.session.close()

    def _advance(self, count: int) -> None:
        self.written += count
        if self._is_given_up:
            raise _GivenUp


def _give_up(writer: _Writer, process: int) -> None:
    if os.getpid() != process:  # a fork has a copy of all objects, but the dump is not its own
        return
    writer.give_up()
    warnings.warn(
        f"the dump to {writer.session.path} is given up: nobody called wait() of what dump_async returned",
        RuntimeWarning,
        stacklevel=2,
    )
