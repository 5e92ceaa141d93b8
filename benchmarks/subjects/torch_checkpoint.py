# SPDX-License-Identifier: Apache-2.0
"""dump and load of a table with Adam states by the PyTorch frontend, for benchmarks/checkpoint.py."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

import sparse_operation_kit.torch as sok

VERSION = f"torch {torch.__version__}"


class Model:
    """A table that has been trained a step, so that it has states."""

    def __init__(self, rows: int, dimension: int) -> None:
        sok.init()
        self._table = sok.Variable(shape=(rows, dimension), initializer="uniform", name="table0")
        self._optimizer = sok.OptimizerWrapper(torch.optim.Adam([self._table]))
        sok.lookup_sparse(self._table, (torch.tensor([0]), torch.tensor([0, 1]))).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def dump(self, path: pathlib.Path) -> None:
        sok.dump(path, self._table, self._optimizer, progress=False)

    def dump_async(self, path: pathlib.Path) -> None:
        self._pending = sok.dump_async(path, self._table, self._optimizer, progress=False)

    def wait(self) -> None:
        self._pending.wait()

    def load(self, path: pathlib.Path, verify: Any) -> None:
        sok.load(path, self._table, self._optimizer, verify=verify, progress=False)
