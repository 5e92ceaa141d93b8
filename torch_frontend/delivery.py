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

from sparse_operation_kit.optimizers import OptimizerSpec
from sparse_operation_kit.torch import stamps
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.gradient import Part, PendingGradient, overwritten

if TYPE_CHECKING:
    from sparse_operation_kit.torch.call import Tables
    from sparse_operation_kit.torch.owner_pooling import Counts
    from sparse_operation_kit.torch.variable import Variable


class Delivery:
    """The gradients of one call. Immutable.

    Args:
      ids: id() of each table of the call.
      scale: a factor of all gradients.
    """

    __slots__ = ("_parts", "ids", "scale")

    def __init__(self, ids: tuple[int, ...], scale: float) -> None:
        self.ids = ids
        self.scale = scale
        self._parts: dict[int, list[Part]] = {}

    def beside_others(self) -> bool:
        """Whether autograd has added up a gradient of one of the tables too."""
        raise NotImplementedError

    def apply(self, tables: Sequence[Variable], states: list[Tensor], spec: OptimizerSpec) -> None:
        """One optimizer step of all tables of the call, given in their order, all of which have a gradient.

        Raises RuntimeError when something borrowed was changed in place since backward(); nothing has changed then.
        """
        raise NotImplementedError

    def _make_parts(self, position: int, name: str) -> list[Part]:
        """The parts of the gradient of the table at this position, whose name is for the RuntimeError."""
        raise NotImplementedError

    def pending(self, table: Variable) -> PendingGradient:
        """The gradient of one table of the call."""
        position = self.ids.index(id(table))
        parts = self._parts.get(position)
        if parts is None:
            parts = self._parts[position] = self._make_parts(position, table._sok_name)
        return PendingGradient(table.shape, table.dtype, table.device, parts, table._sok_name, self.scale)


class LookupDelivery(Delivery):
    """Of a process alone: output gradients as they are, and the lookups they belong to (csrc/delivery.h)."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any, ids: tuple[int, ...]) -> None:
        super().__init__(ids, 1.0)
        self._handle = handle

    def beside_others(self) -> bool:
        return bool(self._handle.beside_others())

    def apply(self, tables: Sequence[Variable], states: list[Tensor], spec: OptimizerSpec) -> None:
        step = (len(spec.states), int(spec.kind), int(spec.flags), spec.numbers, self.scale * spec.gradient_sign)
        with stamps.known(tables) as (tracked, positions):
            if not self._handle.apply(states, *step, tracked, positions, stamps.now(tracked)):
                raise overwritten(tables[0]._sok_name)

    def _make_parts(self, position: int, name: str) -> list[Part]:
        if not self._handle.unchanged():
            raise overwritten(name)
        return [Part(*part) for part in zip(*self._handle.parts(position), strict=True)]


_Piece = tuple[Tensor, Tensor, Tensor | None]


class ExchangedDelivery(Delivery):
    """Of several ranks: what came from each of them for each table, which may be nothing.

    Args:
      values: the gradients of the messages of rows (owner_pooling.py), flat.
      counts: of what the ranks asked for.
      slots: [sum(counts.rows)]; within one rank and table each slot occurs once.
      part_slots, splits: of the parts of bags that are pooled here, or None.
      tables: of the call.
    """

    __slots__ = ("_pieces", "counts", "part_slots", "slots", "splits", "tables", "values")

    def __init__(
        self,
        values: Tensor,
        counts: Counts,
        slots: Tensor,
        part_slots: Tensor | None,
        splits: Tensor | None,
        tables: Tables,
        scale: float,
    ) -> None:
        super().__init__(tables.ids, scale)
        self.values, self.counts, self.tables = values, counts, tables
        self.slots, self.part_slots, self.splits = slots, part_slots, splits
        self._pieces: list[list[_Piece]] | None = None

    def pieces(self) -> list[list[_Piece]]:
        """(slots [n], values [m, dimension], row splits [m + 1] or None: m = n) of each table, from the ranks that sent
        any.
        """
        if self._pieces is None:
            counts, num_tables, num_lookups = self.counts, len(self.ids), len(self.tables.positions)
            self._pieces = [[] for _ in self.ids]
            values = self.values.split(counts.elements)
            of_a_rank = num_tables + (num_lookups if counts.pooled else 0)
            for i, (count, slots) in enumerate(zip(counts.rows, self.slots.split(counts.rows), strict=True)):
                rank, table = divmod(i, num_tables)
                if count:
                    self._pieces[table].append((slots, values[rank * of_a_rank + table].view(count, -1), None))
            if self.part_slots is not None and self.splits is not None:
                both = zip(self.part_slots.split(counts.keys), self.splits.split(counts.splits), strict=True)
                for i, (slots, splits) in enumerate(both):
                    rank, lookup = divmod(i, num_lookups)
                    if counts.keys[i]:
                        sums = values[rank * of_a_rank + num_tables + lookup].view(counts.splits[i] - 1, -1)
                        self._pieces[self.tables.positions[lookup]].append((slots, sums, splits))
        return self._pieces

    def beside_others(self) -> bool:
        return bool(self.tables.handle.have_gradients())

    def apply(self, tables: Sequence[Variable], states: list[Tensor], spec: OptimizerSpec) -> None:
        pieces = self.pieces()
        flat = [piece for table in pieces for piece in table]
        bagged = [i for i, piece in enumerate(flat) if piece[2] is not None]
        stamps.apply(
            tables,
            states,
            self.tables.names,
            [len(spec.states)] * len(tables),
            [len(table) for table in pieces],
            [piece[0] for piece in flat],
            [piece[1] for piece in flat],
            [0] * len(flat),
            [piece[2] for piece in flat if piece[2] is not None],
            bagged,
            [],
            [],
            [i for i, piece in enumerate(flat) if piece[2] is None],
            [int(spec.kind)],
            [int(spec.flags)],
            spec.numbers,
            [self.scale * spec.gradient_sign],
        )

    def _make_parts(self, position: int, name: str) -> list[Part]:
        return [
            Part(slots, values, row_splits=splits, unique=splits is None)
            for slots, values, splits in self.pieces()[position]
        ]


def deliver(delivery: Delivery, tables: Sequence[Variable], needed: Sequence[bool]) -> list[Tensor | None]:
    """Leaves the gradients of a call with its tables. For the backward() of a function of autograd.

    Args:
      tables: of the call.
      needed: whether each table takes part.

    Returns:
      What the function is to return for each table: its gradient where autograd has to carry it, else None.
    """
    carried = set(ops.carried_by_autograd(tables))
    _leave(delivery, [table for i, table in enumerate(tables) if needed[i] and i not in carried])
    return [delivery.pending(table) if needed[i] and i in carried else None for i, table in enumerate(tables)]


def _deliver_lookup(handle: Any, tables: list[Variable], delivered: list[int], carried: list[int]) -> list[Tensor]:
    """The op `deliver` (csrc/library.cc)."""
    delivery = LookupDelivery(handle, tuple(map(id, tables)))
    _leave(delivery, tables if len(delivered) == len(tables) else [tables[i] for i in delivered])
    return [delivery.pending(tables[i]) for i in carried]


def _leave(delivery: Delivery, tables: Sequence[Variable]) -> None:
    single = (delivery,)
    for table in tables:
        table._deliveries = (*table._deliveries, delivery) if table._deliveries else single


torch.library.impl("sok::deliver", "CompositeExplicitAutograd")(_deliver_lookup)
