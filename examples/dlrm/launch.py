# SPDX-License-Identifier: Apache-2.0
"""Starts a trainer on several ranks, shows its progress, and says why it failed."""

from __future__ import annotations

import collections
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import DataError
from .failure import reason_file
from .options import to_arguments
from .progress import Bar, Follower
from .settings import Training
from .training import Metrics, read_metrics

_POLL_SECONDS = 0.2
_TAIL_LINES = 40


class TrainerFailed(RuntimeError):
    """A trainer ended with an error."""


def status(demo: Callable[[], int]) -> int:
    """The exit status that a demo returns, or that of how it failed, with the reason printed."""
    try:
        return demo()
    except (DataError, FileExistsError, TrainerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def command(launcher: str, num_ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs a module on so many ranks of this machine, by "horovodrun", "torchrun" or "workers",
    which starts those of a MultiWorkerMirroredStrategy; one rank needs none of them."""
    program = ["-m", module, *arguments]
    if num_ranks == 1:
        return [sys.executable, *program]
    if launcher == "torchrun":
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        return [sys.executable, *start, *program]
    start = [_horovodrun()] if launcher == "horovodrun" else [sys.executable, "-m", "examples.workers"]
    return [*start, "-np", str(num_ranks), sys.executable, *program]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A module that trains, what starts its ranks, and its title in what is printed."""

    title: str
    launcher: str
    module: str

    def train(self, num_ranks: int, told: Training, out: Path, name: str, note: str = "") -> Metrics:
        """Runs it, with NAME.log and NAME.json in the directory `out`. Raises TrainerFailed."""
        metrics, progress = out / f"{name}.json", out / f"{name}.progress"
        metrics.unlink(missing_ok=True)
        told = dataclasses.replace(told, metrics=metrics, progress=progress)
        ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
        print(f"{self.title}: starting {ranks}{note}", file=sys.stderr, flush=True)
        arguments = command(self.launcher, num_ranks, self.module, to_arguments(told))
        run(self.title, arguments, out / f"{name}.log", progress)
        return read_metrics(metrics)


def run(title: str, arguments: Sequence[str], log: Path, progress: Path) -> None:
    """Runs a command with its output in the file `log` and the state that it keeps in the file `progress` as a bar.

    Raises TrainerFailed with the reason that a trainer has given, or else with the end of its output. Whatever ends
    this function early ends the command and all that it started.
    """
    reason = reason_file(progress)
    for file in (progress, reason):
        file.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=_root(),
            start_new_session=True,
        )
        try:
            with Follower(progress, Bar(title)) as follower:
                while process.poll() is None:
                    follower.poll()
                    time.sleep(_POLL_SECONDS)
        finally:
            end(process)
    progress.unlink(missing_ok=True)
    if reason.exists():
        raise TrainerFailed(f"{title}: {reason.read_text()}\n(all that was printed: {log})")
    if process.returncode != 0:
        with log.open(errors="replace") as lines:
            tail = "".join(collections.deque(lines, _TAIL_LINES))
        raise TrainerFailed(f"{title} ended with status {process.returncode}; see {log}, which ends with:\n{tail}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the command's process group, politely at first: a launcher then ends its ranks."""
    for signal_number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, signal_number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _horovodrun() -> str:
    beside = Path(sys.executable).parent / "horovodrun"
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise TrainerFailed("horovodrun not found: run `python tools/install_horovod.py`")
    return found


def _root() -> Path:
    """The directory from which `examples` is importable."""
    return Path(__file__).resolve().parents[2]
