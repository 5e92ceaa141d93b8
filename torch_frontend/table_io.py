# SPDX-License-Identifier: Apache-2.0
"""Rows in and out of tables by global key, and telling tables from other parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit import dynamic
from sparse_operation_kit.torch import stamps, stored
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.table_parameter import TableRows, is_table, keys_of
from sparse_operation_kit.torch.table_stack import refuse_stack


def _check_table(var: Any, function: str) -> Any:
    """A table, a member of a stack among them."""
    refuse_stack(var, function)
    if not isinstance(var, TableRows):
        raise TypeError(f"var must be a sok.Variable or sok.DynamicVariable, got {type(var).__name__}")
    return var


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def assign(var: TableRows, indices: Any, values: Any) -> None:
    """Writes rows of this rank's part of a table.

    Args:
      var: a table, or a member of a stack. A dynamic table inserts the keys that it does not hold.
      indices: [n] int32 or int64 global keys that belong to this rank; of equal ones the last counts.
      values: [n, dimension], float32 or the table's dtype; float32 values are rounded to nearest.

    Raises:
      TypeError: another dtype.
      ValueError: another shape.
      IndexError: a key outside the table, or one that another rank holds; it is named, and nothing is written.
      torch.OutOfMemoryError: a dynamic table has no room for the keys that are new; nothing is written.
    """
    table = _check_table(var, "assign")
    keys = keys_of(table, indices)
    rows = torch.as_tensor(values, device=table.device)
    if rows.dtype not in (torch.float32, table.dtype):
        wanted = " or ".join(dict.fromkeys(["float32", _text(table.dtype)]))
        raise TypeError(f"values must be {wanted}, not {_text(rows.dtype)}")
    place = table._placement
    if keys.dim() != 1 or rows.shape != (keys.shape[0], place.dimension):
        raise ValueError(
            f"indices must be [n] and values [n, {place.dimension}] for table '{table.name}', got {list(keys.shape)} "
            f"and {list(rows.shape)}"
        )
    where = (table.name, place.owner, place.num_rows, place.num_ranks, place.rank)
    with stored.alone([table]):
        stored.bring(table, keys)
        with stamps.marking(table.whole, lambda: table.slots_of(keys)):
            ops.assign(Tensor.detach(table), *where, keys, rows)


@torch.no_grad()
def export(var: TableRows) -> tuple[Tensor, Tensor]:
    """This rank's part of a table, or of a member of a stack, copied to host memory.

    Returns:
      (global keys [local rows] int64, ascending; rows [local rows, dimension], the table's dtype). Of a dynamic table:
      the keys that this rank holds, of its key_type, in the order of their slots.
    """
    found: tuple[Tensor, Tensor] = _check_table(var, "export").exported()
    return found


@torch.no_grad()
def sparse_read_and_evict(var: Any, indices: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of this rank's part of a dynamic table, which inserts the keys that it does not hold, and the rows that it
    gave up for them. What else these had, states of optimizers, is gone.

    The rows count as used, as by a lookup that trains, but have no gradient. On a GPU it waits.

    Args:
      var: a dynamic table.
      indices: int32 or int64 global keys that belong to this rank, of any shape.

    Returns:
      (rows, indices.shape + [dimension]; keys that were evicted, [m] of key_type; their rows [m, dimension]), rows of
      the table's dtype, all where the table is. A table that evicts nothing gives none up.

    Raises:
      TypeError: `var` is no dynamic table; indices of another dtype.
      IndexError: a key that another rank holds; it is named.
      torch.OutOfMemoryError: no room, also where there are more different keys than the capacity.
      NotImplementedError: the table has a store.
      Nothing has changed then.
    """
    from sparse_operation_kit.torch.dynamic_variable import DynamicVariable

    if not isinstance(var, DynamicVariable):
        raise TypeError(f"var must be a sok.DynamicVariable, got {type(var).__name__}")
    dynamic.refuse_store(var._stored, var._sok_name, "sparse_read_and_evict")
    keys = keys_of(var, indices)
    place = var.placement
    if not place.holds_everything and not bool(place.mine(keys).all()):
        key = int(keys[~place.mine(keys)].flatten()[0])
        raise IndexError(
            f"table '{var.name}': key {key} belongs to rank {place.owner_of(key)}, this is rank {place.rank}"
        )
    rows, gone, gone_rows = var._core.read_and_evict(keys.reshape(-1).contiguous())
    return rows.view(*keys.shape, place.dimension), gone.to(var.key_type), gone_rows


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(the tables among `vars`, the others), each in the given order."""
    tables: list[Any] = []
    others: list[Any] = []
    for var in vars:
        (tables if is_table(var) else others).append(var)
    return tables, others
