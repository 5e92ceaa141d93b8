# SPDX-License-Identifier: Apache-2.0
"""The tables of a DistributedEmbedding as dump and load, and what is said of changed rows, see them: whole,
LAYER/NUMBER, wherever they lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint.group import Group, agree, gathered
from ..checkpoint.header import stored_dtype
from ..checkpoint.variables import StateShard, TableShard
from ..held import Array, Column, GatheredColumn, HeldTable, Make, Slots
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


def with_layers(
    entries: Sequence[HeldTable | LayerTables], shards: Iterable[TableShard], group: Callable[[], Group]
) -> list[TableShard]:
    """The tables of entries, each of which is a table or those of a layer.

    shards: of tables, and of each layer's `variables` and then `replicated`, in their order. group: the ranks, which
    only layers ask for.
    """
    left = iter(shards)
    found: list[TableShard] = []
    for entry in entries:
        if isinstance(entry, LayerTables):
            ranks = group()
            found += layer_shards(entry, Placement(0, 0, num_ranks=ranks.size, rank=ranks.rank), left)
        else:
            found.append(next(left))
    return found


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
    variable = None if held is None else held.held
    if len(parts) > 1:
        pieces = [(part.owner, part.member.first_column, part.member.columns) for part in parts]
        first = None if own is None else own.member.first_row
        spread = dataclasses.replace(place, num_rows=rows, dimension=width, owner=DISTRIBUTED)
        cut = _Cut(spread, first, tuple(pieces))
        wrap: Callable[..., Column] = cut.column
        logical: HeldTable = _CutTable(name, dtype, cut, variable)
    elif table in layer.replicated:
        wrap = _as_it_is
        spread = dataclasses.replace(place, num_rows=rows, dimension=width, owner=DISTRIBUTED)
        assert variable is not None
        logical = _AllRows(name, spread, dtype, variable.rows, variable, 0)
    else:
        (part,) = parts
        window = _Window(part.member.first_row)
        wrap = window.column
        owned = dataclasses.replace(place, num_rows=rows, dimension=width, owner=part.owner)
        none = _NoRows(np.zeros((0, width), stored_dtype(dtype)))
        own_rows = none if variable is None else wrap(variable.rows)
        logical = _Rows(name, owned, dtype, own_rows, variable, part.member.first_row)
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
    """Rows of a variable, from `first` on; None: this rank has none."""

    def __init__(
        self, name: str, placement: Placement, dtype: str, rows: Column, variable: HeldTable | None, first: int
    ) -> None:
        super().__init__(name, placement, dtype, rows)
        self._variable, self._first = variable, first

    def track(self) -> None:
        """See HeldTable."""
        if self._variable is not None:
            self._variable.track()

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        return self._changed(stamp, self.placement.local_rows)

    def _changed(self, stamp: int, number: int) -> Array:
        """Of `number` rows, by their places in the table."""
        if self._variable is None:
            return np.zeros(0, np.int64)
        slots = self._variable.changed(stamp) - self._first
        return slots[(slots >= 0) & (slots < number)]

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        assert self._variable is not None
        self._variable.overwrite(keys + self._first, rows)


class _AllRows(_Rows):
    """A table of which this rank has all rows. Slots are keys; each rank writes its share, and takes all."""

    @property
    def load_owner(self) -> int:
        """See HeldTable."""
        return self.placement.rank

    def entries(self, size: int) -> Iterator[tuple[Array, Slots]]:
        """See HeldTable."""
        for first in range(0, self.num_entries, size):
            keys = super().keys(slice(first, min(first + size, self.num_entries)))
            yield keys, keys

    def keys(self, slots: Slots) -> Array:
        """See HeldTable."""
        return np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots

    def slots(self, keys: Array) -> Slots:
        """See HeldTable."""
        return keys

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        keys = self._changed(stamp, self.placement.num_rows)
        return np.asarray(keys[self.placement.mine(keys)])


class _CutTable(_AllRows):
    """The same of some columns, or of none."""

    def __init__(self, name: str, dtype: str, cut: _Cut, variable: HeldTable | None) -> None:
        rows = _CutColumn(cut, None if variable is None else variable.rows, dtype=stored_dtype(dtype))
        super().__init__(name, cut.placement, dtype, rows, variable, cut.first or 0)
        self._cut = cut

    @property
    def load_owner(self) -> int:
        """See HeldTable."""
        rank = self.placement.rank
        return rank if self._variable is not None else (rank + 1) % self.placement.num_ranks

    def changed(self, stamp: int) -> Array:
        """Those whose columns here changed; `rows.gather` tells of all."""
        return self._changed(stamp, self.placement.num_rows)

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        super().overwrite(keys, self._cut.own_columns(rows))


# --- columns ----------------------------------------------------------------------------------------------------------


class _NoRows:
    """Of a rank that has none."""

    def __init__(self, rows: Array) -> None:
        self._rows = rows

    def read(self, slots: Slots) -> Array:
        """See held.Column."""
        return self._rows[slots]

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        self._rows[slots] = values


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

    @property
    def own(self) -> tuple[int, int, int]:
        """This rank's piece."""
        return next(piece for piece in self.pieces if piece[0] == self.placement.rank)

    def own_columns(self, rows: Array) -> Array:
        """Those of whole rows that this rank has."""
        _, first, number = self.own
        return np.ascontiguousarray(rows[:, first : first + number])

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
    of gradients it is what the whole table would have. dtype: of what is read.
    """

    def __init__(
        self,
        cut: _Cut,
        column: Column | None,
        make: Callable[[], Column] | None = None,
        initial: float = 0.0,
        rowwise: bool = False,
        dtype: str = "float32",
    ) -> None:
        self._cut, self._column, self._make = cut, column, make
        self._initial, self._rowwise, self._dtype = initial, rowwise, dtype
        self._gathered: Array | None = None
        self._keys: Array | None = None  # of the rows that were gathered, ascending; None: all of the share

    def read(self, slots: Slots) -> Array:
        """See held.Column; slots are keys of this rank's share that were gathered."""
        assert self._gathered is not None
        return self._gathered[self._places(slots)].astype(self._dtype, copy=False)

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column; slots are keys."""
        assert self._cut.first is not None
        if self._column is None:
            assert self._make is not None
            self._column = self._make()
        self._column.write(_moved(slots, self._cut.first), values if self._rowwise else self._cut.own_columns(values))

    def gather(self, group: Group, make: Make) -> None:
        """See GatheredColumn."""
        place, self._keys = self._cut.placement, None
        pieces = chunks(place.num_rows, place.dimension, TOGETHER)
        self._bring(group, make, place.local_rows, (np.arange(first, first + count) for first, count in pieces))

    def gather_rows(self, group: Group, slots: Array, make: Make) -> Array:
        """See GatheredColumn."""
        place = self._cut.placement
        keys = np.unique(gathered(group, slots, agree(group, lambda: len(slots))))
        own = self._keys = np.asarray(keys[place.mine(keys)])
        pieces = chunks(len(keys), place.dimension, TOGETHER)
        self._bring(group, make, len(own), (keys[first : first + count] for first, count in pieces))
        return own

    def _places(self, keys: Any) -> Any:
        """Where rows of this rank's share are among those that were gathered."""
        return self._cut.placement.key_map(keys) if self._keys is None else np.searchsorted(self._keys, keys)

    def _bring(self, group: Group, make: Make, number: int, pieces: Iterable[Array]) -> None:
        """Gathers `number` rows, those of this rank's share of keys; pieces: the keys, the same on all ranks."""
        place = self._cut.placement
        shape = (number,) if self._rowwise else (number, place.dimension)
        made: list[Array] = []
        agree(group, lambda: made.append(make(shape)))
        (rows,) = made
        for keys in pieces:
            owners = place.owner_of(keys)
            shares = [keys[owners == rank] for rank in range(place.num_ranks)]
            own = [self._piece(share) for share in shares]
            came = group.alltoall(np.concatenate(own), [len(each) for each in own])
            self._put(rows, self._places(shares[place.rank]), came)
        self._gathered = rows

    def _piece(self, keys: Array) -> Array:
        """What this rank has of rows, flat."""
        if self._cut.first is None:
            return np.zeros(0, np.float32)
        if self._column is None:
            number = 1 if self._rowwise else self._cut.own[2]
            return np.full(len(keys) * number, self._initial, np.float32)
        return self._column.read(keys + self._cut.first).astype(np.float32, copy=False).reshape(-1)

    def _put(self, rows: Array, where: Array, came: Array) -> None:
        """What came, rank by rank, into rows `where`."""
        at, width = 0, self._cut.placement.dimension
        if self._rowwise:
            rows[where] = 0
        for _, first, number in sorted(self._cut.pieces):
            size = len(where) * (1 if self._rowwise else number)
            part = came[at : at + size]
            if self._rowwise:
                rows[where] += part * (number / width)
            else:
                rows[where, first : first + number] = part.reshape(-1, number)
            at += size
