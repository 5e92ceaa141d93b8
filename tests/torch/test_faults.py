# SPDX-License-Identifier: Apache-2.0
"""faults.FAULTS in a process alone, on the CPU and on a GPU; on several ranks: tests/distributed."""

import importlib.util
import pathlib

import pytest
import torch

_spec = importlib.util.spec_from_file_location(
    "torch_faults", pathlib.Path(__file__).parents[1] / "distributed" / "torch_faults.py"
)
torch_faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(torch_faults)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_faults(device):
    torch_faults.run(torch.device(device))
