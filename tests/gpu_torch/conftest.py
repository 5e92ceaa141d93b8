# SPDX-License-Identifier: Apache-2.0
"""The PyTorch suite on a GPU: its modules, with tables there and tests that look at results as if on the CPU."""

import importlib.util
import pathlib
import sys

import gpu_suite
import pytest

torch = pytest.importorskip("torch")

for _name, _file in (("torch_harness", "../torch/harness.py"), ("torch_mirror", "mirror.py")):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, pathlib.Path(__file__).parent / _file)
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])


def _missing():
    """Why these tests cannot run here, or None."""
    from sparse_operation_kit import core

    if not core.built_with_cuda():
        return "the core was built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return None


def pytest_collection_modifyitems(items):
    gpu_suite.mark(items, pathlib.Path(__file__).parent, _missing)


@pytest.fixture(autouse=True)
def initialised():
    """Each test starts after init() with its defaults and leaves no error behind."""
    import sparse_operation_kit.torch as sok
    from sparse_operation_kit.torch import runtime

    runtime.shutdown()
    sok.init()
    yield
    sok.check_errors()
    runtime.shutdown()


@pytest.fixture(scope="module")
def mirrored():
    """Runs what tests of the CPU suite do on the GPU."""
    import torch_mirror

    with torch_mirror.installed():
        yield
