# SPDX-License-Identifier: Apache-2.0
"""Starts programs, those of several ranks as users do, for the suites that need them.

What the ranks print is told apart: horovodrun passes it on line by line, and torchrun, whose ranks would write into one
pipe, in pieces where Python does not buffer, is told to keep it in files. A launcher that takes too long is ended with
its ranks, so that a hang is a failed test and not a hanging one.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile


def program(name):
    """The path of a launcher: beside this Python, or else where PATH finds it."""
    beside = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=beside)
    assert found, f"{name} is not installed beside {sys.executable}"
    return found


def horovodrun(num_ranks, arguments, timeout=600, **options):
    """(exit status, output) of `python ARGUMENTS` on each rank; options as those of `run`."""
    command = [sys.executable, program("horovodrun"), "-np", str(num_ranks), sys.executable, *map(str, arguments)]
    return run(command, timeout, **options)


def torchrun(num_ranks, arguments, timeout=600, **options):
    """(exit status, output) of `python ARGUMENTS` on each rank, one rank's output after the other."""
    with tempfile.TemporaryDirectory() as logs:
        start = ["--standalone", f"--nproc-per-node={num_ranks}", "--redirects=3", f"--log-dir={logs}"]
        command = [sys.executable, program("torchrun"), *start, *map(str, arguments)]
        try:
            status, output = run(command, timeout, **options)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_printed(logs)}") from None
        return status, _printed(logs) + output


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
    with tempfile.TemporaryFile() as output:
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
