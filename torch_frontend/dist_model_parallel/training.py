# SPDX-License-Identifier: Apache-2.0
"""Training helpers: those of the package, which take a module too."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparse_operation_kit.torch import distributed
from sparse_operation_kit.torch.dist_model_parallel.setup import ensure_initialised
from sparse_operation_kit.torch.distributed import DistributedOptimizer as DistributedOptimizer


def broadcast_variables(vars: Any, root_rank: int = 0) -> None:
    """Gives every rank the values of `root_rank`, in place. Tables are left alone.

    Args:
      vars: a module, whose parameters and buffers are meant, or what `sok.broadcast_variables` takes.
      root_rank: whose values.

    Raises ValueError for another root_rank.
    """
    ensure_initialised()
    if isinstance(vars, nn.Module):
        vars = [*vars.parameters(), *vars.buffers()]
    distributed.broadcast_variables(vars, root_rank)
