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
from sparse_operation_kit.torch import runtime, stamps
from sparse_operation_kit.torch.gradient import Part, PendingGradient, overwritten

if TYPE_CHECKING:
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

    def apply(self, tables: Sequence[Variable], states: Any, spec: OptimizerSpec) -> None:
        """One optimizer step of all tables of the call, given in their order, all of which have a gradient.

        Args:
          states: torch.classes.sok.TensorList of the optimizer's states, one after the other, of all tables each.

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

    def apply(self, tables: Sequence[Variable], states: Any, spec: OptimizerSpec) -> None:
        step = (len(spec.states), int(spec.kind), int(spec.flags), spec.numbers, self.scale * spec.gradient_sign)
        with stamps.known(tables) as (tracked, positions):
            if not self._handle.apply(states, *step, tracked, positions, stamps.now(tracked)):
                raise overwritten(tables[0]._sok_name)

    def _make_parts(self, position: int, name: str) -> list[Part]:
        if not self._handle.unchanged():
            raise overwritten(name)
        return [Part(*part) for part in zip(*self._handle.parts(position), strict=True)]


class ExchangedDelivery(Delivery):
    """Of several ranks: what came from each for each table, which may be nothing (csrc/exchanged_gradients.h)."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any, ids: tuple[int, ...], scale: float) -> None:
        super().__init__(ids, scale)
        self._handle = handle

    def beside_others(self) -> bool:
        return bool(self._handle.beside_others())

    def apply(self, tables: Sequence[Variable], states: Any, spec: OptimizerSpec) -> None:
        step = (len(spec.states), int(spec.kind), int(spec.flags), spec.numbers, self.scale * spec.gradient_sign)
        with stamps.known(tables) as (tracked, positions):
            self._handle.apply(states, *step, tracked, positions, stamps.now(tracked))

    def _make_parts(self, position: int, name: str) -> list[Part]:
        return [
            Part(slots, values, row_splits=splits, unique=splits is None)
            for slots, values, splits in zip(*self._handle.parts(position), strict=True)
        ]


def _deliver_lookup(handle: Any, tables: list[Variable], delivered: list[int], carried: list[int]) -> list[Tensor]:
    """The op `deliver` (csrc/library.cc)."""
    return _leave(LookupDelivery(handle, tuple(map(id, tables))), tables, delivered, carried)


def _deliver_exchanged(handle: Any, tables: list[Variable], delivered: list[int], carried: list[int]) -> list[Tensor]:
    """The op `deliver_exchanged`."""
    delivery = ExchangedDelivery(handle, tuple(map(id, tables)), runtime.get().gradient_scale)
    return _leave(delivery, tables, delivered, carried)


def _leave(delivery: Delivery, tables: list[Variable], delivered: list[int], carried: list[int]) -> list[Tensor]:
    single = (delivery,)
    for table in tables if len(delivered) == len(tables) else [tables[i] for i in delivered]:
        table._deliveries = (*table._deliveries, delivery) if table._deliveries else single
    return [delivery.pending(tables[i]) for i in carried]


torch.library.impl("sok::deliver", "CompositeExplicitAutograd")(_deliver_lookup)
torch.library.impl("sok::deliver_exchanged", "CompositeExplicitAutograd")(_deliver_exchanged)
