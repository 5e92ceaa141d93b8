# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer states as columns over slots, read and written between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.held import Array, Compared, HeldDynamicTable, HeldTable, Slots
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.stored_rows import StateColumn
from sparse_operation_kit.tensorflow import keras_compat, runtime, stamps
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.group import on_host
from sparse_operation_kit.tensorflow.saving import ShardedVariable
from sparse_operation_kit.tensorflow.table_io import assign
from sparse_operation_kit.tensorflow.table_stack import Member
from sparse_operation_kit.tensorflow.table_variable import TableRows, TableVariable


class Column:
    """A variable, or its slots from `first` on, read and written in pieces: reading it whole would copy it."""

    def __init__(self, variable: ShardedVariable, first: int = 0) -> None:
        self._variable = self.owner = variable
        self._first = first
        self._on_cpu = "GPU" not in (variable.device or "")

    def read(self, slots: Slots) -> Array:
        """See held.Column; not to be written to."""

        def gathered(indices: Any) -> Any:
            values = self._gather(indices)
            return tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values

        indices = self._first + _indices(slots)
        if tf.executing_eagerly():
            return np.asarray(gathered(tf.convert_to_tensor(indices)))  # Tensor.numpy() would copy it
        return np.asarray(on_host((self._variable._unique_id, "read"), gathered, indices))

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        # TensorFlow may use an array's memory as it is, and a copy to a GPU may be under way when this returns.
        values = values if self._on_cpu else np.array(values)

        def update(indices: Any, new: Any) -> Any:
            return self._scatter(indices, tf.cast(tf.convert_to_tensor(new), self._variable.dtype))

        on_host((self._variable._unique_id, "write"), update, self._first + _indices(slots), values)

    def _gather(self, slots: Any) -> Any:
        return self._variable.read_slots(slots)

    def _scatter(self, slots: Any, rows: Any) -> Any:
        return self._variable.write_slots(slots, rows)


class PlainColumn(Column):
    """A variable that knows nothing of tables."""

    def _gather(self, slots: Any) -> Any:
        return tf.gather(self._variable, slots)

    def _scatter(self, slots: Any, rows: Any) -> Any:
        written = self._variable.scatter_update(tf.IndexedSlices(rows, slots))
        return None if tf.executing_eagerly() else written.op


def _indices(slots: Slots) -> Array:
    return np.arange(slots.start, slots.stop, dtype=np.int64) if isinstance(slots, slice) else slots


class Table(HeldTable):
    """This rank's rows of a table.

    variable: the variable; first_slot: where the table begins in it.
    """

    def __init__(self, table: TableRows) -> None:
        whole: Any = table.stack if isinstance(table, Member) else table
        self.variable: TableVariable = whole
        self.first_slot: int = table.slots.start if isinstance(table, Member) else 0
        self._table = table
        rows = Column(self.variable, self.first_slot)
        super().__init__(table.table_name, table.placement, table.dtype.name, rows)

    def track(self) -> None:
        """See HeldTable."""
        on_host((self.variable._unique_id, "track"), lambda: stamps.start(self.variable) or ())

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        key = self.variable._unique_id
        size = int(on_host((key, "stamps"), lambda: stamps.size(self.variable)))
        found = [np.zeros(0, np.int64)]
        for first in range(0, size, stamps.SLOTS_OF_CALL):
            given = np.int64(stamp), np.int64(first)
            found.append(
                np.asarray(on_host((key, "changed"), lambda *args: stamps.changed(self.variable, *args), *given))
            )
        slots = np.concatenate(found)
        if not isinstance(self._table, Member):
            return slots
        slots = slots - self.first_slot
        return slots[(slots >= 0) & (slots < self.num_entries)]

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""

        def update(where: Any, new: Any) -> Any:
            result = assign(self._table, where, new)
            return () if tf.executing_eagerly() else result

        on_host((self.variable._unique_id, self.name, "overwrite"), update, keys, rows)


class Replicated(Table):
    """A variable that each rank holds whole, as a table of a layer. `of_keras` is what an optimizer knows it by."""

    def __init__(self, variable: Any) -> None:
        state = runtime.get()
        inner = keras_compat.raw(variable)
        rows, dimension = inner.shape
        place = Placement(rows, dimension, num_ranks=state.num_ranks, rank=state.rank)
        HeldTable.__init__(self, "replicated", place, inner.dtype.name, PlainColumn(inner))
        self.variable, self.first_slot, self.of_keras = inner, 0, variable

    def track(self) -> None:
        """See HeldTable."""
        if not hasattr(self.variable, "_sok_compared"):
            self.variable._sok_compared = Compared(self._read())

    def changed(self, stamp: int) -> Array:
        """See HeldTable; slots are all rows."""
        return self.variable._sok_compared.changed(self._read(), stamp)

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        self.rows.write(keys, rows)

    def _read(self) -> Array:
        return self.rows.read(slice(0, self.placement.num_rows))


class _Scores:
    """What rows of a dynamic table are evicted by."""

    def __init__(self, variable: DynamicVariable) -> None:
        self._variable = variable

    def read(self, slots: Slots) -> Array:
        """See held.Column."""
        return np.asarray(on_host((self._variable._unique_id, "scores"), self._variable.scores_at, _indices(slots)))

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        on_host((self._variable._unique_id, "set_scores"), self._variable.write_scores, _indices(slots), values)


class DynamicTable(Table, HeldDynamicTable):
    """This rank's rows of a `sok.DynamicVariable`."""

    variable: DynamicVariable

    def __init__(self, variable: DynamicVariable) -> None:
        super().__init__(variable)
        self.key_type = variable.key_type.name
        self.capacity = variable.capacity
        self.keep(_Scores(variable) if variable.has_scores else None)
        self.makes_room = variable.has_scores
        self.most_candidates = variable.most_candidates
        self.stored = variable.stored_rows

    def track(self) -> None:
        """See HeldTable."""
        self.refuse_store("what keeps changed rows and increments")
        super().track()

    def begin_dump(self) -> None:
        """See HeldTable."""
        self.variable.begin_dump()

    def _run(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """A method of the table."""
        return on_host((self.variable._unique_id, function.__name__), function, *arrays)

    @property
    def num_entries(self) -> int:
        """See HeldDynamicTable."""
        key = (self.variable._unique_id, "size")
        return int(on_host(key, lambda: tf.cast(self.variable.statistics().size, tf.int64)))

    @property
    def num_slots(self) -> int:
        """See HeldDynamicTable."""
        return int(self._run(self.variable.num_slots))

    def export(self, first_slot: int, size: int) -> tuple[Array, Array]:
        """See HeldDynamicTable."""
        keys, slots = self._run(self.variable.held_among, np.int64(first_slot), np.int64(size))
        return keys, slots

    def insert(self, keys: Array) -> Array:
        """See HeldDynamicTable."""
        return np.asarray(self._run(self.variable.insert, keys))

    def find(self, keys: Array) -> Array:
        """See HeldDynamicTable."""
        return np.asarray(self._run(self.variable.find, keys))

    def state_columns(self) -> list[StateColumn]:
        """See HeldDynamicTable."""
        return [StateColumn(state, Column(state), *state.described()) for state in self.variable.states()]

    def erase(self, keys: Array) -> None:
        """See HeldDynamicTable."""
        self._run(self.variable.erased, keys)

    def clear(self) -> None:
        """See HeldDynamicTable."""
        self._run(self.variable.clear)

    def reset_epoch(self) -> None:
        """See HeldDynamicTable."""
        on_host((self.variable._unique_id, "reset_epoch"), lambda: self.variable.begin_epoch(0))

    def candidates(self) -> Array:
        """See HeldDynamicTable."""
        return np.asarray(self._run(self.variable.candidates))

    def set_candidates(self, candidates: Array) -> None:
        """See HeldDynamicTable."""
        self._run(self.variable.set_candidates, candidates)

    def use_times(self) -> Array:
        """See HeldDynamicTable."""
        return np.asarray(self._run(self.variable.use_times))

    def set_use_times(self, times: Array) -> None:
        """See HeldDynamicTable."""
        self._run(self.variable.set_use_times, times)

    def generations(self, seconds: float) -> tuple[int, int, int]:
        """See HeldDynamicTable."""
        now, before, step = self._run(self.variable.generations, np.float64(seconds)).tolist()
        return now, before, step

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        return self.in_use(super().changed(stamp))

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        for piece in self.pieces(len(keys)):
            super().overwrite(keys[piece].astype(self.key_type), rows[piece])
