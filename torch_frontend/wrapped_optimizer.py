# SPDX-License-Identifier: Apache-2.0
"""What OptimizerWrapper leaves to the optimizer that it wraps: the dense parameters.

What is no public API of torch.optim is here, the dictionaries of hooks that say whether anybody waits for a step, and
in row_optimizer.py, which keeps them from a twin of the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.optim.optimizer as of_all_optimizers

from sparse_operation_kit.torch import hyperparameters
from sparse_operation_kit.torch.table_step import Known, is_captured


def call(method: str, optimizer: torch.optim.Optimizer, known: Known, *arguments: Any) -> None:
    """Calls optimizer.step() or .zero_grad(*arguments) with the dense parameters of its groups.

    An empty call takes 40 us, as long as the rows of some tables. It is left out where nobody would notice.

    Args:
      method: "step" or "zero_grad".
      known: the parameters of the optimizer.
    """
    if not any(each.dense for each in known.groups) and _is_unnoticed(method, optimizer, known):
        return
    everything = [(each.group, each.group["params"], each.dense) for each in known.groups]
    try:
        for group, _, dense in everything:
            group["params"] = list(dense)
        getattr(optimizer, method)(*arguments)
    finally:
        for group, parameters, _ in everything:
            group["params"] = parameters


def _is_unnoticed(method: str, optimizer: torch.optim.Optimizer, known: Known) -> bool:
    """Whether a call without parameters does nothing.

    Classes derived from torch.optim's may do what they like in it, schedulers put a method of their own in its place,
    and hooks are called from it. In a CUDA graph Adam and others that count their steps on the host refuse the call.
    """
    return (
        hyperparameters.class_name(optimizer) is not None
        and method not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not of_all_optimizers._global_optimizer_pre_hooks
        and not of_all_optimizers._global_optimizer_post_hooks
        and not _are_captured(known)
    )


def _are_captured(known: Known) -> bool:
    """Whether a CUDA graph takes in what happens to the tables."""
    return any(is_captured(known.tables[each.tables[0]].device) for each in known.groups if each.tables)
