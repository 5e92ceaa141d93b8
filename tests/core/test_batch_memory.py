# SPDX-License-Identifier: Apache-2.0
"""Memory for batches without a GPU: the core's own code over a fake device. On a GPU TensorFlow's tests use it."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _library

WORKER = pathlib.Path(__file__).with_name("batch_memory_worker.py")


def test_over_a_fake_device(libraries):
    fake_core, nccl = libraries
    environment = {**os.environ, "SOK_CORE_LIBRARY": str(fake_core), "SOK_NCCL_LIBRARY": str(nccl)}
    done = subprocess.run(
        [sys.executable, str(WORKER)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.count("passed") == 3, done.stdout + done.stderr


def test_no_device():
    library, memory = _abi.library(), ctypes.c_void_p()
    with pytest.raises(ValueError, match="must be SOK_CUDA"):
        _library.check(library.sok_batch_memory_create(_abi.Device(_abi.CPU, 0), ctypes.byref(memory)))
    with pytest.raises(ValueError, match="memory is NULL"):
        _library.check(library.sok_batch_memory_create(_abi.Device(_abi.CUDA, 0), None))
    with pytest.raises(ValueError, match="memory is NULL"):
        _library.check(library.sok_batch_memory_fill(None, None, 1, ctypes.byref(memory)))
    assert library.sok_batch_memory_destroy(None) == 0
    if not core.built_with_cuda():
        with pytest.raises(NotImplementedError, match="SOK_WITH_CUDA"):
            _library.check(library.sok_batch_memory_create(_abi.Device(_abi.CUDA, 0), ctypes.byref(memory)))
