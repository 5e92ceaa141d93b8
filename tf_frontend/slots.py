# SPDX-License-Identifier: Apache-2.0
"""Rows of variables by slot: of tables, their states and their stamps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow._ops import ops


def write(variable: Any, slots: Any, rows: Any, table_name: str) -> Any:
    """Overwrites rows of `variable` by slot [n]; of equal slots the last one counts. Returns the operation in a graph.

    Raises tf.errors.InvalidArgumentError for a slot outside of the variable; on a GPU `check_errors` does later.
    """
    rows = tf.convert_to_tensor(rows, variable.dtype)
    slots = tf.cast(slots, tf.int64)
    return ops.sok_write_slots(variable=variable.handle, slots=slots, rows=rows, table_name=table_name)
