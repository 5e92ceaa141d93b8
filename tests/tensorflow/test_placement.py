# SPDX-License-Identifier: Apache-2.0
"""Tables on one device and ids on another: eagerly, in functions and in tf.compat.v1 graphs."""

import pathlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_two_devices():
    """In a process of its own, which has two CPUs."""
    worker = pathlib.Path(__file__).parent / "placement_worker.py"
    run = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0 and "PLACED" in run.stdout, run.stdout + run.stderr
