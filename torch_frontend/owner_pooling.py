# SPDX-License-Identifier: Apache-2.0
"""Pooling at the owner (docs/ARCHITECTURE.md): which lookups of a call, and what that makes of its messages.

Of a lookup whose rows travel a rank asks for the unique keys. Of a lookup that is pooled at the owner it asks each rank
that the table lives on for the sums of its parts of the bags: by their keys and row splits. Each rank chooses for its
own lookups and tells the others in the counts. Both kinds share the messages. What goes to one rank is

    in a message of keys: the unique keys by table, the keys of parts by lookup, the row splits of parts by lookup;
    in a message of rows, and of their gradients: the rows by table, the sums of parts by lookup.

A message of one kind alone is the array that a stage wrote or will read, not a copy.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.call import Call, Lookups, Tables

Sizes = list[list[int]]
"""[ranks][arrays]: elements of the arrays of a message."""


def num_counts(num_tables: int, num_lookups: int) -> int:
    """How many counts a rank tells each other: what `Counts` reads."""
    return num_tables + 2 * num_lookups


class Counts:
    """How much travels between this rank and each of the others, in one direction.

    Args:
      counts: [ranks, num_counts()] int64 on the CPU, as they were swapped.

    Attributes, by rank:
      rows: [ranks * tables], the unique keys of lookups whose rows travel.
      keys: [ranks * lookups], the keys of lookups that are pooled at the owner.
      splits: [ranks * lookups], the row splits of their parts, one more than bags; 0 where there are no parts: for
        other lookups, and where the table does not live on the rank that is asked.
      pooled: whether anything is pooled at the owner.
      in_keys, in_rows: the sizes of the messages.
      elements: of each table and, where anything is pooled, each lookup in the messages of rows.
    """

    __slots__ = ("_positions", "elements", "in_keys", "in_rows", "keys", "pooled", "rows", "splits")

    def __init__(self, counts: Tensor, tables: Tables) -> None:
        first, second = len(tables.names), len(tables.names) + len(tables.positions)
        ranks = counts.tolist()
        columns = (slice(first), slice(first, second), slice(second, None))
        rows, keys, splits = ([row[part] for row in ranks] for part in columns)
        self._positions = tables.positions * len(ranks)
        self.pooled = any(map(any, splits))
        self.rows, self.keys, self.splits = _flat(rows), _flat(keys), _flat(splits)
        elements = [list(map(operator.mul, row, tables.dimensions)) for row in rows]
        if self.pooled:
            widths = [tables.dimensions[table] for table in tables.positions]
            sums = [[(n - 1) * width if n else 0 for n, width in zip(row, widths, strict=True)] for row in splits]
            self.elements = _flat([part for rank in zip(elements, sums, strict=True) for part in rank])
            self.in_keys: Sizes = [list(map(sum, rank)) for rank in zip(rows, keys, splits, strict=True)]
            self.in_rows: Sizes = [list(map(sum, rank)) for rank in zip(elements, sums, strict=True)]
        else:
            self.elements = _flat(elements)
            self.in_keys = [[sum(row)] for row in rows]
            self.in_rows = [[sum(row)] for row in elements]

    def parts(self) -> list[tuple[int, int, int]]:
        """(position of the table, keys, bags) of each rank and lookup that has parts."""
        every = zip(self._positions, self.keys, self.splits, strict=True)
        return [(table, keys, splits - 1) for table, keys, splits in every if splits]


def _flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def join(arrays: Sequence[Tensor | None], sizes: Sizes) -> Tensor:
    """The messages to all ranks, one after the other, from arrays that are each by rank.

    An array may be longer than its sizes say, and None where they say 0.
    """
    used = [k for k in range(len(sizes[0])) if any(rank[k] for rank in sizes)]
    given = [
        array[: sum(rank[k] for rank in sizes)] for k, array in enumerate(arrays) if array is not None and k in used
    ]
    if not used:
        return next(array for array in arrays if array is not None)[:0]
    if len(used) == 1:
        return given[0]
    pieces = [iter(array.split([rank[k] for rank in sizes])) for k, array in zip(used, given, strict=True)]
    return torch.cat([next(piece) for _ in sizes for piece in pieces])


def split(message: Tensor, sizes: Sizes) -> list[Tensor]:
    """The arrays, each by rank, of the messages from all ranks."""
    kinds = range(len(sizes[0]))
    used = [k for k in kinds if any(rank[k] for rank in sizes)]
    if len(used) < 2:
        return [message if k in used else message[:0] for k in kinds]
    pieces = message.split([size for rank in sizes for size in rank])
    return [torch.cat(pieces[k :: len(kinds)]) for k in kinds]


@dataclasses.dataclass(slots=True)
class Routed:
    """A call as the rank that asks has routed it; what `combine` needs of it."""

    order: list[int]
    """Of each lookup of the call: its place among those of `rows`, then those of `bags`."""
    rows: Lookups | None
    """The lookups whose rows travel."""
    routing: tuple[Tensor, ...]
    """keys, inverse, order and unique_splits of `rows`, as the op `route` gave them."""
    bags: Lookups | None
    """The lookups that are pooled at the owner."""
    scales: tuple[Tensor, ...]
    """Those of `bags`, as the op `route_bags` gave them."""

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order that `with_tensors` reads."""
        lookups = [tensor for part in (self.rows, self.bags) if part is not None for tensor in part.tensors()]
        return [*self.routing, *self.scales, *lookups]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Routed:
        """This with the first of `tensors`."""
        place = 4 if self.rows is not None else 0
        routing = tuple(tensors[:place])
        scales = tuple(tensors[place : place + 1]) if self.bags is not None else ()
        place += len(scales)
        taken: list[Lookups | None] = []
        for part in (self.rows, self.bags):
            taken.append(None if part is None else part.with_tensors(tensors[place:]))
            place += 0 if part is None else part.num_tensors
        return Routed(self.order, taken[0], routing, taken[1], scales)

    def without_tensors(self) -> Routed:
        """This without any tensor, to be kept while autograd keeps the tensors."""
        parts = [None if part is None else part.without_tensors() for part in (self.rows, self.bags)]
        return Routed(self.order, parts[0], (), parts[1], ())

    def by_kind(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The output gradients of `rows` and those of `bags`."""
        first = 0 if self.rows is None else len(self.rows.key_tables)
        both = list(zip(self.order, gradients, strict=True))
        return [value for place, value in both if place < first], [value for place, value in both if place >= first]


@dataclasses.dataclass(slots=True)
class Asked:
    """What the ranks ask of the owner of rows."""

    counts: Counts
    keys: Tensor
    """The unique keys of lookups whose rows travel."""
    slots: Tensor
    """Where these are."""
    part_slots: Tensor | None
    """Where the keys of the parts of bags are; None: nothing is pooled here."""
    splits: Tensor | None
    """Row splits of the parts."""


def route(call: Call, ranks: tuple[int, int]) -> tuple[Routed, tuple[Tensor | None, ...], Tensor]:
    """Chooses how each lookup is pooled, and routes both kinds.

    Args:
      ranks: (how many, which this is).

    Returns:
      (the call as it is routed; the arrays of the message of keys; [ranks, tables or num_counts()] int64: the counts of
      it, 0 where there are no columns).

    Raises:
      IndexError: a key is outside its table.
      ValueError: row splits that are none, or another value of SOK_POOLING than those there are.
    """
    placement = (call.names(), call.owners(), call.num_rows(), call.dimensions(), *ranks)
    lookups = call.lookups
    chosen = ops.choose_pooling(*placement, *lookups.arguments()) if lookups.bagged else ()
    if not any(chosen):
        keys, counts, *routing = ops.route(*placement, *lookups.arguments())
        return Routed(list(range(len(lookups.keys))), lookups, (keys, *routing), None, ()), (keys,), counts
    pooled = [i for i, at_owner in enumerate(chosen) if at_owner]
    others = [i for i, at_owner in enumerate(chosen) if not at_owner]
    places = {i: place for place, i in enumerate(others + pooled)}
    order = [places[i] for i in range(len(chosen))]
    bags = lookups.select(pooled)
    part_keys, part_counts, splits, scales = ops.route_bags(*placement, *bags.arguments())
    if others:
        rows = lookups.select(others)
        keys, row_counts, *routing = ops.route(*placement, *rows.arguments())
        routed = Routed(order, rows, (keys, *routing), bags, (scales,))
    else:
        keys, row_counts = None, None
        routed = Routed(order, None, (), bags, (scales,))
    counts = _counts(call, ranks[0], row_counts, part_counts, pooled)
    return routed, (keys, part_keys, splits), counts


def _counts(
    call: Call, num_ranks: int, row_counts: Tensor | None, part_counts: Tensor, pooled: Sequence[int]
) -> Tensor:
    """[ranks, num_counts()], without a wait for the device."""
    num_tables, num_lookups = len(call.tables), len(call.lookups.keys)
    sizes = {i: tensor.shape[0] for tensor, i in zip(call.lookups.row_splits, call.lookups.bagged, strict=True)}
    splits = [0] * num_lookups
    for i in pooled:
        splits[i] = sizes[i]
    owners = [call.owners()[table] for table in call.lookups.key_tables]
    known = [
        n if owner in (-1, rank) else 0 for rank in range(num_ranks) for n, owner in zip(splits, owners, strict=True)
    ]
    known += [num_tables + i for i in pooled]
    on_host = torch.tensor(known, dtype=torch.int64, device="cpu", pin_memory=part_counts.is_cuda)
    on_device = on_host.to(part_counts.device, non_blocking=True)
    of_splits, columns = on_device.split([num_ranks * num_lookups, len(pooled)])
    counts = part_counts.new_zeros((num_ranks, num_counts(num_tables, num_lookups)))
    if row_counts is not None:
        counts[:, :num_tables] = row_counts
    counts.index_copy_(1, columns, part_counts)
    counts[:, num_tables + num_lookups :] = of_splits.view(num_ranks, num_lookups)
    return counts


def locate(call: Call, ranks: tuple[int, int], keys: Tensor, counts: Counts) -> Asked:
    """Keys -> slots of what came, on the owner; keys: the messages of all ranks."""
    names, owners, num_rows = call.names(), call.owners(), call.num_rows()
    arrays = split(keys, counts.in_keys)
    slots = ops.locate(call.tables, names, owners, num_rows, *ranks, counts.rows, arrays[0])
    if not counts.pooled:
        return Asked(counts, arrays[0], slots, None, None)
    positions = call.described.positions
    of_lookups = [[values[table] for table in positions] for values in (call.tables, names, owners, num_rows)]
    part_slots = ops.locate(*of_lookups, *ranks, counts.keys, arrays[1])
    return Asked(counts, arrays[0], slots, part_slots, arrays[2])


def gather(call: Call, ranks: tuple[int, int], tables: Sequence[Tensor], asked: Asked) -> Tensor:
    """Slots -> the messages of rows, on the owner."""
    placement = (call.names(), call.owners(), call.num_rows(), *ranks)
    counts = asked.counts
    rows: Tensor = ops.gather(tables, *placement, counts.rows, asked.keys, asked.slots)
    if not counts.pooled:
        return rows
    parts = list(map(list, zip(*counts.parts(), strict=True)))
    sums = ops.gather_bags(tables, *placement, *parts, asked.part_slots, asked.splits)
    return join((rows, sums), counts.in_rows)


def combine(placement: tuple[Any, ...], routed: Routed, counts: Counts, message: Tensor) -> tuple[list[Tensor], Tensor]:
    """Exchanged messages of rows -> [bags, dimension] of each lookup; and, for the gradients of weights, the rows."""
    arrays = split(message, counts.in_rows)
    outputs: list[Tensor] = []
    if routed.rows is not None:
        keys, inverse, order, splits = routed.routing
        routing = (keys, counts.rows, inverse, order, splits)
        outputs += ops.combine(arrays[0], *placement, *routed.rows.arguments(), *routing)
    if routed.bags is not None:
        outputs += ops.combine_bags(arrays[1], *placement, *routed.bags.arguments(), *routed.scales)
    return [outputs[place] for place in routed.order], arrays[0]


def spread(placement: tuple[Any, ...], routed: Routed, counts: Counts, gradients: Sequence[Tensor | None]) -> Tensor:
    """Output gradients -> the gradients of the messages of rows."""
    of_rows, of_bags = routed.by_kind(gradients)
    rows = sums = None
    if routed.rows is not None:
        keys, inverse, order, splits = routed.routing
        routing = (keys, counts.rows, inverse, order, splits)
        rows = ops.spread(of_rows, *placement, *routed.rows.arguments(), *routing)
    if routed.bags is not None:
        sums = ops.spread_bags(of_bags, *placement, *routed.bags.arguments(), *routed.scales)
    return join((rows, sums), counts.in_rows)
