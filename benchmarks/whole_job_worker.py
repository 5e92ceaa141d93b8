# SPDX-License-Identifier: Apache-2.0
"""The processes of a subject of benchmarks.whole_job: as many as ranks, each told what to do over a connection.

`python -m benchmarks.whole_job_worker NAME SOCKET` is one of them; `Workers` starts them and talks to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.whole_job_data import Job
from examples.dlrm import launch
from examples.dlrm.feed import Feed, processes_for
from examples.dlrm.pace import Losses, Speed

IN_MEMORY = 8
"""Batches that are trained with in turn."""
_COMPILING = 6
_LAUNCHERS = {"torch": "torchrun", "torchrec": "torchrun", "tensorflow": "horovodrun"}
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Order:
    """What the processes of a subject are to do."""

    job: Job
    ranks: int
    steps: int


class Workers:
    """The processes of a subject. What they answer is put together: the slowest rank's times, the mean loss."""

    def __init__(self, name: str, order: Order) -> None:
        self._connections: list[Connection] = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
            place = os.path.join(folder, "socket")  # in a folder that is this user's alone
            server.bind(place)
            server.listen(order.ranks)
            server.settimeout(_POLL_SECONDS)
            self._process = subprocess.Popen(
                launch.command(_LAUNCHERS[name], order.ranks, "benchmarks.whole_job_worker", [name, place]),
                cwd=pathlib.Path(__file__).resolve().parents[1],
                env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            while len(self._connections) < order.ranks and self._process.poll() is None:
                with contextlib.suppress(TimeoutError):
                    self._connections.append(Connection(server.accept()[0].detach()))
        self._all_there = len(self._connections) == order.ranks
        self._send(order)

    def ask(self, source: str) -> dict[str, Any]:
        """The figures of a turn; {"missing": reason} if a process ended."""
        self._send(source)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What all ranks have said, or why one says nothing."""
        answers = []
        for connection in self._connections if self._all_there else []:
            try:
                answers.append(connection.recv())
            except (EOFError, OSError):
                break
        missing = [answer["missing"] for answer in answers if "missing" in answer]
        if missing or not answers or len(answers) < len(self._connections):
            return {"missing": missing[0] if missing else "a process broke down"}
        return combined(answers)

    def end(self) -> None:
        """Waits for the processes, or ends them."""
        self._send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)
        launch.end(self._process)
        for connection in self._connections:
            connection.close()

    def _send(self, message: Any) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.send(message)


def combined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the ranks' figures: all ranks wait for the slowest, and each has its part of the batch."""
    how: dict[str, Callable[[list[Any]], Any]] = {
        "samples_per_second": min,
        "step_ms": max,
        "waiting": max,
        "loss": statistics.fmean,
    }
    return {key: how.get(key, lambda values: values[0])([each[key] for each in answers]) for key in answers[0]}


def _timed(
    subject: Any, batches: Iterator[Any], waited: Callable[[], float], job: Job, warm_up: int, steps: int
) -> dict[str, float]:
    """Of `steps` steps after the first ones. waited: seconds so far in which a batch was waited for."""
    own_rows = job.batch_size // subject.num_ranks
    totals, losses = subject.train(batches), Losses()
    for total in itertools.islice(totals, warm_up):
        losses.add(total, own_rows)
    losses.wait()
    speed, before = Speed(), waited()
    for total in itertools.islice(totals, steps):
        losses.add(total, own_rows)
        speed.trained(job.batch_size)
    losses.wait()
    speed.stop()
    speed.waited(waited() - before)
    return {
        "samples_per_second": speed.per_second,
        "step_ms": 1e3 * speed.seconds / steps,
        "waiting": speed.reading,
        "loss": losses.latest,
    }


def _serve(connection: Connection, name: str, order: Order) -> None:
    job, steps = order.job, order.steps
    try:
        subject = importlib.import_module(f"benchmarks.subjects.whole_job_{name}").Subject(job)
    except ImportError as error:
        connection.send({"missing": str(error)})
        return
    place = {"rank": subject.rank, "num_ranks": subject.num_ranks}
    processes = job.readers or processes_for(subject.gpu, subject.num_ranks)
    warm_up = _COMPILING + 4 * processes
    connection.send({"version": subject.version, "gpu": subject.gpu, "processes": processes})
    batches = [subject.prepare(batch) for batch in job.reader(IN_MEMORY, **place)]
    while (source := connection.recv()) is not None:
        if source == "memory":
            found = _timed(subject, itertools.cycle(batches), lambda: 0.0, job, warm_up, steps)
        else:
            reader = job.reader(warm_up + steps + 8, **place)  # a pipeline takes some ahead
            with Feed(reader, subject.prepare, processes=processes, gpu=subject.gpu) as feed:
                found = _timed(subject, feed, lambda: feed.seconds, job, warm_up, steps)
        connection.send(found)


def main() -> None:
    name, place = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place)
        with Connection(client.detach()) as connection:
            _serve(connection, name, connection.recv())


if __name__ == "__main__":
    main()
