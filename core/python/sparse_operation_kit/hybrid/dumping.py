# SPDX-License-Identifier: Apache-2.0
"""The tables of a DistributedEmbedding as dump and load see them: whole, LAYER/NUMBER, wherever they lie."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint.group import Group, agree
from ..checkpoint.variables import StateShard, TableShard
from ..held import Array, Column, GatheredColumn, HeldTable, Slots
from ..placement import DISTRIBUTED, Placement
from .layout import Layout, Member, chunks, table_name
from .transfer import TOGETHER


@dataclasses.dataclass(frozen=True)
class LayerTables:
    """What a layer says of its tables on this rank.

    name: the layer's. configs, dtypes: of all tables. variables: by their numbers in the layout, those of which this
    rank has rows. replicated: by the numbers of their tables.
    """

    name: str
    layout: Layout
    configs: Sequence[Mapping[str, Any]]
    dtypes: Sequence[str]
    variables: Mapping[int, Any]
    replicated: Mapping[int, Any]


class _Part(NamedTuple):
    """Columns of a table, in a variable of one rank, or of all."""

    variable: int
    owner: int
    member: Member


def layer_shards(layer: LayerTables, place: Placement, held: Iterator[TableShard]) -> list[TableShard]:
    """The layer's tables, in order.

    place: any placement on these ranks. held: of `variables` and then of `replicated`, in their order.
    """
    variables = dict(zip(layer.variables, held, strict=False))
    replicated = dict(zip(layer.replicated, held, strict=False))
    parts: dict[int, list[_Part]] = {}
    for number, variable in enumerate(layer.layout.variables):
        for member in variable.members:
            parts.setdefault(member.table, []).append(_Part(number, variable.owner, member))
    shards = []
    for table in range(len(layer.configs)):
        own = next((part for part in parts.get(table, ()) if part.variable in variables), None)
        held_as = replicated.get(table) if own is None else variables[own.variable]
        shards.append(_shard(layer, table, parts.get(table, []), place, own, held_as))
    return shards


def _shard(
    layer: LayerTables,
    table: int,
    parts: Sequence[_Part],
    place: Placement,
    own: _Part | None,
    held: TableShard | None,
) -> TableShard:
    """own: which of its parts this rank has. held: what that, or the replicated table, is; None: this rank has none."""
    config, name = layer.configs[table], table_name(layer.name, table)
    rows, width, dtype = config["input_dim"], config["output_dim"], layer.dtypes[table]
    rows_held = None if held is None else held.held.rows
    if len(parts) > 1:
        pieces = [(part.owner, part.member.first_column, part.member.columns) for part in parts]
        first = None if own is None else own.member.first_row
        cut = _Cut(dataclasses.replace(place, num_rows=rows, dimension=width, owner=DISTRIBUTED), first, tuple(pieces))
        wrap: Callable[..., Column] = cut.column
        logical: HeldTable = _AllRows(name, cut.placement, dtype, wrap(rows_held), own is not None)
    elif table in layer.replicated:
        wrap = _as_it_is
        spread = dataclasses.replace(place, num_rows=rows, dimension=width, owner=DISTRIBUTED)
        assert rows_held is not None
        logical = _AllRows(name, spread, dtype, rows_held, True)
    else:
        (part,) = parts
        window = _Window(part.member.first_row)
        wrap = window.column
        owned = dataclasses.replace(place, num_rows=rows, dimension=width, owner=part.owner)
        logical = _Rows(name, owned, dtype, wrap(rows_held))
    if held is None:
        return TableShard(logical, None, wrap=wrap)
    assert held.states is not None
    return dataclasses.replace(held, held=logical, states=[_state(each, wrap) for each in held.states], wrap=wrap)


def _state(state: StateShard, wrap: Callable[..., Column]) -> StateShard:
    """As `wrap` shows its column; of a table that is cut there is always one, since ranks are to gather it together."""
    shown = wrap(state.column, state.make, state.spec.initial, state.spec.rowwise)
    present = state.column is not None or isinstance(shown, GatheredColumn)
    return StateShard(state.spec, shown if present else None, lambda: wrap(state.make()))


def _as_it_is(column: Column, *unused: Any) -> Column:
    del unused
    return column


# --- tables -----------------------------------------------------------------------------------------------------------


class _Rows(HeldTable):
    """Rows of a variable."""

    def track(self) -> None:
        """See HeldTable."""
        raise NotImplementedError(f"changed rows of table '{self.name}' are those of its layer's variables")

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        raise NotImplementedError(f"changed rows of table '{self.name}' are those of its layer's variables")

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        raise NotImplementedError(f"changed rows of table '{self.name}' are those of its layer's variables")


class _AllRows(_Rows):
    """A table of which this rank has all rows, or some columns of them. Slots are keys; each rank writes its share."""

    def __init__(self, name: str, placement: Placement, dtype: str, rows: Column, here: bool) -> None:
        super().__init__(name, placement, dtype, rows)
        self._here = here

    @property
    def load_owner(self) -> int:
        """See HeldTable."""
        rank = self.placement.rank
        return rank if self._here else (rank + 1) % self.placement.num_ranks

    def entries(self, size: int) -> Iterator[tuple[Array, Slots]]:
        """See HeldTable."""
        for keys, _ in super().entries(size):
            yield keys, keys

    def slots(self, keys: Array) -> Slots:
        """See HeldTable."""
        return keys


# --- columns ----------------------------------------------------------------------------------------------------------


class _Window:
    """A table's rows among those of a variable, from `first` on."""

    def __init__(self, first: int) -> None:
        self._first = first

    def column(self, column: Column | None, *unused: Any) -> Column:
        """Of a column of the variable; None: this rank has no rows."""
        del unused
        return _Shifted(column, self._first)


class _Shifted:
    def __init__(self, column: Column | None, first: int) -> None:
        self._column, self._first = column, first

    def read(self, slots: Slots) -> Array:
        """See held.Column."""
        assert self._column is not None
        return self._column.read(_moved(slots, self._first))

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        assert self._column is not None
        self._column.write(_moved(slots, self._first), values)


def _moved(slots: Slots, by: int) -> Slots:
    return slice(slots.start + by, slots.stop + by) if isinstance(slots, slice) else slots + by


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A table that is cut into columns.

    placement: the rows that each rank is to write. first: where its rows begin in this rank's variable; None: this rank
    has none. pieces: (rank, first column, columns), all of them.
    """

    placement: Placement
    first: int | None
    pieces: tuple[tuple[int, int, int], ...]

    def column(
        self,
        column: Column | None,
        make: Callable[[], Column] | None = None,
        initial: float = 0.0,
        rowwise: bool = False,
    ) -> Column:
        """Of a column of this rank's variable; None: there is none yet, and `make` makes it."""
        return _CutColumn(self, column, make, initial, rowwise)


class _CutColumn(GatheredColumn):
    """Reads this rank's share of rows, gathered from all ranks; writes this rank's columns of any rows.

    What there is one number a row of ("row-wise") is the mean of what the pieces have, by their columns: as of squares
    of gradients it is what the whole table would have.
    """

    def __init__(
        self, cut: _Cut, column: Column | None, make: Callable[[], Column] | None, initial: float, rowwise: bool
    ) -> None:
        self._cut, self._column, self._make = cut, column, make
        self._initial, self._rowwise = initial, rowwise
        self._gathered: Array | None = None

    def read(self, slots: Slots) -> Array:
        """See held.Column; slots are keys of this rank's share."""
        assert self._gathered is not None
        return np.asarray(self._gathered[self._cut.placement.key_map(slots)])

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column; slots are keys."""
        assert self._cut.first is not None
        if self._column is None:
            assert self._make is not None
            self._column = self._make()
        if not self._rowwise:
            _, first, number = self._own
            values = np.ascontiguousarray(values[:, first : first + number])
        self._column.write(_moved(slots, self._cut.first), values)

    @property
    def _own(self) -> tuple[int, int, int]:
        return next(piece for piece in self._cut.pieces if piece[0] == self._cut.placement.rank)

    def gather(self, group: Group, folder: str | None) -> None:
        """See GatheredColumn."""
        place = self._cut.placement
        ranks = [dataclasses.replace(place, rank=rank) for rank in range(place.num_ranks)]
        shape = (place.local_rows,) if self._rowwise else place.local_shape
        made: list[Array] = []
        agree(group, lambda: made.append(_on_disk(shape, folder)))
        (gathered,) = made
        for first, count in chunks(place.num_rows, place.dimension, TOGETHER):
            # Keys first, first + 1, ... of each rank's share.
            keys = [np.arange(first + (r.rank - first) % r.num_ranks, first + count, r.num_ranks) for r in ranks]
            own = [self._piece(each) for each in keys]
            came = group.alltoall(np.concatenate(own), [len(each) for each in own])
            self._put(gathered, place.key_map(keys[place.rank]), came)
        self._gathered = gathered

    def _piece(self, keys: Array) -> Array:
        """What this rank has of rows, flat."""
        if self._cut.first is None:
            return np.zeros(0, np.float32)
        if self._column is None:
            number = 1 if self._rowwise else self._own[2]
            return np.full(len(keys) * number, self._initial, np.float32)
        return self._column.read(keys + self._cut.first).astype(np.float32, copy=False).reshape(-1)

    def _put(self, gathered: Array, where: Array, came: Array) -> None:
        """What came, rank by rank, into rows `where`."""
        at, width = 0, self._cut.placement.dimension
        if self._rowwise:
            gathered[where] = 0
        for _, first, number in sorted(self._cut.pieces):
            size = len(where) * (1 if self._rowwise else number)
            part = came[at : at + size]
            if self._rowwise:
                gathered[where] += part * (number / width)
            else:
                gathered[where, first : first + number] = part.reshape(-1, number)
            at += size


def _on_disk(shape: tuple[int, ...], folder: str | None) -> Array:
    """An array of float32 in a file that nobody else sees and that goes with it; OSError where the disk is full."""
    size = 4 * int(np.prod(shape))
    if not size:
        return np.zeros(shape, np.float32)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(file, np.float32, "r+", shape=shape)
