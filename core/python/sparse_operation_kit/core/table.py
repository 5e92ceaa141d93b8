# SPDX-License-Identifier: Apache-2.0
"""Tables as the stages see them, and assignment of rows by key."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, pointer
from sparse_operation_kit.core.hash_index import HashIndex

if TYPE_CHECKING:
    from sparse_operation_kit.core.dynamic_table import DynamicTable


class Index:
    """Key -> slot of a table whose slots are not those that its placement names, for tables on the CPU.

    Args:
      find: find(keys [n] int32 or int64, insert) -> slots [n] int64, -1 for a key that the table does not hold. It may
        be called from the thread of any call that locates keys of the table.

    `struct` is the sok_index, which this object keeps alive.
    """

    def __init__(self, find: Callable[[Array, bool], npt.ArrayLike]) -> None:
        self.find = find
        self.struct = _abi.Index(ctypes.sizeof(_abi.Index), id(self), _LOCATE)


def _locate(context: Any, num_requests: int, requests: Any, flags: int) -> int:
    if context.contents.device.type != _abi.CPU:
        return _library.UNIMPLEMENTED
    try:
        for request in requests[:num_requests]:
            index: Index = ctypes.cast(request.index.contents.self, ctypes.py_object).value
            kind = ctypes.c_int64 if request.keys.dtype == _abi.INT64 else ctypes.c_int32
            size = (request.keys.shape[0],)
            keys = np.ctypeslib.as_array(ctypes.cast(request.keys.data, ctypes.POINTER(kind)), size)
            np.ctypeslib.as_array(request.slots, size)[:] = index.find(keys, bool(flags & _abi.LOCATE_INSERT))
    except MemoryError:
        return _library.RESOURCE_EXHAUSTED
    return _library.OK


_LOCATE = _abi.LOCATE(_locate)  # one for all, so that the indices of a call are asked together


@dataclasses.dataclass(eq=False)
class Table:
    """A table: where its keys are (placement), their slots there (index), and the rows (columns). This rank holds some
    of the rows, or all.

    Attributes:
      weight: [rows of this rank, dimension] float32, float16 or bfloat16 (`core.BFLOAT16`), C-contiguous; `apply` and
        `assign` change it in place. None where a stage does not touch rows (route, locate, combine, spread).
      num_rows: keys are [0, num_rows); default: the rows of `weight`, for a table that is whole here. `core.ANY_KEY`:
        any integer is a key, which needs an index, and which `route` does not serve.
      dimension: elements a row; default: that of `weight`.
      name: appears in messages.
      owner: -1: key k belongs to rank k mod num_ranks ("distributed"); g >= 0: rank g holds the table whole
        ("localized").
      num_ranks, rank: how many ranks there are, and which one this is.
      index: None: the slot of key k is k div num_ranks on its rank, or k where the table is localized.
      by_key: `gather_combine` and `weight_gradient` find rows by the keys of lookups, in `index`, on the CPU; keys that
        a dynamic table does not hold have their initial rows.
    """

    weight: Array | None = None
    num_rows: int | None = None
    dimension: int | None = None
    name: str = "table"
    owner: int = -1
    num_ranks: int = 1
    rank: int = 0
    index: Index | HashIndex | DynamicTable | None = None
    by_key: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, dimension), the defaults filled in."""
        if self.weight is None and (self.num_rows is None or self.dimension is None):
            raise ValueError(f"{self.name}: without a weight give num_rows and dimension")
        held = (1, 1) if self.weight is None else (*self.weight.shape, 1, 1)
        num_rows = int(held[0]) if self.num_rows is None else self.num_rows
        return num_rows, int(held[1]) if self.dimension is None else self.dimension

    def placement(self) -> _abi.Placement:
        """The sok_placement."""
        num_rows, dimension = self.shape
        return _abi.Placement(
            struct_size=ctypes.sizeof(_abi.Placement),
            name=self.name.encode(),
            owner=self.owner,
            num_ranks=self.num_ranks,
            rank=self.rank,
            num_rows=num_rows,
            dimension=dimension,
        )

    def columns(self) -> _abi.Columns:
        """The sok_columns; `self.weight` must outlive it."""
        weight = None if self.weight is None else _arrays.written(self.weight, f"{self.name}: weight")
        result = _abi.Columns(ctypes.sizeof(_abi.Columns), self.name.encode(), _arrays.view(weight))
        columns_of_now = getattr(self.index, "columns", None)  # a DynamicTable's
        if weight is not None and columns_of_now is not None:
            held: _abi.Columns = columns_of_now()
            result.since, result.freed, result.owner = held.since, held.freed, held.owner
            result.since.shape[0] = weight.shape[0]
        if self.by_key and self.index is not None:
            result.index = ctypes.addressof(self.index.struct)
        return result


def placements(tables: Sequence[Table]) -> Any:
    """The C array of placements."""
    return (_abi.Placement * len(tables))(*(table.placement() for table in tables))


def columns(tables: Sequence[Table]) -> Any:
    """The C array of columns."""
    return (_abi.Columns * len(tables))(*(table.columns() for table in tables))


def indices(tables: Sequence[Table]) -> Any:
    """The C array of pointers to indices; the tables must outlive it."""
    pointer = ctypes.POINTER(_abi.Index)
    return (pointer * len(tables))(*(pointer() if t.index is None else pointer(t.index.struct) for t in tables))


def local_rows(num_rows: int, owner: int = -1, num_ranks: int = 1, rank: int = 0) -> int:
    """Rows of a static table of `num_rows` rows that `rank` holds; owner as of `Table`.

    Raises:
      ValueError: the placement is not valid.
    """
    rows = int(_abi.library().sok_placement_local_rows(num_rows, owner, num_ranks, rank))
    if rows < 0:
        raise ValueError(f"no placement: {num_rows} rows, owner {owner}, rank {rank} of {num_ranks}")
    return rows


def assign(
    table: Table,
    slots: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    target: Array | None = None,
    context: Context | None = None,
) -> None:
    """Writes rows by slot: row slots[i] becomes values[i]; of equal slots the last one counts.

    Args:
      slots: [n] int32 or int64.
      values: [n, dimension] float32, or the dtype of what is written to. float32 values are rounded to nearest.
      target: the array to write to in place of table.weight: an optimizer state of the same shape.

    Raises:
      IndexError: a slot is outside the table; nothing is written.
      ValueError: a shape or dtype that does not fit; nothing is written.
    """
    into = table.weight if target is None else target
    if into is None:
        raise ValueError(f"{table.name}: has neither a weight nor a target to assign to")
    slot_array, value_array = _arrays.read(slots, "slots"), _arrays.read(values, "values")
    into = _arrays.written(into, "target")
    struct = table.columns()
    views = (_arrays.view(slot_array), _arrays.view(value_array), _arrays.view(into))
    _library.check(_abi.library().sok_assign(pointer(context), ctypes.byref(struct), *views))
