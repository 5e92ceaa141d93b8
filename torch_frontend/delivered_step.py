# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of tables whose gradients came in one delivery (delivery.py): nothing is made for each table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.optimizers import NotFused
from sparse_operation_kit.torch import hyperparameters, stamps
from sparse_operation_kit.torch.delivery import Delivery
from sparse_operation_kit.torch.variable import Variable


def step(optimizer: torch.optim.Optimizer) -> bool:
    """Updates all tables of the optimizer that have a gradient, if those are just the tables of one delivery, all in
    one parameter group, and take the same fused step.

    Returns:
      Whether it did; nothing has changed otherwise.
    """
    found = _find(optimizer)
    if found is None:
        return False
    delivery, group, tables, arguments = found
    states: list[dict[str, Any]] = [optimizer.state[table] for table in tables]
    numbers = {hyperparameters.next_step(state) for state in states}
    if len(numbers) != 1:
        return False
    try:
        spec = hyperparameters.read(optimizer, group, numbers.pop())
    except NotFused:
        return False
    tensors: list[Tensor] = []
    if spec.states:
        for state, table in zip(states, tables, strict=True):
            tensors += hyperparameters.state_tensors(spec, state, table)
    delivery.check()
    num_parts, *parts = arguments
    stamps.apply(
        tables,
        tensors,
        delivery.names,
        [len(spec.states)] * len(tables),
        num_parts,
        *parts,
        [int(spec.kind)],
        [int(spec.flags)],
        list(spec.numbers),
        [delivery.scale * spec.gradient_sign],
    )
    if hyperparameters.has_step(spec):
        hyperparameters.count_steps(states)
    return True


def _find(
    optimizer: torch.optim.Optimizer,
) -> tuple[Delivery, dict[str, Any], list[Variable], tuple[Any, ...]] | None:
    """(the delivery, the parameter group, the tables in the delivery's order, its arguments); None where it is not that
    simple.
    """
    delivery: Delivery | None = None
    found: dict[str, Any] | None = None
    places: dict[int, Variable] = {}
    for group in optimizer.param_groups:
        for table in group["params"]:
            if not isinstance(table, Variable):
                continue
            single = table._single_delivery()
            if single is None:
                if table.grad is None:
                    continue
                return None
            if delivery is None:
                delivery, found = single[0], group
            elif delivery is not single[0] or found is not group:
                return None
            places[single[1]] = table
    if delivery is None or found is None or len(places) != len(delivery.names):
        return None
    arguments = delivery.arguments()
    return None if arguments is None else (delivery, found, [places[i] for i in range(len(places))], arguments)
