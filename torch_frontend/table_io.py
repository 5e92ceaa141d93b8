# SPDX-License-Identifier: Apache-2.0
"""Rows in and out of tables by global key, and telling tables from other parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import stamps
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.dynamic_variable import DynamicVariable
from sparse_operation_kit.torch.table_parameter import TableParameter, is_table, keys_of
from sparse_operation_kit.torch.table_stack import Member, refuse_stack


def _check_table(var: Any, function: str) -> Any:
    """A table, a member of a stack among them."""
    refuse_stack(var, function)
    if not isinstance(var, (TableParameter, Member)):
        raise TypeError(f"var must be a sok.Variable or sok.DynamicVariable, got {type(var).__name__}")
    return var


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def assign(var: TableParameter | Member, indices: Any, values: Any) -> None:
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
    shard = Tensor.detach(table)

    whole, first = (table.stack, table.slots.start) if isinstance(table, Member) else (table, 0)

    def slots() -> Tensor:
        found: Tensor = place.key_map(keys) + first if table._core is None else table._core.locate(keys, False)
        return found

    with stamps.marking(whole, slots):
        ops.assign(shard, table.name, place.owner, place.num_rows, place.num_ranks, place.rank, keys, rows)


@torch.no_grad()
def export(var: TableParameter | Member) -> tuple[Tensor, Tensor]:
    """This rank's part of a table, or of a member of a stack, copied to host memory.

    Returns:
      (global keys [local rows] int64, ascending; rows [local rows, dimension], the table's dtype). Of a dynamic table:
      the keys that this rank holds, of its key_type, in the order of their slots.
    """
    table = _check_table(var, "export")
    if isinstance(table, DynamicVariable):
        held, slots = table._core.held()
        return held.to("cpu", table.key_type), table.detach()[slots].to("cpu")
    place = table._placement
    keys = place.global_keys(torch.arange(place.local_rows, dtype=torch.int64, device="cpu"))
    rows = table.detach().to("cpu", copy=True)
    return keys, rows


@torch.no_grad()
def sparse_read_and_evict(var: DynamicVariable, indices: Any) -> tuple[Tensor, Tensor, Tensor]:
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
      Nothing has changed then.
    """
    if not isinstance(var, DynamicVariable):
        raise TypeError(f"var must be a sok.DynamicVariable, got {type(var).__name__}")
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
