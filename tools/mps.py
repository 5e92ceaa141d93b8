#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a command whose processes use one GPU at the same time, by CUDA's Multi-Process Service, and not in turns.

    python tools/mps.py --share 6 COMMAND [ARGUMENT ...]

The GPU is the first of CUDA_VISIBLE_DEVICES. Each process sees so many percent of its multiprocessors, and all
processes together should see no more than there are: a cooperative kernel (eviction, rows in two memories) starts when
all of its blocks have room, and where several processes each took the whole GPU under racecheck they stood still.

Where the service is not installed the command runs without it. Exit status: that of the command.
https://docs.nvidia.com/deploy/mps
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def service(share: int) -> Iterator[dict[str, str]]:
    """The service for the block, and the environment in which processes are its clients."""
    control = shutil.which(CONTROL)
    if control is None:
        print(f"{CONTROL} is not on PATH: processes take turns on the GPU", flush=True)
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        subprocess.run([control, "-d"], env=environment, check=True)
        try:
            # Clients count among the GPUs that the service sees.
            yield {**environment, "CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
        finally:
            try:
                subprocess.run([control], env=environment, input=b"quit\n", check=True, timeout=30)
            except (subprocess.SubprocessError, OSError):  # a client was killed, say
                _kill(pathlib.Path(folder) / f"{CONTROL}.pid")


def _kill(path: pathlib.Path) -> None:
    """The process whose number the file has."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(path.read_text()), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, required=True, metavar="PERCENT", help="of the multiprocessors, a process")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    if not args.command or not 1 <= args.share <= 100:
        parser.error("a command, and a share from 1 to 100")
    with service(args.share) as environment:
        return subprocess.run(args.command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
