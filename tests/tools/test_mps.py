# SPDX-License-Identifier: Apache-2.0
"""tools/mps.py with a control program that writes down what it is asked for."""

import os
import pathlib
import subprocess
import sys

import pytest

CONTROL = """#!/bin/sh
echo "$@ $(test "$1" = -d || cat) $CUDA_VISIBLE_DEVICES" >> {log}
number="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if test "$1" = -d; then
  sleep 300 > /dev/null 2>&1 &
  echo $! > "$number"
else
  test {status} != 0 || kill $(cat "$number")
  exit {status}
fi
"""
SHOW = """
import os
for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PIPE_DIRECTORY"):
    print(os.environ.get(name))
raise SystemExit(3)
"""


def install(folder, monkeypatch, status=0):
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(log=folder / "log", status=status))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def run(mps, capfd):
    assert mps.main(["--share", "6", sys.executable, "-c", SHOW]) == 3
    return capfd.readouterr().out.split()


def test_clients_see_the_gpu_of_the_service(mps, tmp_path, monkeypatch, capfd):
    install(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    gpu, share, pipe = run(mps, capfd)
    assert (gpu, share) == ("0", "6") and not pathlib.Path(pipe).exists()
    assert [line.split() for line in (tmp_path / "log").read_text().splitlines()] == [["-d", "3"], ["quit", "3"]]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_service_that_does_not_quit_is_killed(mps, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, status=1)
    with mps.service(50) as environment:
        number = pathlib.Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) / "nvidia-cuda-mps-control.pid"
        process = int(number.read_text())
        os.kill(process, 0)
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    assert state.stdout.strip() in ("", "Z")


def test_without_the_service(mps, monkeypatch, capfd):
    monkeypatch.setattr(mps.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run(mps, capfd)[-3:] == ["None", "None", "None"]


def test_arguments(mps):
    for arguments in (["--share", "6"], ["--share", "0", "true"], ["--share", "101", "true"], ["true"]):
        with pytest.raises(SystemExit):
            mps.main(arguments)
