# SPDX-License-Identifier: Apache-2.0
"""What the PyTorch subjects share: optimizers by the benchmarks' names, and dynamic tables that hold all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import sparse_operation_kit.torch as sok
from benchmarks.cases import Case, raw_ids

LEARNING_RATE = 0.01
_AT_ONCE = 1 << 18


def make_optimizer(name: str, tables: list[Any]) -> Any:
    """The optimizer of a benchmark's name, for tables."""
    made: dict[str, Callable[[], Any]] = {
        "sgd": lambda: sok.OptimizerWrapper(torch.optim.SGD(tables, lr=LEARNING_RATE)),
        "rowwise_adagrad": lambda: sok.RowWiseAdagrad(LEARNING_RATE, epsilon=1e-8).attach(tables),
        "adagrad": lambda: sok.OptimizerWrapper(torch.optim.Adagrad(tables, lr=LEARNING_RATE, eps=1e-8)),
        "adam": lambda: sok.OptimizerWrapper(torch.optim.Adam(tables, lr=LEARNING_RATE, eps=1e-8)),
    }
    return made[name]()


def make_dynamic(
    case: Case, table: int, dtype: str, device: torch.device, evicts: bool, gigabytes: float | None = None
) -> Any:
    """A dynamic table that holds the raw ids of all rows of a case. evicts: by time of use. gigabytes: of its rows, in
    the memory of a GPU; None: all.
    """
    made = sok.DynamicVariable(
        case.dimension,
        "uniform",
        name=f"table{table}",
        dtype=getattr(torch, dtype),
        device=device,
        init_capacity=case.rows,
        max_capacity=2 * case.rows,  # on a GPU the keys of queued calls have room, whether they are new or not
        evict_strategy="lru" if evicts else None,
        max_hbm_for_vectors=gigabytes,
    )
    for first in range(0, case.rows, _AT_ONCE):
        ids = torch.from_numpy(raw_ids(np.arange(first, min(first + _AT_ONCE, case.rows)))).to(device)
        splits = torch.arange(len(ids) + 1, device=device)
        sok.lookup_sparse(made, (ids, splits), combiners="sum")  # in training, so it inserts
    return made
