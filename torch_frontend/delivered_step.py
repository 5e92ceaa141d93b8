# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of tables whose gradients came in one delivery (delivery.py): nothing is made for each table."""

from __future__ import annotations

import operator
from typing import Any

import torch

from sparse_operation_kit.optimizers import NotFused
from sparse_operation_kit.torch import call, hyperparameters
from sparse_operation_kit.torch.delivery import Delivery
from sparse_operation_kit.torch.variable import Variable

_DELIVERIES = operator.attrgetter("_deliveries")


def step(optimizer: torch.optim.Optimizer) -> bool:
    """Updates all tables of the optimizer that have a gradient, if those are just the tables of one delivery, all in
    one parameter group, and take the same fused step.

    Returns:
      Whether it did; nothing has changed otherwise.
    """
    found = _find(optimizer)
    if found is None:
        return False
    delivery, group, tables = found
    states: list[dict[str, Any]] = list(map(optimizer.state.__getitem__, tables))
    number = hyperparameters.common_step(states)
    if number is None:
        return False
    try:
        spec = hyperparameters.read(optimizer, group, number)
    except NotFused:
        return False
    handle = call.distinct(tables)[1].handle
    delivery.apply(tables, hyperparameters.state_tensors_of_all(spec, states, tables, handle), spec)
    if hyperparameters.has_step(spec):
        hyperparameters.count_steps(states)
    return True


def _find(optimizer: torch.optim.Optimizer) -> tuple[Delivery, dict[str, Any], list[Variable]] | None:
    """(the delivery, the parameter group, the tables in the delivery's order); None where it is not that simple."""
    found: tuple[Delivery, dict[str, Any], list[Variable]] | None = None
    for group in optimizer.param_groups:
        tables = call.tables_of(group["params"])
        deliveries = set(map(_DELIVERIES, tables))
        if len(deliveries) > 1:  # others may be without a gradient this time
            tables = [table for table in tables if table._deliveries or table.grad is not None]
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
        arranged = _arrange(tables, single[0].ids)
        if arranged is None:
            return None
        found = (single[0], group, arranged)
    return found


def _arrange(tables: list[Variable], ids: tuple[int, ...]) -> list[Variable] | None:
    """The tables in the order of `ids`, if they are just these."""
    own = tuple(map(id, tables))
    if own == ids:
        return tables
    places = dict(zip(own, tables, strict=True))
    return [places[number] for number in ids] if len(own) == len(ids) and places.keys() == set(ids) else None
