# SPDX-License-Identifier: Apache-2.0
"""The PyTorch frontend alone in this process; `harness` turns the shared cases into tensors, `permuted` is the
tests' own kind of table."""

import importlib.util
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

import sparse_operation_kit.torch as sok  # noqa: E402

for _name, _file in (("torch_harness", "harness.py"), ("torch_permuted", "permuted.py")):
    _spec = importlib.util.spec_from_file_location(_name, pathlib.Path(__file__).parent / _file)
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])


@pytest.fixture(autouse=True)
def initialised():
    """Each test starts after init() with its defaults."""
    from sparse_operation_kit.torch import runtime

    runtime.shutdown()
    sok.init()
    yield
    runtime.shutdown()
