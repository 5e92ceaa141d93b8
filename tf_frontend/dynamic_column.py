# SPDX-License-Identifier: Apache-2.0
"""Variables over columns of a dynamic table beside its rows: optimizer states, and stamps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit.tensorflow import dynamic_saving, stamps
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.saving import StateVariable


class ColumnVariable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A column: [slots, width], or [slots] where `width` is 0. It is shown its slots of now before it is used."""

    _sok_table: Any
    _sok_column: dict[str, Any]
    """`width`, `initial` and `dtype` of SokColumn."""

    def show(self) -> tf.Tensor:
        """Gives the variable the shape that the column has now."""
        return self._show(add=True)

    def _show(self, add: bool) -> tf.Tensor:
        """The same; without `add` a variable that was given no column stays as it is. Whether it was given one now."""
        return ops.sok_column(table=self._sok_table.handle, variable=self.handle, add=add, **self._sok_column)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        with tf.control_dependencies([self.show()]):
            yield

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        with self._shown():  # without a copy a tensor would lie on the table's memory
            return super()._read_variable_op()

    def sparse_read(self, *args: Any, **options: Any) -> Any:
        with self._shown():
            return super().sparse_read(*args, **options)

    def scatter_update(self, *args: Any, **options: Any) -> Any:
        with self._shown():
            return super().scatter_update(*args, **options)

    def write_slots(self, slots: tf.Tensor, rows: tf.Tensor) -> Any:
        """Overwrites them by slot. Returns the operation in a graph."""
        with self._shown():
            return super().write_slots(slots, rows)


class DynamicState(ColumnVariable, dynamic_saving.RestoredState, StateVariable):
    """An optimizer state of a dynamic table; `rowwise`: one number a slot."""

    def __init__(self, table: Any, name: str, initial: float, rowwise: bool) -> None:
        width = 0 if rowwise else table.dimension
        self._sok_table = table
        self._sok_column = {"width": width, "initial": initial, "dtype": tf.float32}
        sizes = [width] if width else []
        super().__init__(
            name=name,
            place=table.placement,
            initial_value=lambda: tf.zeros([0, *sizes]),
            shape=tf.TensorShape([None, *sizes]),
            dtype=tf.float32,
            trainable=False,
        )
        if tf.executing_eagerly():
            self.show()

    @property
    def table(self) -> Any:
        """The table whose state it is."""
        return self._sok_table

    def described(self) -> tuple[int, float]:
        """(elements a row, 0 where it is one number; what the rows of new keys have)."""
        return self._sok_column["width"], self._sok_column["initial"]

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        """(keys [n], what this rank keeps for each), in the order of the table's own `exported`."""
        table = self._sok_table
        table.refuse_store("the export of an optimizer's state (use sok.dump)")
        keys, slots = table.held_among(np.int64(0), table.num_slots())
        return tf.cast(keys, table.key_type), self.read_slots(slots)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return dynamic_saving.content(self._sok_table, self)

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        dynamic_saving.restore(self._sok_table, self, restored_tensors)
        return tf.no_op()

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicState:
        raise NotImplementedError(
            f"a state of table '{self._sok_table.table_name}', which is dynamic, cannot be copied: make another "
            "optimizer, and give it what sok.dump or tf.train.Checkpoint saved"
        )


class DynamicStamps(ColumnVariable, stamps.Stamps):
    """The stamps of a dynamic table."""

    def __init__(self, table: Any, **options: Any) -> None:
        self._sok_table = table
        self._sok_column = {"width": 0, "initial": 0.0, "dtype": tf.int64}
        super().__init__(None, **options)

    def begin(self, table: Any) -> Any:
        begun = self._show(add=True)
        with tf.control_dependencies([begun]):
            size = tf.where(begun, tf.raw_ops.VariableShape(input=self.handle, out_type=tf.int64)[0], 0)

            def mark(first: tf.Tensor) -> list[tf.Tensor]:
                end = tf.minimum(first + stamps.SLOTS_OF_CALL, size)
                marked = stamps.mark(table, tf.range(first, end))
                with tf.control_dependencies([] if marked is None else [marked]):
                    return [tf.identity(end)]

            ended = tf.while_loop(lambda first: first < size, mark, [tf.constant(0, tf.int64)])[0]
        return None if tf.executing_eagerly() else ended.op

    def show(self) -> tf.Tensor:
        return self._show(add=False)
