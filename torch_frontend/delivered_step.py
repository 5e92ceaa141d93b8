# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of tables whose gradients came in one delivery (delivery.py): nothing is made for each table."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.optimizers import NotFused, OptimizerSpec
from sparse_operation_kit.torch import call, hyperparameters, param_groups
from sparse_operation_kit.torch.delivery import Delivery
from sparse_operation_kit.torch.variable import Variable

_DELIVERIES = operator.attrgetter("_deliveries")


def step(optimizer: torch.optim.Optimizer, groups: Sequence[param_groups.Sorted]) -> bool:
    """Updates all tables of the optimizer that have a gradient, if those are just the tables of one delivery, all in
    one parameter group, and take the same fused step.

    Args:
      groups: those of the optimizer.

    Returns:
      Whether it did; nothing has changed otherwise.
    """
    found = _find(groups)
    if found is None:
        return False
    delivery, group, tables = found
    try:
        spec = hyperparameters.read(optimizer, group, 1)
        states: list[dict[str, Any]] = []
        if spec.states or hyperparameters.has_step(spec):
            states = list(map(optimizer.state.__getitem__, tables))
            number = hyperparameters.common_step(states)
            if number is None:
                return False
            spec = hyperparameters.read(optimizer, group, number)
    except NotFused:
        return False
    delivery.apply(tables, _state_tensors(spec, states, tables), spec)
    if hyperparameters.has_step(spec):
        hyperparameters.count_steps(states)
    return True


def _state_tensors(spec: OptimizerSpec, states: list[dict[str, Any]], tables: Sequence[Variable]) -> list[Tensor]:
    if not spec.states:
        return []
    return hyperparameters.state_tensors_of_all(spec, states, tables, call.distinct(tables)[1].handle)


def _find(groups: Sequence[param_groups.Sorted]) -> tuple[Delivery, dict[str, Any], list[Variable]] | None:
    """(the delivery, the parameter group, the tables in the delivery's order); None where it is not that simple."""
    found: tuple[Delivery, dict[str, Any], list[Variable]] | None = None
    for group in groups:
        tables, ids = group.tables, group.ids
        deliveries = set(map(_DELIVERIES, tables))
        if len(deliveries) > 1:  # others may be without a gradient this time
            tables = [table for table in tables if table._deliveries or table.grad is not None]
            ids = tuple(map(id, tables))
            deliveries = set(map(_DELIVERIES, tables))
        if deliveries <= {()}:
            if any(table.grad is not None for table in tables):
                return None
            continue
        if found is not None or len(deliveries) != 1:
            return None
        (single,) = deliveries
        if len(single) != 1 or single[0].beside_others():
            return None
        arranged = _arrange(tables, ids, single[0].ids)
        if arranged is None:
            return None
        found = (single[0], group.group, arranged)
    return found


def _arrange(tables: list[Variable], own: tuple[int, ...], ids: tuple[int, ...]) -> list[Variable] | None:
    """The tables, whose id() are `own`, in the order of `ids`, if they are just these."""
    if own == ids:
        return tables
    places = dict(zip(own, tables, strict=True))
    return [places[number] for number in ids] if len(own) == len(ids) and places.keys() == set(ids) else None
