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
    """The gradients of one call: output gradients as they are, and the lookups they belong to. Immutable.

    Args:
      lookups: with their tensors.
      gradients: [bags, dimension] of each lookup, or None where nobody used the output.
      names: of the call's tables.
      scale: a factor of all gradients.

    `tables` are the positions of those that have a gradient.
    """

    __slots__ = ("_parts", "gradients", "lookups", "names", "scale", "tables", "versions")

    def __init__(
        self, lookups: Lookups, gradients: Sequence[Tensor | None], names: Sequence[str], scale: float
    ) -> None:
        self.names = names
        self.scale = scale
        self.versions = ops.versions(lookups.keys)
        if any(version > 0 for version in self.versions):
            # Keys that were written in place are likely a buffer that the next batch will be written into, perhaps
            # before the optimizer steps (gradient accumulation). Keys that never were are borrowed.
            keys = [
                key.clone() if version > 0 else key for key, version in zip(lookups.keys, self.versions, strict=True)
            ]
            lookups = lookups.with_tensors([*keys, *lookups.row_splits, *lookups.weights])
        self.lookups = lookups
        self.gradients = gradients
        self.tables = {
            table for table, gradient in zip(lookups.key_tables, gradients, strict=True) if gradient is not None
        }
        self.versions = ops.versions(self._borrowed())
        self._parts: list[list[Part]] | None = None

    def _borrowed(self) -> list[Tensor]:
        return [*self.lookups.tensors(), *(gradient for gradient in self.gradients if gradient is not None)]

    def check(self, table: int = 0) -> None:
        """Raises RuntimeError when something borrowed was changed in place since backward()."""
        if ops.versions(self._borrowed()) != self.versions:
            raise overwritten(self.names[table])

    def parts(self, table: int) -> list[Part]:
        """The parts of the gradient of the table at this position of the call. Slots are keys: there is one rank."""
        if self._parts is None:
            splits = dict(zip(self.lookups.bagged, self.lookups.row_splits, strict=True))
            weights = dict(zip(self.lookups.weighted, self.lookups.weights, strict=True))
            parts: list[list[Part]] = [[] for _ in self.names]
            self.check(table)
            for i, gradient in enumerate(self.gradients):
                if gradient is not None:
                    key, combiner = self.lookups.keys[i], self.lookups.combiners[i]
                    part = Part(key, gradient, combiner, splits.get(i), weights.get(i))
                    parts[self.lookups.key_tables[i]].append(part)
            self._parts = parts
        return self._parts[table]

    def pending(self, table: int, shard: Tensor) -> PendingGradient:
        """The gradient of the table at this position of the call, whose rows are `shard`."""
        parts = self.parts(table)
        return PendingGradient(shard.shape, shard.dtype, shard.device, parts, self.names[table], self.scale)

    def one_to_one(self) -> bool:
        """Whether lookup i is that of table i, for all tables, and each has a gradient."""
        count = len(self.names)
        return len(self.gradients) == len(self.tables) == count and self.lookups.key_tables == list(range(count))


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
