# SPDX-License-Identifier: Apache-2.0
"""benchmarks.whole_step: both frameworks train the same model on the same batches."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = "--table-rows 100 --embedding-dim 8 --batch-size 64 --precisions float32 --repeat 3 --rounds 2 --output"


def loss(framework, environment):
    command = [sys.executable, "-m", "benchmarks.whole_step", framework, *OPTIONS.split(), ""]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return float(re.search(r"'loss': ([0-9.]+)", done.stdout)[1])


@pytest.mark.slow
def test_the_losses_are_the_same():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_torchrun = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    torch, tensorflow = loss("torch", of_torchrun), loss("tensorflow", {"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert torch == pytest.approx(tensorflow, rel=1e-5)
    assert torch != pytest.approx(0.6931, abs=1e-6)  # it has trained
