# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of tables whose gradients came in one delivery (delivery.py): nothing is made for each table."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from sparse_operation_kit.optimizers import NotFused
from sparse_operation_kit.torch import call, hyperparameters, param_groups, table_states
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
    states: list[dict[str, Any]] = []
    coming: table_states.CommonStep | None = None
    if hyperparameters.may_count(optimizer):
        states = table_states.of_tables(optimizer, tables)
        coming = table_states.common_step(states, group.counts)
        if coming is None:
            return False
        group.counts = coming.counts
    try:
        spec = hyperparameters.read(optimizer, group.group, 1 if coming is None else coming.number)
    except NotFused:
        return False
    if hyperparameters.has_step(spec) and coming is None:  # another optimizer of the name of one that does not count
        return False
    tensors = table_states.NONE
    if spec.states:
        states = states or table_states.of_tables(optimizer, tables)
        handle = group.handle if tables is group.tables else call.distinct(tables)[1].handle
        tensors = group.states = table_states.of_all(spec, states, tables, handle, group.states)
    delivery.apply(tables, tensors.handle, spec)
    if coming is not None and hyperparameters.has_step(spec):
        coming.count()
    return True


def _find(groups: Sequence[param_groups.Sorted]) -> tuple[Delivery, param_groups.Sorted, list[Variable]] | None:
    """(the delivery, the parameter group, the tables in the delivery's order); None where it is not that simple."""
    found: tuple[Delivery, param_groups.Sorted, list[Variable]] | None = None
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
        found = (single[0], group, arranged)
    return found


def _arrange(tables: list[Variable], own: tuple[int, ...], ids: tuple[int, ...]) -> list[Variable] | None:
    """The tables, whose id() are `own`, in the order of `ids`, if they are just these."""
    if own == ids:
        return tables
    places = dict(zip(own, tables, strict=True))
    return [places[number] for number in ids] if len(own) == len(ids) and places.keys() == set(ids) else None
