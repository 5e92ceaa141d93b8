# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow frontend alone in this process; `tensorflow_harness` turns the shared cases into tensors."""

import importlib.util
import os
import pathlib
import sys

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")

import sparse_operation_kit.tensorflow as sok  # noqa: E402

_spec = importlib.util.spec_from_file_location("tensorflow_harness", pathlib.Path(__file__).parent / "harness.py")
sys.modules["tensorflow_harness"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["tensorflow_harness"])


@pytest.fixture(autouse=True)
def initialised():
    """Each test starts after init() with its defaults."""
    from sparse_operation_kit.tensorflow import runtime

    runtime.shutdown()
    sok.init()
    yield
    runtime.shutdown()
