# SPDX-License-Identifier: Apache-2.0
"""faults.FAULTS in a process alone, on the CPU and on a GPU; on several ranks: tests/distributed."""

import importlib.util
import pathlib

import pytest

_spec = importlib.util.spec_from_file_location(
    "tensorflow_faults", pathlib.Path(__file__).parents[1] / "distributed" / "tensorflow_faults.py"
)
tensorflow_faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tensorflow_faults)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_faults(compiled):
    tensorflow_faults.run(compiled)
