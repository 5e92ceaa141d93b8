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
from sparse_operation_kit.torch.table_parameter import TableParameter, is_table


def _check_table(var: Any) -> TableParameter:
    if not isinstance(var, TableParameter):
        raise TypeError(f"var must be a sok.Variable or sok.DynamicVariable, got {type(var).__name__}")
    return var


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def assign(var: TableParameter, indices: Any, values: Any) -> None:
    """Writes rows of this rank's part of a table.

    Args:
      var: a table. A dynamic one inserts the keys that it does not hold.
      indices: [n] int32 or int64 global keys that belong to this rank; of equal ones the last counts.
      values: [n, dimension], float32 or the table's dtype; float32 values are rounded to nearest.

    Raises:
      TypeError: another dtype.
      ValueError: another shape.
      IndexError: a key outside the table, or one that another rank holds; it is named, and nothing is written.
      torch.OutOfMemoryError: a dynamic table has no room for the keys that are new; nothing is written.
    """
    table = _check_table(var)
    keys = torch.as_tensor(indices, device=table.device)
    rows = torch.as_tensor(values, device=table.device)
    if keys.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, not {_text(keys.dtype)}")
    if isinstance(table, DynamicVariable) and table.key_type == torch.int32 != keys.dtype:
        raise TypeError(f"indices of table '{table.name}' must be int32, its key_type, not {_text(keys.dtype)}")
    if rows.dtype not in (torch.float32, table.dtype):
        wanted = " or ".join(dict.fromkeys(["float32", _text(table.dtype)]))
        raise TypeError(f"values must be {wanted}, not {_text(rows.dtype)}")
    place = table._placement
    if keys.dim() != 1 or rows.shape != (keys.shape[0], place.dimension):
        raise ValueError(
            f"indices must be [n] and values [n, {place.dimension}] for table '{table.name}', got {list(keys.shape)} "
            f"and {list(rows.shape)}"
        )
    shard = table.detach()

    def slots() -> Tensor:
        found: Tensor = place.key_map(keys) if table._core is None else table._core.locate(keys, False)
        return found

    with stamps.marking(table, slots):
        ops.assign(shard, table.name, place.owner, place.num_rows, place.num_ranks, place.rank, keys, rows)


@torch.no_grad()
def export(var: TableParameter) -> tuple[Tensor, Tensor]:
    """This rank's part of a table, copied to host memory.

    Returns:
      (global keys [local rows] int64, ascending; rows [local rows, dimension], the table's dtype). Of a dynamic table:
      the keys that this rank holds, of its key_type, in the order of their slots.
    """
    table = _check_table(var)
    if isinstance(table, DynamicVariable):
        held, slots = table._core.held()
        return held.to("cpu", table.key_type), table.detach()[slots].to("cpu")
    place = table._placement
    keys = place.global_keys(torch.arange(place.local_rows, dtype=torch.int64, device="cpu"))
    rows = table.detach().to("cpu", copy=True)
    return keys, rows


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(the tables among `vars`, the others), each in the given order."""
    tables: list[Any] = []
    others: list[Any] = []
    for var in vars:
        (tables if is_table(var) else others).append(var)
    return tables, others
