# SPDX-License-Identifier: Apache-2.0
"""The core suite on a GPU: its modules, and a binding whose calls run on the device."""

import importlib.util
import pathlib
import sys

import gpu_suite
import pytest

for _name, _file in (
    ("table_kinds", "../core/table_kinds.py"),
    ("harness", "../core/harness.py"),
    ("range_memory", "../core/range_memory.py"),
    ("hash_keys", "../core/hash_keys.py"),
    ("mirror", "mirror.py"),
):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, pathlib.Path(__file__).parent / _file)
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU and CuPy; skipped where there are none")
    config.addinivalue_line("markers", "every_isa: test_isa.py runs this again for each instruction set")


def _missing():
    """Why these tests cannot run here, or None."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    from sparse_operation_kit import core

    if not core.built_with_cuda():
        return "the core was built without CUDA"
    if core.cuda_device_count() == 0:
        return "there is no GPU"
    return None


def pytest_collection_modifyitems(items):
    gpu_suite.mark(items, pathlib.Path(__file__).parent, _missing)


@pytest.fixture(scope="session")
def pools():
    """What the CPU suite takes thread pools for: here, three runs on the device."""
    return [None, None, None]


@pytest.fixture(scope="module")
def on_device():
    """Runs the calls of a module, made as if for the CPU, on the device."""
    import mirror

    with mirror.installed() as device:
        yield device


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def record():
    """Where calls report what a device finds wrong."""
    from sparse_operation_kit import core

    made = core.ErrorRecord(0)
    yield made
    made.close()


@pytest.fixture
def context(cupy, record):
    """Of calls that do not wait."""
    from sparse_operation_kit import core

    return core.Context(device=0, empty=cupy.empty, errors=record)


@pytest.fixture(scope="session")
def device_of_index():
    """Where hash indices are."""
    return 0


@pytest.fixture
def memory():
    """Where the ranges of a test lie."""
    import range_memory

    return range_memory.Gpu()
