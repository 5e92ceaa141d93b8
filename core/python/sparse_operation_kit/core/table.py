# SPDX-License-Identifier: Apache-2.0
"""Tables as the stages see them, and assignment of rows by key."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, pointer


@dataclasses.dataclass(eq=False)
class Table:
    """A static table: row k has key k. This rank holds some of the rows, or all.

    Attributes:
      weight: [rows of this rank, dimension] float32, float16 or bfloat16 (`core.BFLOAT16`), C-contiguous; `apply` and
        `assign` change it in place. None where a stage does not touch rows (route, combine, spread).
      num_rows: rows on all ranks together; default: those of `weight`, for a table that is whole here.
      dimension: elements a row; default: that of `weight`.
      name: appears in messages.
      owner: -1: key k belongs to rank k mod num_ranks, where it is row k div num_ranks ("distributed"); g >= 0: rank g
        holds the table whole ("localized").
      num_ranks, rank: how many ranks there are, and which one this is.
    """

    weight: Array | None = None
    num_rows: int | None = None
    dimension: int | None = None
    name: str = "table"
    owner: int = -1
    num_ranks: int = 1
    rank: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, dimension), the defaults filled in."""
        if self.weight is None and (self.num_rows is None or self.dimension is None):
            raise ValueError(f"{self.name}: without a weight give num_rows and dimension")
        held = (1, 1) if self.weight is None else (*self.weight.shape, 1, 1)
        num_rows = int(held[0]) if self.num_rows is None else self.num_rows
        return num_rows, int(held[1]) if self.dimension is None else self.dimension

    def struct(self) -> _abi.Table:
        """The sok_table; `self.weight` must outlive it."""
        num_rows, dimension = self.shape
        weight = None if self.weight is None else _arrays.written(self.weight, f"{self.name}: weight")
        return _abi.Table(
            struct_size=ctypes.sizeof(_abi.Table),
            name=self.name.encode(),
            kind=_abi.TABLE_STATIC,
            owner=self.owner,
            num_ranks=self.num_ranks,
            rank=self.rank,
            num_rows=num_rows,
            dimension=dimension,
            weight=_arrays.view(weight),
        )


def structs(tables: Sequence[Table]) -> Any:
    """The C array of `tables`."""
    return (_abi.Table * len(tables))(*(table.struct() for table in tables))


def local_rows(num_rows: int, owner: int = -1, num_ranks: int = 1, rank: int = 0) -> int:
    """Rows of a static table of `num_rows` rows that `rank` holds; owner as of `Table`.

    Raises:
      ValueError: the placement is not valid.
    """
    rows = int(_abi.library().sok_table_local_rows(num_rows, owner, num_ranks, rank))
    if rows < 0:
        raise ValueError(f"no placement: {num_rows} rows, owner {owner}, rank {rank} of {num_ranks}")
    return rows


def assign(
    table: Table,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    target: Array | None = None,
    context: Context | None = None,
) -> None:
    """Writes rows by global key: the row of keys[i] becomes values[i]; of equal keys the last one counts.

    Args:
      keys: [n] int32 or int64, all of them belonging to table.rank.
      values: [n, dimension] float32, or the dtype of what is written to. float32 values are rounded to nearest.
      target: the array to write to in place of table.weight: an optimizer state of the same shape.

    Raises:
      IndexError: a key is outside the table or belongs to another rank; nothing is written.
      ValueError: a shape or dtype that does not fit; nothing is written.
    """
    into = table.weight if target is None else target
    if into is None:
        raise ValueError(f"{table.name}: has neither a weight nor a target to assign to")
    key_array, value_array = _arrays.read(keys, "keys"), _arrays.read(values, "values")
    into = _arrays.written(into, "target")
    struct = table.struct()
    views = (_arrays.view(key_array), _arrays.view(value_array), _arrays.view(into))
    _library.check(_abi.library().sok_assign(pointer(context), ctypes.byref(struct), *views))
