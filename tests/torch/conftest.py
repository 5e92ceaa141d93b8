# SPDX-License-Identifier: Apache-2.0
"""The PyTorch frontend alone in this process; `harness` turns the shared cases into tensors."""

import importlib.util
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

import sparse_operation_kit.torch as sok  # noqa: E402

_spec = importlib.util.spec_from_file_location("torch_harness", pathlib.Path(__file__).parent / "harness.py")
sys.modules["torch_harness"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["torch_harness"])


@pytest.fixture(autouse=True)
def initialised():
    """Each test starts after init() with its defaults."""
    from sparse_operation_kit.torch import runtime

    runtime.shutdown()
    sok.init()
    yield
    runtime.shutdown()
