# SPDX-License-Identifier: Apache-2.0
"""The optimizer's states of tables that step together, without a look at each of them in PyTorch at every step.

What is remembered is compared with what the optimizer has by identity, tensor by tensor, so a state_dict that is loaded
or a state that somebody replaces is noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.optimizers import OptimizerSpec, slot_name_of_torch
from sparse_operation_kit.torch import hyperparameters

_STEP = operator.itemgetter("step")


@dataclasses.dataclass(slots=True)
class Remembered:
    """Tensors of an earlier step, which are not kept alive."""

    ids: tuple[int, ...]
    """id() of each; they may be those of others once it is gone."""
    handle: Any
    """torch.classes.sok.TensorList of these, which is of no use any more once one is gone."""


NONE = Remembered((), torch.classes.sok.TensorList([], 1))


def _remember(tensors: list[Any], num_states: int, known: Remembered | None) -> Remembered | None:
    """`known` where it is these, of which one may be gone nevertheless; None where they are not all tensors."""
    ids = tuple(map(id, tensors))
    if known is not None and ids == known.ids:
        return known
    return _remembered(tensors, num_states) if set(map(type, tensors)) == {Tensor} else None


def _remembered(tensors: list[Tensor], num_states: int) -> Remembered:
    return Remembered(tuple(map(id, tensors)), torch.classes.sok.TensorList(tensors, num_states))


def of_tables(optimizer: torch.optim.Optimizer, tables: Sequence[Tensor]) -> list[dict[str, Any]]:
    """`optimizer.state` of each table."""
    everything = optimizer.state
    # Mostly they are the first in their order, and hash() of a tensor is slow.
    if len(everything) >= len(tables) and all(map(operator.is_, everything, tables)):
        return list(itertools.islice(everything.values(), len(tables)))
    return list(map(everything.__getitem__, tables))


@dataclasses.dataclass(slots=True)
class CommonStep:
    """The step that several tables take next."""

    number: int
    """1 for the first."""
    counts: Remembered | None
    """The step count of each, where all are tensors on the CPU of the same number."""
    states: Sequence[dict[str, Any]]

    def count(self) -> None:
        """Raises the step counts by this step."""
        if self.counts is not None:
            self.counts.handle.count_up()
        else:
            hyperparameters.count_steps(self.states)


def common_step(states: Sequence[dict[str, Any]], known: Remembered | None) -> CommonStep | None:
    """The coming step of tables with these states; None where they are not all at the same.

    Args:
      known: the step counts of an earlier step, if any.
    """
    remembered = None
    with contextlib.suppress(KeyError):  # before the first step
        remembered = _remember(list(map(_STEP, states)), 1, known)
    number = None if remembered is None else remembered.handle.common_number()
    if number is not None:
        return CommonStep(int(number) + 1, remembered, states)
    numbers = set(map(hyperparameters.next_step, states))
    return CommonStep(numbers.pop(), None, states) if len(numbers) == 1 else None


def of_all(
    spec: OptimizerSpec,
    states: Sequence[dict[str, Any]],
    tables: Sequence[Tensor],
    handle: Any,
    known: Remembered | None,
) -> Remembered:
    """One state of all tables after the other, in the core's order of states; made where they are not there yet.

    Args:
      states: `optimizer.state` of each table.
      handle: torch.classes.sok.TableList of the tables.
      known: what this gave at an earlier step, if any.

    Raises ValueError for a state that is not as the core wants it.
    """
    keys = [slot_name_of_torch(spec.name, piece.name) for piece in spec.states]
    tensors: list[Any] = []
    remembered = None
    with contextlib.suppress(KeyError):  # before the first step
        for key in keys:
            tensors.extend(map(operator.itemgetter(key), states))
        remembered = _remember(tensors, len(keys), known)
    if remembered is not None and handle.fit(remembered.handle, [int(piece.rowwise) for piece in spec.states]):
        return remembered
    pairs = zip(states, tables, strict=True)
    by_table = [hyperparameters.state_tensors(spec, state, table) for state, table in pairs]
    return _remembered([of_table[i] for i in range(len(keys)) for of_table in by_table], len(keys))
