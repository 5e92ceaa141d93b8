# SPDX-License-Identifier: Apache-2.0
"""The forward stages: route, locate, gather, combine, and gather_combine for one process alone.

All tables of a call travel together. `tables` and `lookups` are sequences; a lookup names its table by position. The
entries of a call are the keys of lookup 0, then those of lookup 1, and so on: n in all.

Every function raises ValueError for shapes, dtypes and options that do not fit, IndexError for keys and slots outside
their table (with the table's name and the range), and MemoryError; nothing is changed then.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer
from sparse_operation_kit.core.table import Table, structs

COMBINERS = {"sum": _abi.SUM, "mean": _abi.MEAN, "sqrtn": _abi.SQRTN}


def combiner_number(combiner: str) -> int:
    """The sok_combiner of a name."""
    if combiner not in COMBINERS:
        raise ValueError(f"combiner {combiner!r}: expected one of {', '.join(COMBINERS)}")
    return COMBINERS[combiner]


@dataclasses.dataclass(eq=False)
class Lookup:
    """A batch of bags for one table.

    Attributes:
      keys: [n] int32 or int64.
      table: position in the call's tables.
      row_splits: [bags + 1] int64, 0 = s[0] <= s[1] <= ... = n: bag b has the keys [s[b], s[b+1]). None: every key is a
        bag of its own.
      weights: [n] float32, or None for all 1.
      combiner: "sum" (w r), "mean" (divided by the sum of w) or "sqrtn" (by the root of the sum of w^2). A bag that is
        empty or whose divisor is 0 gives zeros.
    """

    keys: npt.ArrayLike
    table: int = 0
    row_splits: npt.ArrayLike | None = None
    weights: npt.ArrayLike | None = None
    combiner: str = "sum"


@dataclasses.dataclass(eq=False)
class Routing:
    """What `route` found out about a batch.

    Attributes:
      keys: [n] int64: the unique keys of each table in send order (by owning rank, then table, then ascending); the
        first `num_unique` are valid.
      counts: [num_ranks, num_tables] int64: unique keys for each rank and table.
      inverse: [n] int64: for each entry the offset, in elements, of its row in the flat buffer of exchanged rows.
      order: [n] int32: the entries grouped by unique key in send order.
      unique_splits: [n + 1] int32: unique key u has the entries order[unique_splits[u] : unique_splits[u + 1]].
    """

    keys: Array
    counts: Array
    inverse: Array
    order: Array
    unique_splits: Array

    @property
    def num_unique(self) -> int:
        """Unique keys of the call, over all ranks and tables."""
        return int(self.counts.sum())

    def struct(self) -> _abi.Routing:
        """The sok_routing; self must outlive it."""
        arrays = (self.keys, self.counts, self.inverse, self.order, self.unique_splits)
        return _abi.Routing(ctypes.sizeof(_abi.Routing), *map(_arrays.view, arrays))


class Batch:
    """The C arrays of tables and lookups, and what keeps their memory alive."""

    def __init__(
        self,
        tables: Sequence[Table],
        lookups: Sequence[Lookup],
        outputs: bool = False,
        context: Context | None = None,
        out: Sequence[Array] | None = None,
    ) -> None:
        if out is not None and len(out) != len(lookups):
            raise ValueError(f"out: {len(out)} arrays for {len(lookups)} lookups")
        self.tables = structs(tables)
        self.lookups = (_abi.Lookup * len(lookups))()
        self.num_entries = 0
        self.outputs: list[Array] = []
        self.has_weights = [lookup.weights is not None for lookup in lookups]
        self.num_keys: list[int] = []
        self._alive: list[Array | None] = []
        for i, lookup in enumerate(lookups):
            keys = self._read(lookup.keys, f"lookup {i}: keys")
            splits = self._read(lookup.row_splits, f"lookup {i}: row_splits")
            weights = self._read(lookup.weights, f"lookup {i}: weights")
            struct = self.lookups[i]
            struct.struct_size = ctypes.sizeof(_abi.Lookup)
            struct.table, struct.combiner = lookup.table, combiner_number(lookup.combiner)
            struct.keys, struct.row_splits, struct.weights = map(_arrays.view, (keys, splits, weights))
            struct.slots = struct.output = _arrays.absent()
            size = 0 if keys is None else keys.size
            self.num_keys.append(size)
            self.num_entries += size
            if out is not None:
                self.outputs.append(_arrays.written_rows(out[i], f"out[{i}]"))
                struct.output = _arrays.view(self.outputs[-1])
            elif outputs:
                num_bags = size if splits is None else max(splits.size - 1, 0)
                # A table number out of range is for the core to report; any width will do until then.
                width = tables[lookup.table].shape[1] if 0 <= lookup.table < len(tables) else 0
                self.outputs.append(empty(context, (num_bags, max(width, 0)), np.float32))
                struct.output = _arrays.view(self.outputs[-1])

    def _read(self, value: npt.ArrayLike | None, what: str) -> Array | None:
        array = _arrays.read(value, what)
        self._alive.append(array)
        return array

    @property
    def arguments(self) -> tuple[Any, ...]:
        """num_tables, tables, num_lookups, lookups."""
        return len(self.tables), self.tables, len(self.lookups), self.lookups


def counts_array(counts: npt.ArrayLike, num_tables: int) -> Array:
    """`counts` as a C-contiguous [num_ranks, num_tables] int64 array."""
    array = np.ascontiguousarray(counts, np.int64)
    if array.ndim != 2 or array.shape[1] != num_tables:
        raise ValueError(f"counts: shape {list(array.shape)}, expected [number of ranks, {num_tables}]")
    return array


def counts_pointer(counts: Array) -> Any:
    """The argument to pass for what `counts_array` returned."""
    return counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))


def route(tables: Sequence[Table], lookups: Sequence[Lookup], *, context: Context | None = None) -> Routing:
    """Checks the keys, removes duplicates for each table and sorts the rest by owning rank.

    Raises:
      IndexError: a key is outside its table.
    """
    batch = Batch(tables, lookups)
    n = batch.num_entries
    num_ranks = max(tables[0].num_ranks, 0) if tables else 0
    routing = Routing(
        keys=empty(context, n, np.int64),
        counts=empty(context, (num_ranks, len(tables)), np.int64),
        inverse=empty(context, n, np.int64),
        order=empty(context, n, np.int32),
        unique_splits=empty(context, n + 1, np.int32),
    )
    struct = routing.struct()
    _library.check(_abi.library().sok_route(pointer(context), *batch.arguments, ctypes.byref(struct)))
    return routing


def locate(
    tables: Sequence[Table],
    keys: npt.ArrayLike,
    counts: npt.ArrayLike,
    *,
    insert: bool = False,
    context: Context | None = None,
) -> Array:
    """Keys that arrived here -> their slots (local row numbers), [n] int64.

    Args:
      keys: [n] int64, by source rank, then by table.
      counts: [num_sources, num_tables]: how many keys came from each rank for each table; n in all.
      insert: dynamic tables take in the keys that they lack (else slot -1).

    Raises:
      IndexError: a key is outside its table or belongs to another rank.
    """
    table_structs, count_array = structs(tables), counts_array(counts, len(tables))
    key_array = _arrays.read(keys, "keys")
    assert key_array is not None
    slots = empty(context, key_array.shape, np.int64)
    _library.check(
        _abi.library().sok_locate(
            pointer(context),
            len(tables),
            table_structs,
            len(count_array),
            counts_pointer(count_array),
            _arrays.view(key_array),
            _arrays.view(slots),
            _abi.LOCATE_INSERT if insert else 0,
        )
    )
    return slots


def gather(
    tables: Sequence[Table],
    keys: npt.ArrayLike,
    slots: npt.ArrayLike,
    counts: npt.ArrayLike,
    *,
    dtype: npt.DTypeLike = np.float32,
    context: Context | None = None,
) -> Array:
    """Slots -> rows, one after another in the order of the slots: [sum of counts * dimension] `dtype`.

    Args:
      keys, counts: as of `locate`.
      slots: [n] int64, as `locate` gave them.
      dtype: float32, or the dtype that all tables share.

    Raises:
      IndexError: a slot is outside its table.
    """
    table_structs, count_array = structs(tables), counts_array(counts, len(tables))
    key_array, slot_array = _arrays.read(keys, "keys"), _arrays.read(slots, "slots")
    rows = empty(context, max(_arrays.elements(count_array, (table.shape[1] for table in tables)), 0), dtype)
    _library.check(
        _abi.library().sok_gather(
            pointer(context),
            len(tables),
            table_structs,
            len(count_array),
            counts_pointer(count_array),
            _arrays.view(key_array),
            _arrays.view(slot_array),
            _arrays.view(rows),
        )
    )
    return rows


def combine(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    inverse: npt.ArrayLike,
    rows: npt.ArrayLike,
    *,
    out: Sequence[Array] | None = None,
    context: Context | None = None,
) -> list[Array]:
    """Exchanged rows -> one pooled vector a bag: for each lookup [bags, dimension] float32.

    Args:
      inverse: [n] int64, as `route` gave it.
      rows: rank 1, float32, float16 or `core.BFLOAT16`: a row for each unique key, in send order.
      out: where to write them instead of into new arrays; columns of a wider array will do.
    """
    batch = Batch(tables, lookups, outputs=True, context=context, out=out)
    inverse_array, row_array = _arrays.read(inverse, "inverse"), _arrays.read(rows, "rows")
    _library.check(
        _abi.library().sok_combine(
            pointer(context), *batch.arguments, _arrays.view(inverse_array), _arrays.view(row_array)
        )
    )
    return batch.outputs


def gather_combine(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    *,
    out: Sequence[Array] | None = None,
    context: Context | None = None,
) -> list[Array]:
    """Reads and pools rows of tables that are whole on this rank: for each lookup [bags, dimension] float32.

    Args:
      out: where to write them instead of into new arrays; columns of a wider array will do.

    Raises:
      IndexError: a key is outside its table.
    """
    batch = Batch(tables, lookups, outputs=True, context=context, out=out)
    _library.check(_abi.library().sok_gather_combine(pointer(context), *batch.arguments))
    return batch.outputs
