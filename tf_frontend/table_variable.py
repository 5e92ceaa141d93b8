# SPDX-License-Identifier: Apache-2.0
"""What the tables of this package are alike: variables with a name, a placement, and stamps that follow their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from sparse_operation_kit.placement import Placed, Placement
from sparse_operation_kit.tensorflow import saving, stamps
from sparse_operation_kit.tensorflow.saving import ShardedVariable, StateVariable

WRITERS = (
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_sub",
    "scatter_update",
    "scatter_nd_add",
    "scatter_nd_max",
    "scatter_nd_min",
    "scatter_nd_sub",
    "scatter_nd_update",
    "_strided_slice_assign",
)
"""The methods of tf.Variable that write."""


class TableRows(Placed):
    """Rows of a table that this rank holds."""

    _sok_name: str
    dtype: tf.DType

    saved_parts: tuple[str, ...] = (saving.VALUE, saving.LAYOUT)
    """What every `content` has."""

    @property
    def table_name(self) -> str:
        """The table's name, without scopes and TensorFlow's suffix: what its initial rows depend on."""
        return self._sok_name

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        """(keys [n] int64, rows [n, dimension]) of this rank."""
        raise NotImplementedError

    def held(self) -> Any:
        """The `held.Table`, as what runs between steps sees it."""
        from sparse_operation_kit.tensorflow.held import Table

        return Table(self)

    def content(self, column: Any) -> dict[str, Any]:
        """What Keras's files have of a column, the table itself or an optimizer state of it."""
        return saving.content(self, column)

    def prepare(self, column: Any, saved: Mapping[str, Any]) -> Callable[[], Any]:
        """What gives a column what `content` had. Raises ValueError for what it cannot take."""
        return saving.prepare(column, saved)


class TableVariable(TableRows, ShardedVariable):
    """A table: its slots on this rank, [slots, dimension], as a `tf.Variable`."""

    _variable_call = None  # which would match the arguments with those of tf.Variable, for nothing

    has_index = False
    """Whether an index gives its keys their slots; then how many there are is known when it runs."""

    def __init__(self, table_name: str, place: Placement, **options: Any) -> None:
        self._sok_name = table_name
        self._placement = place
        self._sok_stamps: stamps.Stamps | None = None
        self._sok_tracked = False  # somebody asked for changed rows
        self._sok_compiled = False  # a function that XLA compiles changes rows, which nobody can note
        self.scopes: list[str] = []
        """`update` of the OptimizerScopes that it is in, those of all threads: strategies start some for what they run.
        """
        strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        # The strategy makes nothing of a table, but tf_keras asks whether it was made in the model's scope.
        super().__init__(name=table_name, distribute_strategy=strategy, **options)
        if not tf.executing_eagerly() and not tf.inside_function():
            # Made with the table, so that what initialises the graph's variables knows of them.
            self._sok_stamps = stamps.make(self, collections=options.get("collections"))

    def write_slots(self, slots: tf.Tensor, rows: tf.Tensor) -> Any:
        written = super().write_slots(slots, rows)
        with tf.control_dependencies([] if written is None else [written]):
            return stamps.mark(self, slots)

    def config(self) -> dict[str, Any]:
        """The keywords of a table like it, in plain data; of a static one without its initializer, which it forgets."""
        return {
            "shape": [self.placement.num_rows, self.placement.dimension],
            "dtype": self.dtype.name,
            "mode": self.placement.mode,
            "name": self.table_name,
            "trainable": self.trainable,
        }

    # What the kinds of tables do differently where slots are not known yet, or no longer matter.

    @property
    def device_rows(self) -> int:
        """How many rows are in the memory of a GPU that it is on, where the others are in the host's; 0: all."""
        return 0

    @property
    def key_type(self) -> tf.DType:
        """tf.int32 or tf.int64: of what keys it gives."""
        return tf.int64

    def check_plain(self, optimizer: Any) -> None:
        """Raises TypeError unless an optimizer of Keras by itself may update it as any variable."""

    def check_keys(self, dtype: tf.DType, where: str, what: str) -> None:
        """Raises TypeError unless `what`, of this dtype, may be keys of the table."""
        if dtype not in (tf.int32, tf.int64):
            raise TypeError(f"{where}: {what} must be int32 or int64, got {dtype.name}")

    def new_state(self, name: str, initial: float, rowwise: bool) -> StateVariable:
        """What there is one of for each slot, a row of float32, or a number where it is `rowwise`; `initial` where
        nothing was written. For a scope that is beside the table.
        """
        raise NotImplementedError

    def new_stamps(self, **options: Any) -> stamps.Stamps:
        """Its stamps, which nobody wants to know yet. For a scope beside the table; options: as of tf.Variable."""
        raise NotImplementedError

    def end_step(self) -> Any:
        """After a step that was not SokApply's. Returns the operation in a graph."""
        return None


def is_table(value: object) -> bool:
    """Whether `value` is a table of this package, or a Keras variable around one."""
    return isinstance(value, TableVariable) or isinstance(getattr(value, "_value", None), TableVariable)


def as_table(value: Any) -> TableVariable:
    """The table that `value` is or wraps (as Keras 3's variables do). Raises TypeError for anything else."""
    if isinstance(value, TableVariable):
        return value
    inner = getattr(value, "_value", None)
    if isinstance(inner, TableVariable):
        return inner
    raise TypeError(f"params must be tables (sok.Variable or sok.DynamicVariable), got {_described(value)}")


def _described(value: Any) -> str:
    name = getattr(value, "name", None)
    return f"a {type(value).__name__}" + (f" named {name!r}" if isinstance(name, str) else "")
