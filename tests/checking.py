# SPDX-License-Identifier: Apache-2.0
"""Checks that a worker runs on every rank, one after the other: each is told apart, and one that fails ends no other.

The worker calls `run`. Each rank says when a check begins, and of a failed one where and why at once. When all ranks
have come to its end they agree whether it passed, and go on with the next. They meet in a folder that TEST_FOLDER
names, not through an exchange, which may be what failed. Where a rank failed and another does not come, since it waits
for what the failed one did not send, nobody can go on: the job ends there. The test reads from the folder how each
check ended, by `ended`, also after a hang.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import signal
import time
import traceback
from collections.abc import Callable, Sequence

PATIENCE = 30.0
"""Seconds from the news that a check failed on one rank until the ranks that have not ended it are given up."""


def _say(rank: int, text: str) -> None:
    print(f"{text} (rank {rank})", flush=True)


class _Meeting:
    """What the ranks tell each other: empty files, whose names are what they say."""

    def __init__(self, folder: pathlib.Path, rank: int, num_ranks: int) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks

    def tell(self, number: int, news: str) -> None:
        (self._folder / f"{number}.{self._rank}.{news}").touch()

    def _which(self, number: int, news: str) -> set[int]:
        return {r for r in range(self._num_ranks) if (self._folder / f"{number}.{r}.{news}").exists()}

    def agree(self, number: int) -> tuple[bool, list[int]]:
        """Whether a check passed on all ranks; and those that do not come to its end."""
        deadline = None
        while True:
            # In this order: who is in neither when both are read has not ended it.
            failed, passed = self._which(number, "failed"), self._which(number, "passed")
            missing = sorted(set(range(self._num_ranks)) - failed - passed)
            if not missing:
                return not failed, []
            if failed:
                deadline = deadline or time.monotonic() + PATIENCE
                if time.monotonic() > deadline:
                    return False, missing
            time.sleep(0.01)


def run(
    names: Sequence[str],
    find: Callable[[str], Callable[[], None]],
    rank: int,
    num_ranks: int,
    recover: Callable[[], None],
) -> bool:
    """Runs the checks on this rank; returns whether all of them passed everywhere.

    Args:
      names: of the checks, the same on all ranks.
      find: the function of a name.
      recover: called on all ranks after a check failed.

    Without TEST_FOLDER a failing check raises, as in a program of a user.
    """
    faulthandler.register(signal.SIGTERM, chain=True)  # who is ended while it hangs says where
    folder = os.environ.get("TEST_FOLDER")
    meeting = None if folder is None else _Meeting(pathlib.Path(folder), rank, num_ranks)
    all_passed = True
    for number, name in enumerate(names):
        start = time.monotonic()
        _say(rank, f"begins {name}")
        if meeting is None:
            find(name)()
            _say(rank, f"passed {name} in {time.monotonic() - start:.1f} s")
            continue
        meeting.tell(number, "begun")
        try:
            find(name)()
        except Exception:
            _say(rank, f"failed {name} after {time.monotonic() - start:.1f} s:\n{traceback.format_exc()}")
            meeting.tell(number, "failed")
        else:
            meeting.tell(number, "passed")
        passed, missing = meeting.agree(number)
        if missing:
            _say(rank, f"stopped in {name}: it failed, and ranks {missing} do not come to its end")
            os._exit(1)
        if passed:
            _say(rank, f"passed {name} in {time.monotonic() - start:.1f} s")
        else:
            all_passed = False
            recover()
    return all_passed


def ended(folder: pathlib.Path, names: Sequence[str]) -> dict[str, str]:
    """For each check "passed", or how else it ended; read by the test after the job."""
    found: dict[str, dict[str, list[int]]] = {name: {"begun": [], "passed": [], "failed": []} for name in names}
    for path in folder.iterdir():
        number, rank, news = path.name.split(".")
        found[names[int(number)]][news].append(int(rank))
    result = {}
    for name, news in found.items():
        begun, passed, failed = (sorted(news[key]) for key in ("begun", "passed", "failed"))
        inside = sorted(set(begun) - set(passed) - set(failed))
        if not begun:
            result[name] = "not reached"
        elif not failed and not inside:
            result[name] = "passed"
        else:
            what = (("failed on ranks", failed), ("not ended on ranks", inside))
            result[name] = ", ".join(f"{how} {ranks}" for how, ranks in what if ranks)
    return result
