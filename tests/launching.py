# SPDX-License-Identifier: Apache-2.0
"""Starts programs, those of several ranks as users do, for the suites that need them.

What the ranks print is told apart: horovodrun passes it on line by line, and torchrun, whose ranks would write into one
pipe, in pieces where Python does not buffer, is told to keep it in files. A launcher that takes too long is ended with
its ranks, so that a hang is a failed test and not a hanging one. With SOK_TEST_LOGS=FOLDER what is printed is also kept
there, in a file a launch: it stands there while the launch runs, and when the tests themselves are ended.
"""

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import checking
import pytest

_numbers = itertools.count(1)


def need_gpus(num_ranks, found):
    """Skips the test without a GPU for each rank, unless NCCL (2.30 and newer) has been told that ranks share them."""
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if found < (1 if shares else num_ranks):
        pytest.skip(f"needs {num_ranks} GPUs, or NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30")


def program(name):
    """The path of a launcher: beside this Python, or else where PATH finds it."""
    beside = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=beside)
    assert found, f"{name} is not installed beside {sys.executable}"
    return found


def horovodrun(num_ranks, arguments, timeout=600, hosts=None, **options):
    """(exit status, output) of `python ARGUMENTS` on each rank; options as those of `run`.

    hosts: "name:ranks,name:ranks"; names of this machine need no ssh. None: all ranks on one host.
    """
    where = [] if hosts is None else ["-H", hosts]
    start = [sys.executable, program("horovodrun"), "-np", str(num_ranks), *where]
    return run([*start, sys.executable, *map(str, arguments)], timeout, **options)


def strategy_run(num_ranks, arguments, timeout=600, **options):
    """The same on the workers of a MultiWorkerMirroredStrategy."""
    starter = pathlib.Path(__file__).resolve().parents[1] / "examples" / "workers.py"
    command = [sys.executable, starter, "-np", str(num_ranks), sys.executable, *map(str, arguments)]
    return run(command, timeout, **options)


def checks(num_ranks, worker, names, timeout=1800, start=horovodrun, **variables):
    """The output of a worker that runs checks on each rank by `checking`; AssertionError that says how each ended.

    timeout: 60 checks of 4 ranks take 150 s alone on two cores, 290 beside other tests; on a slow host 600 are too few.
    """
    with tempfile.TemporaryDirectory() as folder:
        late = ""
        try:
            status, output = start(num_ranks, [worker, *names], timeout, TEST_FOLDER=folder, **variables)
        except AssertionError as error:
            status, output, late = 1, str(error), "ended by the test, "
        ends = checking.ended(pathlib.Path(folder), names)
    if status == 0 and set(ends.values()) == {"passed"}:
        return output
    lines = [f"  {name}: {end}" for name, end in ends.items() if end != "passed"]
    raise AssertionError("\n".join([f"{late}exit status {status}; what did not pass:", *lines, output]))


def torchrun(num_ranks, arguments, timeout=600, place=("--standalone",), **options):
    """(exit status, output) of `python ARGUMENTS` on each rank, one rank's output after the other.

    place: torchrun's options that say where its ranks meet.
    """
    with _folder() as logs:
        start = [*place, f"--nproc-per-node={num_ranks}", "--redirects=3", f"--log-dir={logs}"]
        command = [sys.executable, program("torchrun"), *start, *map(str, arguments)]
        try:
            status, output = run(command, timeout, **options)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_printed(logs)}") from None
        return status, _printed(logs) + output


def torchrun_on_hosts(num_hosts, num_ranks, arguments, timeout=600, place=(), **options):
    """[(exit status, output)] of `num_hosts` torchruns of `num_ranks` ranks each, as every host would start its own."""
    with socket.socket() as port, concurrent.futures.ThreadPoolExecutor(num_hosts) as pool:
        # Bound, without listening, so that nobody else is given this port.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{port.getsockname()[1]}"
        meet = (f"--nnodes={num_hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", *place)
        hosts = [pool.submit(torchrun, num_ranks, arguments, timeout, meet, **options) for _ in range(num_hosts)]
        return [host.result() for host in hosts]


def _printed(logs):
    """What the ranks printed, one after the other."""
    files = sorted(pathlib.Path(logs).rglob("*.log"))
    return "".join(file.read_text(errors="replace") for file in files)


def run(command, timeout, cwd=None, **variables):
    """(exit status, output) of a command with its standard error in its output; AssertionError when it takes too long.

    One thread a rank, and few messages of TensorFlow; variables: more of the environment, None: less of it.
    """
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment = {**os.environ, **quiet, **variables}
    with _file() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={name: value for name, value in environment.items() if value is not None},
            start_new_session=True,
        )
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert not late, f"not done after {timeout} s: {' '.join(map(str, command))}\n{text}"
    return process.returncode, text


@contextlib.contextmanager
def _file():
    """A file for what a launch prints."""
    kept = _kept()
    with tempfile.TemporaryFile() if kept is None else open(f"{kept}.log", "w+b") as file:
        yield file


@contextlib.contextmanager
def _folder():
    """A folder for what the ranks of a launch print."""
    kept = _kept()
    if kept is None:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    else:
        os.mkdir(kept)
        yield kept


def _kept():
    """A path in the folder of SOK_TEST_LOGS, named after the test that runs; None without that variable."""
    folder = os.environ.get("SOK_TEST_LOGS")
    if folder is None:
        return None
    os.makedirs(folder, exist_ok=True)
    # pytest says FILE::test[parameters] (call).
    test = os.environ.get("PYTEST_CURRENT_TEST", "launch").split("::")[-1].split(" ")[0]
    name = re.sub(r"[^\w.-]+", "_", test).strip("_")
    return os.path.join(folder, f"{name}-{os.getpid()}-{next(_numbers)}")


def _end(process):
    """Ends the command's process group, politely at first: a launcher then ends its ranks."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
