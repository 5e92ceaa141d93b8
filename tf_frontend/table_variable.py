# SPDX-License-Identifier: Apache-2.0
"""What the tables of this package are alike: variables with a name, a placement, and stamps that follow their rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit.placement import Placed, Placement
from sparse_operation_kit.tensorflow import stamps
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


class TableVariable(Placed, ShardedVariable):
    """A table: its slots on this rank, [slots, dimension], as a `tf.Variable`."""

    _variable_call = None  # which would match the arguments with those of tf.Variable, for nothing

    def __init__(self, table_name: str, place: Placement, **options: Any) -> None:
        self._sok_name = table_name
        self._placement = place
        self._sok_stamps: tf.Variable | None = None
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

    @property
    def table_name(self) -> str:
        """The table's name, without scopes and TensorFlow's suffix: what its initial rows depend on."""
        return self._sok_name

    # What the two kinds of tables do differently where slots are not known yet, or no longer matter.

    def check_keys(self, dtype: tf.DType, where: str, what: str) -> None:
        """Raises TypeError unless `what`, of this dtype, may be keys of the table."""
        if dtype not in (tf.int32, tf.int64):
            raise TypeError(f"{where}: {what} must be int32 or int64, got {dtype.name}")

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        """(keys [n] int64, rows [n, dimension]) of this rank."""
        raise NotImplementedError

    def new_state(self, name: str, initial: float, rowwise: bool) -> StateVariable:
        """What there is one of for each slot, a row of float32, or a number where it is `rowwise`; `initial` where
        nothing was written. For a scope that is beside the table.
        """
        raise NotImplementedError

    def new_stamps(self, **options: Any) -> tf.Variable:
        """An int64 variable [0], which has an element a slot where somebody wants to know when rows changed. For a
        scope that is beside the table; options: as of tf.Variable.
        """
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
