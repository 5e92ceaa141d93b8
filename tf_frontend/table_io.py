# SPDX-License-Identifier: Apache-2.0
"""Reading and writing rows by global key, and telling tables from other variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit.tensorflow import devices, stamps, stored
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Tables
from sparse_operation_kit.tensorflow.dynamic_column import DynamicState
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.table_stack import Member, refuse_stack
from sparse_operation_kit.tensorflow.table_variable import as_table, is_table


@as_written
def assign(var: Any, indices: Any, values: Any) -> Any:
    """Overwrites rows of a table by global key, on the rank that holds them; a dynamic table inserts those it lacks.

    Args:
      var: a table, a member of a stack, or what `get_slot` gave for a dynamic table, whose keys stay as they are.
      indices: [n] int32 or int64 global keys that belong to this rank; of equal keys the last one counts.
      values: [n, dimension] floating. Another dtype than the table's goes through float32 and is rounded to nearest.

    Returns:
      The table; in a tf.compat.v1 graph the operation to run.

    Raises:
      TypeError: not a table, or indices or values of another dtype.
      ValueError, tf.errors.InvalidArgumentError: shapes that do not fit; a key outside the table or of another rank,
        which the message names; of a state a key that this rank does not hold. Nothing is written then.
      tf.errors.ResourceExhaustedError: a dynamic table has no room for the keys that are new. Nothing is written then.
    """
    refuse_stack(var, "assign")
    if isinstance(var, DynamicState):
        return _assign_state(var, indices, values)
    member = var if isinstance(var, Member) else None
    table = as_table(var) if member is None else member.stack
    name = table.table_name if member is None else member.table_name
    keys = tf.convert_to_tensor(indices)
    table.check_keys(keys.dtype, f"table '{name}'", "indices")
    rows = tf.convert_to_tensor(values)
    if not rows.dtype.is_floating:
        raise TypeError(f"table '{name}': values must be floating, got {rows.dtype.name}")
    if member is not None:
        keys = member.in_stack(keys)
    with stored.alone([table], [keys, rows]):
        stored.bring(table, keys)
        slots = ops.sok_assign(
            tables=[table.handle],
            target=table.handle,
            keys=keys,
            values=rows if rows.dtype == table.dtype else tf.cast(rows, tf.float32),
            **Tables.of([table]).attributes(),
        )
        marked = stamps.mark(table, slots)
    if tf.executing_eagerly() or tf.inside_function():
        return table
    return marked


def _assign_state(state: DynamicState, indices: Any, values: Any) -> Any:
    """assign, of a state of a dynamic table."""
    table, rows = state.table, tf.convert_to_tensor(values)
    where = f"state '{state.name}' of table '{table.table_name}'"
    keys = tf.convert_to_tensor(indices)
    table.check_keys(keys.dtype, where, "indices")
    if not rows.dtype.is_floating:
        raise TypeError(f"{where}: values must be floating, got {rows.dtype.name}")
    width = state.shape[1:].as_list()
    with stored.alone([table], [keys, rows]):
        slots = table.find(keys)
        missing = tf.boolean_mask(keys, slots < 0)
        checks = [
            tf.debugging.assert_equal(
                tf.shape(rows), tf.concat([tf.shape(keys), width], 0), f"{where}: values, one a key"
            ),
            tf.debugging.Assert(tf.equal(tf.size(missing), 0), [f"{where}: this rank does not hold the keys", missing]),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            written = state.write_slots(tf.identity(slots), tf.cast(rows, state.dtype))
    return state if tf.executing_eagerly() or tf.inside_function() else written


@as_written
def export(var: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """This rank's rows of a table.

    Args:
      var: a table, a member of a stack, or what `get_slot` gave for a dynamic table.

    Returns:
      (indices [n], values [n, dimension] of the table's dtype), in host memory: global keys and their rows. Of a static
      table the keys are int64 and ascending; of a dynamic one they are of its key_type, in the order of its slots.

    Raises:
      TypeError: not a table. As `check_errors`, where the table is on a GPU.
    """
    refuse_stack(var, "export")
    if isinstance(var, (Member, DynamicState)):
        source, table = var, var.stack if isinstance(var, Member) else var.table
    else:
        source = table = as_table(var)
    with devices.beside(table):
        check = ops.sok_check_errors()
    with tf.control_dependencies([] if check is None else [check]):
        keys, rows = source.exported()
    with tf.device(devices.HOST):
        return tf.identity(keys), tf.identity(rows)


@as_written
def sparse_read_and_evict(var: Any, indices: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows of this rank's part of a dynamic table, which inserts the keys that it does not hold, and the rows that it
    gave up for them. What else these had, states of optimizers, is gone.

    The rows count as used, as by a lookup that trains, and have a gradient as that does; one for a row that was evicted
    since is refused. On a GPU it waits.

    Args:
      var: a dynamic table.
      indices: int32 or int64 global keys that belong to this rank, of any shape.

    Returns:
      (rows, indices.shape + [dimension]; keys that were evicted, [m] of key_type; their rows [m, dimension]), rows of
      the table's dtype, all where the table is. A table that evicts nothing gives none up.

    Raises:
      TypeError: `var` is no dynamic table; indices of another dtype.
      tf.errors.InvalidArgumentError: a key that another rank holds; it is named.
      tf.errors.ResourceExhaustedError: no room, also where there are more different keys than the capacity.
      NotImplementedError: the table has a store.
      Nothing has changed then.
    """
    table = as_table(var) if is_table(var) else var
    if not isinstance(table, DynamicVariable):
        raise TypeError(f"var must be a sok.DynamicVariable, got {type(table).__name__}")
    table.refuse_store("sparse_read_and_evict")
    keys = tf.convert_to_tensor(indices)
    table.check_keys(keys.dtype, f"table '{table.table_name}'", "indices")
    resource_variable_ops.variable_accessed(table)  # lets tapes watch it
    rows, evicted_keys, evicted_rows = ops.sok_read_and_evict(
        tables=[table.handle], keys=tf.reshape(keys, [-1]), dtype=table.dtype, **Tables.of([table]).attributes()
    )
    rows = tf.reshape(rows, tf.concat([tf.shape(keys), [table.dimension]], axis=0))
    rows.set_shape(keys.shape.concatenate([table.dimension]))
    return rows, tf.cast(evicted_keys, table.key_type), evicted_rows


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(tables, other variables) of `vars`, each in its order."""
    tables: list[Any] = []
    others: list[Any] = []
    for variable in vars:
        (tables if is_table(variable) else others).append(variable)
    return tables, others
