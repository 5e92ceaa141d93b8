# SPDX-License-Identifier: Apache-2.0
"""What the suites share that run another suite's tests on a GPU: who is skipped, and how tests are taken over."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import pytest


def mark(items, folder, missing):
    """Marks the tests in `folder` as gpu tests, and skips them where missing() gives a reason.

    Raises pytest.UsageError for a reason where SOK_TEST_GPU=1 promised a GPU.
    """
    mine = [item for item in items if folder in pathlib.Path(item.path).parents]
    if not mine:
        return
    reason = missing()
    if reason and os.environ.get("SOK_TEST_GPU") == "1":
        raise pytest.UsageError(f"SOK_TEST_GPU=1 but {reason}")
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def fetched(array: Any) -> Any:
    """A copy in host memory of what a call on the device returned, which is an array of CuPy."""
    return array.get()


def adopt(namespace: dict[str, Any], path: pathlib.Path, skipped: Mapping[str, str]) -> Any:
    """Puts the tests of a file into `namespace`, test_x of test_file.py as test_file_x, and TestX as Test_file_X.
    Returns the file's module.

    skipped: why some of them are left out, by their names in the file.
    """
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle looks for its classes there
    spec.loader.exec_module(module)
    short = path.stem.removeprefix("test_")
    for name, value in vars(module).items():
        if name.startswith("test_") and callable(value):
            test = pytest.mark.skip(reason=skipped[name])(value) if name in skipped else value
            namespace[f"test_{short}_{name.removeprefix('test_')}"] = test
        elif name.startswith("Test") and isinstance(value, type):
            namespace[f"Test_{short}_{name.removeprefix('Test')}"] = value
    return module
