# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer states as columns over slots, read and written between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparse_operation_kit.held import Array, Compared, HeldDynamicTable, HeldTable, Slots
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.stored_rows import StateColumn
from sparse_operation_kit.torch import runtime, stamps
from sparse_operation_kit.torch.table_io import assign
from sparse_operation_kit.torch.table_parameter import TableParameter, TableRows

if TYPE_CHECKING:
    from sparse_operation_kit.torch.dynamic_variable import DynamicVariable

EVERY = slice(None)


class Column:
    """A tensor, or some slots of it that follow one another: on the CPU read in place, elsewhere copied in pieces."""

    def __init__(self, tensor: Tensor, slots: slice = EVERY) -> None:
        self.owner = tensor
        self._slots = slots

    @property
    def _tensor(self) -> Tensor:
        held = Tensor.detach(self.owner)  # with the slots of now
        return held if self._slots is EVERY else held[self._slots]

    def read(self, slots: Slots) -> Array:
        """See held.Column."""
        rows = self._tensor[_indices(slots, self._tensor)].cpu()
        return np.asarray((rows.float() if rows.dtype == torch.bfloat16 else rows).numpy())

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        new = torch.from_numpy(np.ascontiguousarray(values)).to(self._tensor.device, self._tensor.dtype)
        self._tensor[_indices(slots, new)] = new


def _indices(slots: Slots, tensor: Tensor) -> slice | Tensor:
    return slots if isinstance(slots, slice) else torch.from_numpy(slots).to(tensor.device)


class _Scores:
    """What rows of a dynamic table are evicted by."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def read(self, slots: Slots) -> Array:
        """See held.Column."""
        scores = self._core.scores()
        return np.asarray(scores[_indices(slots, scores)].cpu().numpy())

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        places = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        device = self._core.scores().device
        self._core.set_scores(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (places, values)))


class Table(HeldTable):
    """This rank's rows of a table.

    variable: the parameter; within: the table's slots among those of the parameter.
    """

    def __init__(self, table: TableRows) -> None:
        dtype = str(table.dtype).removeprefix("torch.")
        self.variable: TableParameter = table.whole
        self.within: slice = getattr(table, "slots", EVERY)
        self._table = table
        super().__init__(table.name, table.placement, dtype, Column(self.variable, self.within))

    def track(self) -> None:
        """See HeldTable."""
        stamps.start(self.variable)

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        held = stamps.of(self.variable)
        assert held is not None
        return np.asarray(torch.nonzero(held[self.within] >= stamp).flatten().cpu().numpy())

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        assign(self._table, torch.from_numpy(keys), torch.from_numpy(rows))


class Replicated(Table):
    """A parameter that each rank holds whole, as a table of a layer."""

    def __init__(self, parameter: Tensor) -> None:
        state = runtime.get()
        rows, dimension = parameter.shape
        place = Placement(rows, dimension, num_ranks=state.num_ranks, rank=state.rank)
        dtype = str(parameter.dtype).removeprefix("torch.")
        HeldTable.__init__(self, "replicated", place, dtype, Column(parameter))
        self.variable, self.within = parameter, EVERY  # type: ignore[assignment]

    def track(self) -> None:
        """See HeldTable."""
        if not hasattr(self.variable, "_sok_compared"):
            self.variable._sok_compared = Compared(self.rows.read(EVERY))  # type: ignore[attr-defined]

    def changed(self, stamp: int) -> Array:
        """See HeldTable; slots are all rows."""
        self.track()  # where the parameter was replaced
        return self.variable._sok_compared.changed(self.rows.read(EVERY), stamp)  # type: ignore[attr-defined]

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        self.rows.write(keys, rows)


class DynamicTable(Table, HeldDynamicTable):
    """This rank's rows of a `sok.DynamicVariable`."""

    variable: DynamicVariable

    def __init__(self, variable: DynamicVariable) -> None:
        super().__init__(variable)
        self._core = variable._core
        self.key_type = str(variable.key_type).removeprefix("torch.")
        self.capacity = variable.capacity
        self.keep(None if self._core.scores() is None else _Scores(self._core))
        made = variable._made
        self.makes_room = made.evict_strategy is not None or made.policy.time_to_live > 0
        self.most_candidates = variable.most_candidates
        self.stored = variable._stored

    def track(self) -> None:
        """See HeldTable."""
        self.refuse_store("what keeps changed rows and increments")
        super().track()

    @property
    def num_entries(self) -> int:
        """See HeldDynamicTable."""
        return int(self._core.size())

    @property
    def num_slots(self) -> int:
        """See HeldDynamicTable."""
        return self.variable.shape[0]

    def export(self, first_slot: int, size: int) -> tuple[Array, Array]:
        """See HeldDynamicTable."""
        keys, slots = self._core.held(first_slot, size)
        return keys.cpu().numpy(), slots.cpu().numpy()

    def insert(self, keys: Array) -> Array:
        """See HeldDynamicTable."""
        given = torch.from_numpy(np.ascontiguousarray(keys)).to(self.variable.device)
        return np.asarray(self._core.locate(given, True).cpu().numpy())

    def find(self, keys: Array) -> Array:
        """See HeldDynamicTable."""
        return np.asarray(self._core.locate(torch.from_numpy(keys).to(self.variable.device), False).cpu().numpy())

    def state_columns(self) -> list[StateColumn]:
        """See HeldDynamicTable."""
        return [StateColumn(state, Column(state), width, initial) for state, width, initial in self.variable.states()]

    def erase(self, keys: Array) -> None:
        """See HeldDynamicTable."""
        self._core.erase(torch.from_numpy(keys).to(self.variable.device))

    def clear(self) -> None:
        """See HeldDynamicTable."""
        self._core.clear()

    def reset_epoch(self) -> None:
        """See HeldDynamicTable."""
        self._core.set_epoch(0)

    def candidates(self) -> Array:
        """See HeldDynamicTable."""
        return np.asarray(self._core.candidates().numpy())

    def set_candidates(self, candidates: Array) -> None:
        """See HeldDynamicTable."""
        self._core.set_candidates(torch.from_numpy(np.ascontiguousarray(candidates)))

    def use_times(self) -> Array:
        """See HeldDynamicTable."""
        return np.asarray(self._core.use_times().numpy())

    def set_use_times(self, times: Array) -> None:
        """See HeldDynamicTable."""
        self._core.set_use_times(torch.tensor(times, dtype=torch.int64, device="cpu"))

    def generations(self, seconds: float) -> tuple[int, int, int]:
        """See HeldDynamicTable."""
        now, before, step = self._core.generations(seconds)
        return now, before, step

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        return self.in_use(super().changed(stamp))

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        for piece in self.pieces(len(keys)):
            super().overwrite(keys[piece].astype(self.key_type), rows[piece])
