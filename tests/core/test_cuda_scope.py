# SPDX-License-Identifier: Apache-2.0
"""The device, stream and memory of a CUDA call, by a program that is compiled here from the core's own sources."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.slow
def test_scope(tmp_path):
    sources = [
        "tests/core/cuda_scope.cu",
        "core/src/cuda/context.cu",
        "core/src/cuda/device.cu",
        "core/src/common/status.cc",
    ]
    command = [
        shutil.which("nvcc") or pytest.fail("there is a GPU and no nvcc"), "-std=c++20", "-arch=native",
        '-DSOK_CUDA_ARCHS="test"', "-Icore/src", "-Icore/include", "-o", str(tmp_path / "scope"), *sources,
    ]  # fmt: skip
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "scope"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
