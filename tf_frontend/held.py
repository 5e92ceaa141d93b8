# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer states as columns over slots, read and written between steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.held import Array, HeldTable, Slots
from sparse_operation_kit.tensorflow import stamps
from sparse_operation_kit.tensorflow.group import on_host
from sparse_operation_kit.tensorflow.table_io import assign
from sparse_operation_kit.tensorflow.variable import Variable


class Column:
    """A variable, read and written in pieces: reading it whole would copy it."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable
        self._on_cpu = "GPU" not in (variable.device or "")

    def read(self, slots: Slots) -> Array:
        """See held.Column."""

        def gathered(indices: Any) -> Any:
            values = tf.gather(self._variable, indices)
            return tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values

        return np.asarray(on_host((self._variable._unique_id, "read"), gathered, _indices(slots)))

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        # TensorFlow may use an array's memory as it is, and a copy to a GPU may be under way when this returns.
        values = values if self._on_cpu else np.array(values)

        def update(indices: Any, new: Any) -> Any:
            new = tf.cast(tf.convert_to_tensor(new), self._variable.dtype)
            result = self._variable.scatter_update(tf.IndexedSlices(new, indices))
            return None if tf.executing_eagerly() else result.op

        on_host((self._variable._unique_id, "write"), update, _indices(slots), values)


def _indices(slots: Slots) -> Array:
    return np.arange(slots.start, slots.stop, dtype=np.int64) if isinstance(slots, slice) else slots


class Table(HeldTable):
    """This rank's rows of a `sok.Variable`."""

    def __init__(self, variable: Variable) -> None:
        super().__init__(variable.table_name, variable.placement, variable.dtype.name, Column(variable))
        self.variable = variable

    def track(self) -> None:
        """See HeldTable."""
        on_host((self.variable._unique_id, "track"), lambda: stamps.start(self.variable) or ())

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        key = (self.variable._unique_id, "changed")
        return np.asarray(on_host(key, lambda since: stamps.changed(self.variable, since), np.int64(stamp)))

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""

        def update(where: Any, new: Any) -> Any:
            result = assign(self.variable, where, new)
            return () if tf.executing_eagerly() else result

        on_host((self.variable._unique_id, "overwrite"), update, keys, rows)
