# SPDX-License-Identifier: Apache-2.0
"""How backward() hands the gradients of a call to its tables: in one piece, which each table refers to.

Through autograd every table would get its own PendingGradient, at 20 us each, much of it in the accumulation that
autograd does for leaves. That is as much as a GPU takes for the rows of a small table. So a plain backward() leaves one
`Delivery` with all tables of the call, beside autograd; `Variable.grad` makes the table's PendingGradient from it when
somebody looks, and OptimizerWrapper takes the delivery itself. Where a table has hooks, and in autograd.grad() and
backward(inputs=...), autograd carries the gradients as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.call import Lookups
from sparse_operation_kit.torch.gradient import Part, PendingGradient, overwritten

if TYPE_CHECKING:
    from sparse_operation_kit.torch.variable import Variable


class Delivery:
    """The gradients of one call. Immutable.

    Args:
      names: of the call's tables.
      scale: a factor of all gradients.
      tables: the positions of those that have a gradient.
    """

    __slots__ = ("_parts", "names", "scale", "tables")

    def __init__(self, names: Sequence[str], scale: float, tables: set[int]) -> None:
        self.names = names
        self.scale = scale
        self.tables = tables
        self._parts: list[list[Part]] | None = None

    def check(self, table: int = 0) -> None:
        """Raises RuntimeError when something borrowed was changed in place since backward()."""

    def arguments(self) -> tuple[Any, ...] | None:
        """(parts of each table, then the parts themselves as the ops take them), in the order of the tables; None where
        a table has no gradient or the order is another.
        """
        raise NotImplementedError

    def _make_parts(self) -> list[list[Part]]:
        raise NotImplementedError

    def parts(self, table: int) -> list[Part]:
        """The parts of the gradient of the table at this position of the call."""
        if self._parts is None:
            self.check(table)
            self._parts = self._make_parts()
        return self._parts[table]

    def pending(self, table: int, shard: Tensor) -> PendingGradient:
        """The gradient of the table at this position of the call, whose rows are `shard`."""
        parts = self.parts(table)
        return PendingGradient(shard.shape, shard.dtype, shard.device, parts, self.names[table], self.scale)


class LookupDelivery(Delivery):
    """Of a process alone: output gradients as they are, and the lookups they belong to. Slots are keys.

    Args:
      lookups: with their tensors.
      gradients: [bags, dimension] of each lookup, or None where nobody used the output.
    """

    __slots__ = ("gradients", "lookups", "versions")

    def __init__(
        self, lookups: Lookups, gradients: Sequence[Tensor | None], names: Sequence[str], scale: float
    ) -> None:
        pairs = zip(lookups.key_tables, gradients, strict=True)
        super().__init__(names, scale, {table for table, gradient in pairs if gradient is not None})
        versions = ops.versions(lookups.keys)
        if any(version > 0 for version in versions):
            # Keys that were written in place are likely a buffer that the next batch will be written into, perhaps
            # before the optimizer steps (gradient accumulation). Keys that never were are borrowed.
            keys = [key.clone() if version > 0 else key for key, version in zip(lookups.keys, versions, strict=True)]
            lookups = lookups.with_tensors([*keys, *lookups.row_splits, *lookups.weights])
        self.lookups = lookups
        self.gradients = gradients
        self.versions = ops.versions(self._borrowed())

    def _borrowed(self) -> list[Tensor]:
        return [*self.lookups.tensors(), *(gradient for gradient in self.gradients if gradient is not None)]

    def check(self, table: int = 0) -> None:
        if ops.versions(self._borrowed()) != self.versions:
            raise overwritten(self.names[table])

    def arguments(self) -> tuple[Any, ...] | None:
        count, lookups = len(self.names), self.lookups
        if not len(self.gradients) == len(self.tables) == count or lookups.key_tables != list(range(count)):
            return None
        bags = (lookups.combiners, lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted)
        return [1] * count, lookups.keys, self.gradients, *bags, []

    def _make_parts(self) -> list[list[Part]]:
        splits = dict(zip(self.lookups.bagged, self.lookups.row_splits, strict=True))
        weights = dict(zip(self.lookups.weighted, self.lookups.weights, strict=True))
        parts: list[list[Part]] = [[] for _ in self.names]
        for i, gradient in enumerate(self.gradients):
            if gradient is not None:
                key, combiner = self.lookups.keys[i], self.lookups.combiners[i]
                part = Part(key, gradient, combiner, splits.get(i), weights.get(i))
                parts[self.lookups.key_tables[i]].append(part)
        return parts


class ExchangedDelivery(Delivery):
    """Of several ranks: what came from each of them for each table, which may be nothing.

    Args:
      slots: [sum(counts)] by source rank, then table; within one rank and table each slot occurs once.
      values: their gradients, flat, in the same order.
      counts: [num_ranks * tables] of both.
      dimensions: of the tables.
    """

    __slots__ = ("counts", "dimensions", "slots", "values")

    def __init__(
        self,
        slots: Tensor,
        values: Tensor,
        counts: list[int],
        dimensions: Sequence[int],
        names: Sequence[str],
        scale: float,
    ) -> None:
        super().__init__(names, scale, set(range(len(names))))
        self.slots, self.values, self.counts, self.dimensions = slots, values, counts, dimensions

    def _pieces(self) -> list[list[tuple[Tensor, Tensor]]]:
        """(slots [n], values [n, dimension]) of each table, from the ranks that sent any."""
        tables = len(self.names)
        elements = [count * self.dimensions[i % tables] for i, count in enumerate(self.counts)]
        pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.names]
        split = zip(self.counts, self.slots.split(self.counts), self.values.split(elements), strict=True)
        for i, (count, slots, values) in enumerate(split):
            if count:
                pieces[i % tables].append((slots, values.view(count, -1)))
        return pieces

    def arguments(self) -> tuple[Any, ...] | None:
        pieces = self._pieces()
        flat = [piece for table in pieces for piece in table]
        slots, values = [piece[0] for piece in flat], [piece[1] for piece in flat]
        return [len(table) for table in pieces], slots, values, [0] * len(flat), [], [], [], [], list(range(len(flat)))

    def _make_parts(self) -> list[list[Part]]:
        return [[Part(slots, values, unique=True) for slots, values in table] for table in self._pieces()]


def deliver(context: Any, delivery: Delivery, tables: Sequence[Variable]) -> list[Tensor | None]:
    """Leaves the gradients of a call with its tables, in the backward() that `context` runs in.

    Args:
      context: of the autograd function whose first inputs are the tables.
      tables: of the call.

    Returns:
      What the function is to return for each table: its gradient where autograd has to carry it, else None.
    """
    nodes = context.next_functions
    needed = context.needs_input_grad
    result: list[Tensor | None] = [None] * len(tables)
    offset = len(needed) - len(nodes)  # inputs before the first tensor
    for i, table in enumerate(tables):
        if not needed[offset + i] or i not in delivery.tables:
            continue
        if table._backward_hooks or table._post_accumulate_grad_hooks or not _accumulates(nodes[i][0]):
            result[i] = delivery.pending(i, table)
        else:
            table._deliver(delivery, i)
    return result


def _accumulates(leaf: Any) -> bool:
    """Whether the running backward() adds to the .grad of this leaf. (autograd.grad() does not.)"""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:
        return False
