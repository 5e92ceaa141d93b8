# SPDX-License-Identifier: Apache-2.0
"""The core suite: its shared modules, its markers, the pools of threads, and the core over a device that is a fake."""

import importlib.util
import pathlib
import sys

import pytest

for _name in ("table_kinds", "harness", "world", "communicator_build", "range_memory", "hash_keys"):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, pathlib.Path(__file__).parent / f"{_name}.py")
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])


def pytest_configure(config):
    config.addinivalue_line("markers", "every_isa: test_isa.py runs this again for each instruction set")


@pytest.fixture(scope="session")
def pools():
    """Thread pools of 2, 3 and 8 workers, as contexts."""
    from sparse_operation_kit import core

    made = [core.ThreadPool(n) for n in (2, 3, 8)]
    yield [core.Context(pool) for pool in made]
    for pool in made:
        pool.close()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The paths of the core with a fake device, and of the fake NCCL."""
    import communicator_build

    return communicator_build.build(tmp_path_factory.mktemp("communicator"))


@pytest.fixture(scope="session")
def device_of_index():
    """Where hash indices are."""
    return None


@pytest.fixture(params=["cpu", "fake_gpu"])
def memory(request, monkeypatch):
    """Where the ranges of a test lie: on the CPU, and on a fake device."""
    import range_memory

    if request.param == "cpu":
        return range_memory.Host()
    return range_memory.FakeDevice(request.getfixturevalue("libraries")[0], monkeypatch)
