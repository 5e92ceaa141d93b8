# SPDX-License-Identifier: Apache-2.0
"""Configuration of every suite: the modules that suites share, and the Hypothesis profiles."""

import importlib.util
import os
import pathlib
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Not by sys.path: with tests/ on it, tests/tensorflow would answer `import tensorflow` where there is no TensorFlow.
_SHARED = (
    *("reference", "cases", "faults", "eviction_model", "gpu_suite", "checking", "launching"),
    *("dynamic_model", "dynamic_policies", "dict_store", "kept_tables", "stored_tables", "criteo_bags", "permutation"),
    "many_rows",
)
for _name in _SHARED:
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, pathlib.Path(__file__).parent / f"{_name}.py")
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])

_COMMON: dict[str, Any] = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=30, **_COMMON)
settings.register_profile("ci", max_examples=30, derandomize=False, **_COMMON)
settings.register_profile("quick", max_examples=5, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
settings.register_profile("sequences", max_examples=10_000, **_COMMON)  # of state machines, before a release
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(trylast=True)  # conftest.py of some suites mark theirs first
def pytest_collection_modifyitems(config, items):
    """Leaves out GPU tests where there is no GPU; where SOK_TEST_GPU=1 promises one they run, and fail. Leaves out what
    downloads frameworks, unless it is asked for.
    """
    if "installs" not in config.option.markexpr:
        _leave_out("installs", config, items)
    on_gpu = any(item.get_closest_marker("gpu") for item in items)
    if not on_gpu or config.option.collectonly or os.environ.get("SOK_TEST_GPU") == "1":
        return
    from sparse_operation_kit import core

    if core.cuda_device_count() == 0:
        _leave_out("gpu", config, items)


def _leave_out(marker, config, items):
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
    items[:] = [item for item in items if not item.get_closest_marker(marker)]
