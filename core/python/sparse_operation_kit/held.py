# SPDX-License-Identifier: Apache-2.0
"""Tables as what runs between steps sees them (dump and load, changed rows): columns over slots, and keys that name
the slots. A frontend says how the columns of its framework are read and written.
"""

from __future__ import annotations

import abc
from typing import Any, Protocol

import numpy as np

from sparse_operation_kit.checkpoint.header import stored_dtype
from sparse_operation_kit.placement import Placement

Array = np.ndarray[Any, Any]
Slots = slice | Array
"""Slots of this rank: [n] int64, or a slice of step 1 where they follow one another."""


class Column(Protocol):
    """An array over this rank's slots, [slots, dimension] or [slots], wherever it is: rows, or an optimizer's state."""

    def read(self, slots: Slots) -> Array:
        """Its elements, in host memory; the column's own memory where it is there. bfloat16 as float32."""

    def write(self, slots: Slots, values: Array) -> None:
        """Overwrites elements; `values`, of any floating dtype, are rounded to nearest and last until it returns."""


class HeldTable(abc.ABC):
    """A table as this rank holds it.

    name:       without TensorFlow's output number
    row_dtype:  NumPy's name of it, or "bfloat16"
    rows:       its column of rows
    """

    def __init__(self, name: str, placement: Placement, row_dtype: str, rows: Column) -> None:
        self.name, self.placement, self.row_dtype, self.rows = name, placement, row_dtype, rows

    @property
    def stored_dtype(self) -> str:
        """The dtype in which rows are handed around as NumPy arrays."""
        return stored_dtype(self.row_dtype)

    @property
    def num_slots(self) -> int:
        """How many rows this rank holds."""
        return self.placement.local_rows

    def keys(self, slots: Slots) -> Array:
        """The global keys of slots, [n] int64."""
        numbers = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        return np.asarray(self.placement.global_keys(numbers.astype(np.int64)))

    def slots(self, keys: Array) -> Slots:
        """The slots of global keys that this rank holds."""
        slots = self.placement.key_map(keys)
        first, count = int(slots[0]) if len(slots) else 0, len(slots)
        follow = count == 0 or (int(slots[-1]) - first == count - 1 and bool((np.diff(slots) == 1).all()))
        return slice(first, first + count) if follow else slots

    @abc.abstractmethod
    def track(self) -> None:
        """Keeps from now on when each row changes; every row counts as changed now. A second call changes nothing."""

    @abc.abstractmethod
    def changed(self, stamp: int) -> Array:
        """[n] int64: the slots that changed at `stamp` or later, of a tracked table."""

    @abc.abstractmethod
    def overwrite(self, keys: Array, rows: Array) -> None:
        """Writes rows [n, dimension] of `stored_dtype` to global keys [n] that this rank holds, each once; stamped."""
