# SPDX-License-Identifier: Apache-2.0
"""The forward stages: route, locate, gather, combine; gather_combine is gather and combine in one pass.

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
from sparse_operation_kit.core.table import Table, columns, indices, placements

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
      keys: [n] int32 or int64; None where a stage reads slots.
      table: position in the call's tables.
      row_splits: [bags + 1] int64, 0 = s[0] <= s[1] <= ... = n: bag b has the keys [s[b], s[b+1]). None: every key is a
        bag of its own.
      weights: [n] float32, or None for all 1.
      combiner: "sum" (w r), "mean" (divided by the sum of w) or "sqrtn" (by the root of the sum of w^2). A bag that is
        empty or whose divisor is 0 gives zeros.
      slots: [n] int64, what `locate` gave; None: the keys are the slots, as those of a table without an index are on
        one rank. Read by `gather_combine` and `weight_gradient`.
    """

    keys: npt.ArrayLike | None = None
    table: int = 0
    row_splits: npt.ArrayLike | None = None
    weights: npt.ArrayLike | None = None
    combiner: str = "sum"
    slots: npt.ArrayLike | None = None


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
    """The C arrays of tables, as a stage before or after locate sees them, and of lookups; and what keeps their memory
    alive.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        lookups: Sequence[Lookup],
        outputs: bool = False,
        context: Context | None = None,
        out: Sequence[Array] | None = None,
        located: bool = False,
    ) -> None:
        if out is not None and len(out) != len(lookups):
            raise ValueError(f"out: {len(out)} arrays for {len(lookups)} lookups")
        self.tables = columns(tables) if located else placements(tables)
        self.lookups = (_abi.Lookup * len(lookups))()
        self.num_entries = 0
        self.outputs: list[Array] = []
        self.has_weights = [lookup.weights is not None for lookup in lookups]
        self.num_keys: list[int] = []
        self._alive: list[Array | None] = []
        for i, lookup in enumerate(lookups):
            keys = self._read(lookup.keys, f"lookup {i}: keys")
            slots = self._read(lookup.slots, f"lookup {i}: slots")
            splits = self._read(lookup.row_splits, f"lookup {i}: row_splits")
            weights = self._read(lookup.weights, f"lookup {i}: weights")
            struct = self.lookups[i]
            struct.struct_size = ctypes.sizeof(_abi.Lookup)
            struct.table, struct.combiner = lookup.table, combiner_number(lookup.combiner)
            views = map(_arrays.view, (keys, slots, splits, weights))
            struct.keys, struct.slots, struct.row_splits, struct.weights = views
            struct.output = _arrays.absent()
            entries = keys if slots is None else slots
            size = 0 if entries is None else entries.size
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


def _received(
    tables: Sequence[Table], counts: npt.ArrayLike, keys: Array | None, slots: Array | None, rows: Array | None
) -> Any:
    """What came to an owner as an array of sok_lookup: for each source rank and table its entries, in that order."""
    names = ("keys", "slots")
    count_array = np.ascontiguousarray(counts, np.int64)
    if count_array.ndim != 2 or count_array.shape[1] != len(tables) or (count_array < 0).any():
        raise ValueError(f"counts: expected [number of ranks, {len(tables)}], none negative, not {counts!r}")
    for name, array in zip(names, (keys, slots), strict=True):
        if array is not None and array.shape != (sum(map(int, count_array.flat)),):
            raise ValueError(f"{name}: shape {list(array.shape)}, expected as many as counts has together")
    lookups = (_abi.Lookup * count_array.size)()
    first, element = 0, 0
    for i, count in enumerate(map(int, count_array.flat)):
        struct, table = lookups[i], i % len(tables)
        struct.struct_size, struct.table, struct.combiner = ctypes.sizeof(_abi.Lookup), table, _abi.SUM
        struct.keys, struct.slots = (_arrays.view_from(array, first, count) for array in (keys, slots))
        struct.row_splits = struct.weights = _arrays.absent()
        struct.output = _arrays.view_from(rows, element, count, tables[table].shape[1])
        first, element = first + count, element + count * tables[table].shape[1]
    return lookups


def locate(
    tables: Sequence[Table],
    keys: npt.ArrayLike,
    counts: npt.ArrayLike,
    *,
    insert: bool = False,
    context: Context | None = None,
) -> Array:
    """Keys that arrived here -> their slots, [n] int64.

    Args:
      keys: [n] int32 or int64, by source rank, then by table.
      counts: [num_sources, num_tables]: how many keys came from each rank for each table; n in all.
      insert: indices take in the keys that they lack (else slot -1).

    Raises:
      IndexError: a key is outside its table or belongs to another rank.
    """
    key_array = _arrays.read(keys, "keys")
    assert key_array is not None
    slots = empty(context, key_array.shape, np.int64)
    lookups = _received(tables, counts, key_array, slots, None)
    arrays = (len(tables), placements(tables), indices(tables), len(lookups), lookups)
    flags = _abi.LOCATE_INSERT if insert else 0
    _library.check(_abi.library().sok_locate(pointer(context), *arrays, flags))
    return slots


def gather(
    tables: Sequence[Table], slots: npt.ArrayLike, counts: npt.ArrayLike, *, context: Context | None = None
) -> Array:
    """Slots -> rows, one after another in the order of the slots: [sum of counts * dimension] float32.

    Args:
      slots: [n] int64, as `locate` gave them.
      counts: as of `locate`.

    Raises:
      IndexError: a slot is outside its table.
    """
    slot_array = _arrays.read(slots, "slots")
    per_table = np.asarray(counts, np.int64).reshape(-1, max(len(tables), 1)).sum(axis=0)
    size = sum(int(count) * table.shape[1] for count, table in zip(per_table, tables, strict=False))
    rows = empty(context, max(size, 0), np.float32)
    lookups = _received(tables, counts, None, slot_array, rows)
    arrays = (len(tables), columns(tables), len(lookups), lookups)
    _library.check(_abi.library().sok_gather_combine(pointer(context), *arrays))
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
      rows: rank 1, float32: a row for each unique key, in send order.
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
    """Reads and pools rows of tables: for each lookup [bags, dimension] float32.

    Args:
      out: where to write them instead of into new arrays; columns of a wider array will do.

    Raises:
      IndexError: a slot, or a key in its place, is outside its table.
    """
    batch = Batch(tables, lookups, outputs=True, context=context, out=out, located=True)
    _library.check(_abi.library().sok_gather_combine(pointer(context), *batch.arguments))
    return batch.outputs
