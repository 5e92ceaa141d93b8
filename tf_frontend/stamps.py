# SPDX-License-Identifier: Apache-2.0
"""When each row of a table changed last: the variable that says so, and who writes it.

`SokApply` takes the stamps of its tables and writes those of the rows that it steps; what changes rows in other ways
marks them with the functions of this module. The variable has no elements until the table is tracked, so tracking may
begin at any time, also after a tf.function was traced.

A stamp is the UTC time of the host in nanoseconds since 1970, read when the operation runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit.tensorflow import devices
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.slots import write

SLOTS_OF_CALL = 1 << 26
"""Of a table at once where all are looked at: TensorFlow's operations on GPUs take fewer than 2^31 elements."""


class Stamps(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """The stamps of a table: int64 [0], and [slots] where somebody wants to know when rows changed.

    Not by tf.Variable itself, of which a strategy would make one a replica.
    """

    def __init__(self, num_slots: int | None, **options: Any) -> None:
        """num_slots: of the table; None where more may come."""
        self._sok_slots = num_slots
        super().__init__(
            lambda: tf.zeros([0], tf.int64), shape=tf.TensorShape([None]), dtype=tf.int64, trainable=False, **options
        )

    def show(self) -> Any:
        """What has to run before it is used. Returns the operation in a graph."""
        return None

    def write_slots(self, slots: tf.Tensor, values: tf.Tensor) -> Any:
        """Overwrites them by slot. Returns the operation in a graph."""
        return write(self, slots, values, self.name)

    def begin(self, table: Any) -> Any:
        """From now on they are kept, unless they were before: every row counts as changed now. Returns the operation in
        a graph.
        """
        del table
        slots = self._sok_slots
        if tf.executing_eagerly():
            if slots and int(_size(self)) != slots:
                self.assign(tf.fill([slots], tf.constant(time.time_ns(), tf.int64)))
            return None
        kept = tf.cond(tf.equal(_size(self), slots), self.read_value, lambda: tf.fill([slots], _now()))
        return self.assign(kept).op


def variable(table: Any) -> Stamps:
    """The table's stamps, int64 [slots], or [0] while it is not tracked."""
    if table._sok_stamps is None:
        table._sok_stamps = make(table)
    return table._sok_stamps


def make(table: Any, **options: Any) -> Stamps:
    """The variable of a table that is not tracked yet; `options` as of tf.Variable."""
    with tf.init_scope(), devices.beside(table):
        return table.new_stamps(name=f"{table.table_name}/stamps", **options)


class Together(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
    """The stamps of several tables as the one resource that `SokApply` takes.

    Whoever calls a tf.function pays 1.3 to 1.8 us for each variable that it captures, tracked or not: with stamps that
    were captured one by one a step of 100 tables took 15 to 35% longer.
    """

    def __init__(self, tables: Sequence[Any]) -> None:
        super().__init__()
        with tf.init_scope(), devices.beside(tables[0]):
            self._resource_handle = ops.sok_stamps([variable(table).handle for table in tables])

    def _create_resource(self) -> tf.Tensor:
        """Those of a saved model, whose tables nobody can track."""
        return ops.sok_stamps([])


def unseen(table: Any) -> bool:
    """Whether a change that is about to be made cannot be stamped, because XLA compiles it: it has no clock.

    Raises NotImplementedError for a table that is tracked; later `start` refuses the table.
    """
    if not devices.is_in_xla():
        return False
    if table._sok_stamps is not None and table._sok_tracked:
        raise _compiled(table)
    table._sok_compiled = True
    return True


def _compiled(table: Any) -> NotImplementedError:
    return NotImplementedError(
        f"table '{table.table_name}' is changed in a function that XLA compiles, where changed rows cannot be noted: "
        "use OptimizerWrapper, or give the optimizer jit_compile=False"
    )


def start(table: Any) -> Any:
    """Begins to track, unless it did before: every row counts as changed now. Returns the operation in a graph.

    Raises NotImplementedError for a table that a function compiled by XLA changes.
    """
    if table._sok_compiled:
        raise _compiled(table)
    table._sok_tracked = True
    return variable(table).begin(table)


def mark(table: Any, slots: Any) -> Any:
    """Says that the rows `slots` [n] change now. Returns the operation in a graph."""
    stamps = variable(table)
    slots = slots[: tf.where(_size(stamps) > 0, tf.size(slots, tf.int64), 0)]
    return stamps.write_slots(slots, tf.fill(tf.shape(slots), _now()))


def mark_all(table: Any) -> Any:
    """Says that every row changes now. Returns the operation in a graph."""
    stamps = variable(table)
    result = stamps.assign(tf.fill([_size(stamps)], _now()))
    return None if tf.executing_eagerly() else result.op


def size(table: Any) -> tf.Tensor:
    """How many slots have stamps, int64: 0 while the table is not tracked."""
    return _size(variable(table))


def changed(table: Any, stamp: Any, first: Any) -> tf.Tensor:
    """[n] int64: those of SLOTS_OF_CALL slots from `first` on whose stamps are `stamp` or later."""
    stamps = variable(table)
    slots = tf.range(first, tf.minimum(first + SLOTS_OF_CALL, _size(stamps)))
    return tf.boolean_mask(slots, stamps.sparse_read(slots) >= tf.cast(stamp, tf.int64))


def _size(stamps: Stamps) -> tf.Tensor:
    # Of the variable, not of its value: reading that would copy it.
    shown = stamps.show()
    with tf.control_dependencies([] if shown is None else [shown]):
        return tf.raw_ops.VariableShape(input=stamps.handle, out_type=tf.int64)[0]


def _now() -> tf.Tensor:
    # The op counts whole microseconds in a float64; rounding takes back what the division into seconds lost. It runs on
    # the host alone, wherever its surroundings want to be.
    with devices.on_host():
        return tf.cast(tf.round(tf.timestamp() * 1e6), tf.int64) * 1000
