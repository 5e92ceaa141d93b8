# SPDX-License-Identifier: Apache-2.0
"""The parameter groups of an optimizer with tables and dense parameters told apart, remembered from step to step."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import call
from sparse_operation_kit.torch.table_states import Remembered
from sparse_operation_kit.torch.variable import Variable


@dataclasses.dataclass(slots=True)
class Sorted:
    """One parameter group."""

    group: dict[str, Any]
    parameters: list[Tensor]
    """As they were listed when this was made."""
    tables: list[Variable]
    dense: list[Tensor]
    ids: tuple[int, ...]
    """id() of each table."""
    handle: Any
    """torch.classes.sok.TableList of the tables; None where there are none."""
    counts: Remembered | None = None
    """The step counts of the tables of an earlier step."""
    states: Remembered | None = None
    """And the optimizer's states."""

    def holds(self, group: dict[str, Any]) -> bool:
        """Whether the group still is what this says."""
        parameters = group["params"]
        return (
            self.group is group
            and len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
        )


_sorted: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Sorted]] = weakref.WeakKeyDictionary()


def sort(optimizer: torch.optim.Optimizer) -> list[Sorted]:
    """The groups of an optimizer, in their order."""
    groups = optimizer.param_groups
    known = _sorted.get(optimizer)
    if known is None or len(known) != len(groups) or not all(map(Sorted.holds, known, groups)):
        known = _sorted[optimizer] = [_sort(group) for group in groups]
    return known


def _sort(group: dict[str, Any]) -> Sorted:
    parameters = list(group["params"])
    tables = [parameter for parameter in parameters if isinstance(parameter, Variable)]
    dense = [parameter for parameter in parameters if not isinstance(parameter, Variable)]
    handle = call.distinct(tables)[1].handle if tables else None
    return Sorted(group, parameters, tables, dense, tuple(map(id, tables)), handle)
