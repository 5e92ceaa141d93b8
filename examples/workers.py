# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of a MultiWorkerMirroredStrategy on this machine, as horovodrun starts those of Horovod:

    python -m examples.workers -np 2 python train.py --data demo/data

Each worker finds its place in TF_CONFIG and sees one GPU, where there are some. When one ends with an error the others
are ended too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
"""What the others have, when one has failed, to say what they see of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is that of the first worker that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, required=True, metavar="N", help="the number of workers", dest="count")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each of them runs")
    settings = parser.parse_args(arguments)
    if settings.count < 1 or not settings.command:
        parser.error("it takes at least one worker, and a command")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the workers below
    return start(settings.count, settings.command)


def start(count: int, command: Sequence[str]) -> int:
    """Runs `count` workers until all have ended; whatever ends this function early ends them."""
    # The ports stay bound here, without listening, until the end: nobody else is given one of them, and who asks for
    # one by its number, as a worker does, may have it.
    ports = [socket.socket() for _ in range(count)]
    for port in ports:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
    cluster = {"worker": [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            place = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            own = {"TF_CONFIG": json.dumps(place), "CUDA_VISIBLE_DEVICES": gpus[index] if index < len(gpus) else ""}
            workers.append(subprocess.Popen(command, env={**os.environ, **own}))
        return _wait(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for port in ports:
            port.close()


def _wait(workers: list[subprocess.Popen[bytes]]) -> int:
    """The exit status of the first worker that failed, when all have ended or have been given time to."""
    failed, deadline = 0, float("inf")
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        if not failed:
            failed = next((worker.returncode for worker in workers if worker.returncode), 0)
            deadline = time.monotonic() + _GRACE_SECONDS if failed else deadline
        time.sleep(_POLL_SECONDS)
    failed = failed or next((worker.returncode for worker in workers if worker.returncode), 0)
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main())
