# SPDX-License-Identifier: Apache-2.0
"""Runs the tests marked every_isa again for each instruction set that this machine has (SOK_CPU_ISA)."""

import os
import pathlib
import subprocess
import sys

import pytest

from sparse_operation_kit import core

LEVELS = ("baseline", "avx2", "avx512")
NAME = "from sparse_operation_kit import core; print(core.device_properties().name)"


def isa(value):
    """The instruction set that a process with SOK_CPU_ISA=value uses."""
    environment = os.environ | {"SOK_CPU_ISA": value}
    process = subprocess.run([sys.executable, "-c", NAME], env=environment, check=True, capture_output=True, text=True)
    return process.stdout.strip()


def best():
    environment = {key: value for key, value in os.environ.items() if key != "SOK_CPU_ISA"}
    process = subprocess.run([sys.executable, "-c", NAME], env=environment, check=True, capture_output=True, text=True)
    return process.stdout.strip()


def test_the_variable_lowers_and_never_raises():
    top = LEVELS.index(best())
    for level, name in enumerate(LEVELS):
        assert isa(name) == LEVELS[min(level, top)]
    assert isa("") == isa("nonsense") == LEVELS[top]


def test_it_is_named_in_the_build_info():
    assert core.device_properties().name in core.build_info()


@pytest.mark.parametrize("name", LEVELS)
def test_results(name):
    if "SOK_CPU_ISA" in os.environ:
        pytest.skip("an instruction set was chosen already")
    top = best()
    if LEVELS.index(name) > LEVELS.index(top):
        pytest.skip(f"this machine has {top}")
    if name == top:
        pytest.skip("the other test modules run with it")
    folder = pathlib.Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-m", "every_isa", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"SOK_CPU_ISA": name, "HYPOTHESIS_PROFILE": "quick"}  # the named cases are the same
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder.parents[1])
    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout
