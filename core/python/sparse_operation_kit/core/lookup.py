# SPDX-License-Identifier: Apache-2.0
"""The forward stages: split_batch, route, join_keys, locate, gather, combine; gather_combine is gather and combine in
one pass.

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
from sparse_operation_kit.core.messages import Messages
from sparse_operation_kit.core.table import Table, columns, indices, placements

COMBINERS = {"sum": _abi.SUM, "mean": _abi.MEAN, "sqrtn": _abi.SQRTN}


def combiner_number(combiner: str) -> int:
    """The sok_combiner of a name."""
    if combiner not in COMBINERS:
        raise ValueError(f"combiner {combiner!r}: expected one of {', '.join(COMBINERS)}")
    return COMBINERS[combiner]


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of a stack: key k of it, in [0, num_rows), is key first_key + k of the stack."""

    name: str
    first_key: int
    num_rows: int


@dataclasses.dataclass(eq=False)
class Lookup:
    """A batch of bags for one table, or of as many bags for each of several members of a stack.

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
      generation: of the slots, as of `Gradient`; read by `weight_gradient`.
      members: of a stack: bag i is bag i % batch of members[i // batch], where batch = bags / len(members). Outputs and
        their gradients are [batch, len(members) * dimension] then. None: the table is no stack.
    """

    keys: npt.ArrayLike | None = None
    table: int = 0
    row_splits: npt.ArrayLike | None = None
    weights: npt.ArrayLike | None = None
    combiner: str = "sum"
    slots: npt.ArrayLike | None = None
    generation: int | None = None
    members: Sequence[Member] | None = None


@dataclasses.dataclass(eq=False)
class Routing:
    """What `route` makes of a batch. n: entries of the lookups that are pooled at the requester.

    Attributes:
      keys: [n] int64: the unique keys of each table in send order (by owning rank, then table, then ascending); the
        first `num_unique` are valid.
      counts: [num_ranks, num_tables] int64: unique keys for each rank and table. Where lookups are pooled at the owner
        [num_ranks, num_tables + 2 * num_lookups]: then their keys by lookup, and the row splits of their parts.
      inverse: [n] int64: for each entry the offset, in elements, of its row in the messages of floats.
      order: [n] int32: the entries grouped by unique key in send order.
      unique_splits: [n + 1] int32: unique key u has the entries order[unique_splits[u] : unique_splits[u + 1]].
      bag_keys: int64: the keys of the other lookups by owning rank, then by lookup, as they came.
      bag_splits: int64: likewise the row splits of their parts, [bags + 1] on each rank that the table lives on.
      tables: the table of each lookup, where lookups are pooled at the owner.
    """

    keys: Array
    counts: Array
    inverse: Array
    order: Array
    unique_splits: Array
    bag_keys: Array
    bag_splits: Array
    tables: Sequence[int]

    @property
    def num_unique(self) -> int:
        """Unique keys of the call, over all ranks and tables."""
        return int(self.counts[:, : self.counts.shape[1] - 2 * len(self.tables)].sum())

    def messages(self, tables: Sequence[Table]) -> Messages:
        """What this rank asks for and gets. tables: those of `route`."""
        return Messages(self.counts, [table.shape[1] for table in tables], self.tables)

    def struct(self) -> _abi.Routing:
        """The sok_routing; self must outlive it."""
        arrays = (self.keys, self.counts, self.inverse, self.order, self.unique_splits, self.bag_keys, self.bag_splits)
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
            struct.generation = _abi.FOREVER if lookup.generation is None else lookup.generation
            members = lookup.members or ()
            struct.num_members = len(members)
            struct.members = (_abi.Member * len(members))(
                *(_abi.Member(m.name.encode(), m.first_key, m.num_rows) for m in members)
            )
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
                side_by_side = max(len(members), 1)
                shape = (num_bags // side_by_side, side_by_side * max(width, 0))
                self.outputs.append(empty(context, shape, np.float32))
                struct.output = _arrays.view(self.outputs[-1])

    def _read(self, value: npt.ArrayLike | None, what: str) -> Array | None:
        array = _arrays.read(value, what)
        self._alive.append(array)
        return array

    @property
    def arguments(self) -> tuple[Any, ...]:
        """num_tables, tables, num_lookups, lookups."""
        return len(self.tables), self.tables, len(self.lookups), self.lookups


def split_batch(tables: Sequence[Table], lookups: Sequence[Lookup], *, context: Context | None = None) -> list[bool]:
    """For each lookup whether it is better pooled at the owner, by the bytes that would travel; SOK_POOLING=owner or
    requester decides instead, where it is possible.

    Raises:
      ValueError: another value of SOK_POOLING.
    """
    batch, pooled = Batch(tables, lookups), (ctypes.c_int32 * len(lookups))()
    struct = _abi.Batch(ctypes.sizeof(_abi.Batch), pooled)
    _library.check(_abi.library().sok_split_batch(pointer(context), *batch.arguments, ctypes.byref(struct)))
    return [bool(value) for value in pooled]


def _num_splits(tables: Sequence[Table], lookup: Lookup) -> int:
    """Row splits of the parts of a lookup's bags on all ranks."""
    if not 0 <= lookup.table < len(tables):
        return 0  # the core reports it
    table, of_bags = tables[lookup.table], lookup.keys if lookup.row_splits is None else lookup.row_splits
    size = _arrays.read(of_bags, "row_splits").size  # type: ignore[union-attr]
    return (size + (lookup.row_splits is None)) * (1 if table.owner >= 0 else max(table.num_ranks, 0))


def route(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    *,
    pooled: Sequence[bool] | None = None,
    context: Context | None = None,
) -> Routing:
    """Checks the keys, removes duplicates for each table and sorts the rest by owning rank; bags that are pooled at the
    owner it cuts into parts.

    Args:
      pooled: for each lookup whether it is pooled at the owner; None: none is.

    Raises:
      IndexError: a key is outside its table.
      ValueError: row splits that are none; a lookup with weights is to be pooled at the owner.
    """
    batch = Batch(tables, lookups)
    at_owner = [False] * len(lookups) if pooled is None else list(pooled)
    bag_keys = sum(size for size, is_pooled in zip(batch.num_keys, at_owner, strict=True) if is_pooled)
    n, num_ranks = batch.num_entries - bag_keys, max(tables[0].num_ranks, 0) if tables else 0
    splits = sum(_num_splits(tables, x) for x, is_pooled in zip(lookups, at_owner, strict=True) if is_pooled)
    positions = [] if pooled is None else [lookup.table for lookup in lookups]
    routing = Routing(
        keys=empty(context, n, np.int64),
        counts=empty(context, (num_ranks, len(tables) + 2 * len(positions)), np.int64),
        inverse=empty(context, n, np.int64),
        order=empty(context, n, np.int32),
        unique_splits=empty(context, n + 1, np.int32),
        bag_keys=empty(context, bag_keys, np.int64),
        bag_splits=empty(context, splits, np.int64),
        tables=positions,
    )
    struct = routing.struct()
    choice = None if pooled is None else (ctypes.c_int32 * len(lookups))(*at_owner)
    _library.check(_abi.library().sok_route(pointer(context), *batch.arguments, choice, ctypes.byref(struct)))
    return routing


def join_keys(tables: Sequence[Table], routing: Routing, *, context: Context | None = None) -> Array:
    """The messages of keys to all ranks: [n] int64, of what `route` made."""
    messages, struct = routing.messages(tables), routing.struct()
    keys = empty(context, messages.num_keys, np.int64)
    _library.check(
        _abi.library().sok_join_keys(
            pointer(context), ctypes.byref(messages.struct), ctypes.byref(struct), _arrays.view(keys)
        )
    )
    return keys


def _came(tables: Sequence[Table], counts: npt.ArrayLike | Messages) -> Messages:
    return counts if isinstance(counts, Messages) else Messages(counts, [table.shape[1] for table in tables])


def locate(
    tables: Sequence[Table],
    keys: npt.ArrayLike,
    counts: npt.ArrayLike | Messages,
    *,
    insert: bool = False,
    admit: bool = False,
    filter: bool = False,
    context: Context | None = None,
) -> Array:
    """Keys that arrived here -> their slots, [n] int64.

    Args:
      keys: [n] int32 or int64, by source rank, then by table; or the messages of keys.
      counts: [num_sources, num_tables]: how many keys came from each rank for each table; or what says where they are.
      insert: indices take in the keys that they lack (else slot -1).
      admit, filter: of these those that their tables admit, with their filter_ratio or without (`core.Admission`).

    Raises:
      IndexError: a key is outside its table or belongs to another rank.
    """
    key_array = _arrays.read(keys, "keys")
    assert key_array is not None
    slots = empty(context, key_array.shape, np.int64)
    lookups = _came(tables, counts).lookups(key_array, slots, None)
    arrays = (len(tables), placements(tables), indices(tables), len(lookups), lookups)
    flags = _abi.LOCATE_INSERT * insert | _abi.LOCATE_ADMIT * admit | _abi.LOCATE_FILTER * filter
    _library.check(_abi.library().sok_locate(pointer(context), *arrays, flags))
    return slots


def locate_lookups(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    *,
    insert: bool = False,
    context: Context | None = None,
) -> list[Array]:
    """The slots of the keys of each lookup, [n] int64, where there is one rank, and so nothing to route: those of
    members of stacks, and of tables with an index.

    Args:
      insert: as of `locate`.

    Raises:
      IndexError: a key is outside its table, or outside its member.
      ValueError: row splits that are none, or not of as many bags for each member.
    """
    batch = Batch(tables, lookups)
    slots = [empty(context, size, np.int64) for size in batch.num_keys]
    for struct, array in zip(batch.lookups, slots, strict=True):
        struct.slots = _arrays.view(array)
    count, placed, *rest = batch.arguments
    flags = _abi.LOCATE_INSERT * insert
    _library.check(_abi.library().sok_locate(pointer(context), count, placed, indices(tables), *rest, flags))
    return slots


def gather(
    tables: Sequence[Table],
    slots: npt.ArrayLike,
    counts: npt.ArrayLike | Messages,
    *,
    keys: npt.ArrayLike | None = None,
    context: Context | None = None,
) -> Array:
    """Slots -> the messages of floats, [n] float32: rows, one after another in the order of the slots, and sums.

    Args:
      slots: int64, as `locate` gave them.
      counts, keys: as of `locate`; keys only where row splits are among them.

    Raises:
      IndexError: a slot is outside its table.
    """
    messages = _came(tables, counts)
    slot_array, key_array = _arrays.read(slots, "slots"), _arrays.read(keys, "keys")
    assert slot_array is not None
    floats = empty(context, messages.num_floats, np.float32)
    lookups = messages.lookups(key_array, slot_array, floats)
    arrays = (len(tables), columns(tables), len(lookups), lookups)
    _library.check(_abi.library().sok_gather_combine(pointer(context), *arrays))
    return floats


def combine(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    inverse: npt.ArrayLike,
    floats: npt.ArrayLike,
    *,
    messages: Messages | None = None,
    out: Sequence[Array] | None = None,
    context: Context | None = None,
) -> list[Array]:
    """Exchanged rows and sums -> one pooled vector a bag: for each lookup [bags, dimension] float32.

    Args:
      inverse: [n] int64, as `route` gave it.
      floats: rank 1, float32: the messages of floats; a row for each unique key, in send order, where none is of sums.
      messages: those of the routing; None: no lookup is pooled at the owner.
      out: where to write them instead of into new arrays; columns of a wider array will do.
    """
    batch = Batch(tables, lookups, outputs=True, context=context, out=out)
    arrays = [_arrays.view(_arrays.read(inverse, "inverse")), _arrays.view(_arrays.read(floats, "floats"))]
    struct = None if messages is None else ctypes.byref(messages.struct)
    _library.check(_abi.library().sok_combine(pointer(context), *batch.arguments, struct, *arrays))
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
