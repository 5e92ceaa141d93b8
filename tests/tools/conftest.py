# SPDX-License-Identifier: Apache-2.0
"""The programs of tools/ as modules."""

import importlib.util
import pathlib
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"sok_tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build() -> types.ModuleType:
    return _load("build")


@pytest.fixture(scope="session")
def check() -> types.ModuleType:
    return _load("check")


@pytest.fixture(scope="session")
def install_horovod() -> types.ModuleType:
    return _load("install_horovod")


@pytest.fixture(scope="session")
def mps() -> types.ModuleType:
    return _load("mps")


@pytest.fixture(scope="session")
def gpu_ci() -> types.ModuleType:
    return _load("gpu_ci")


@pytest.fixture(scope="session")
def sanitize() -> types.ModuleType:
    return _load("sanitize")
