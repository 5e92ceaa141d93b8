# SPDX-License-Identifier: Apache-2.0
"""Tables as what runs between steps sees them (dump and load, changed rows): columns over slots, and keys that name
the slots. A frontend says how the columns of its framework are read and written.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

import numpy as np

from sparse_operation_kit import dynamic
from sparse_operation_kit.checkpoint.errors import MismatchError
from sparse_operation_kit.checkpoint.group import Group
from sparse_operation_kit.checkpoint.header import stored_dtype
from sparse_operation_kit.placement import ANY_KEY, Placement
from sparse_operation_kit.stored_rows import StateColumn, StoredRows

Array = np.ndarray[Any, Any]
Slots = slice | Array
"""Slots of this rank: [n] int64, or a slice of step 1 where they follow one another."""
Make = Callable[[tuple[int, ...]], Array]
"""Makes an array of float32 of a shape."""


class Column(Protocol):
    """An array over this rank's slots, [slots, dimension] or [slots], wherever it is: rows, or an optimizer's state."""

    def read(self, slots: Slots) -> Array:
        """Its elements, in host memory; the column's own memory where it is there. bfloat16 as float32."""

    def write(self, slots: Slots, values: Array) -> None:
        """Overwrites elements; `values`, of any floating dtype, are rounded to nearest and last until it returns."""


class GatheredColumn(abc.ABC):
    """A `Column` that this rank has no whole rows of: they are gathered from all ranks before they are read."""

    @abc.abstractmethod
    def gather(self, group: Group, make: Make) -> None:
        """Called by every rank: brings together what each of them is to write."""

    @abc.abstractmethod
    def gather_rows(self, group: Group, slots: Array, make: Make) -> Array:
        """The same of those slots that any rank names -> [n] int64: those of them that are this rank's to write."""

    @abc.abstractmethod
    def read(self, slots: Slots) -> Array:
        """See Column."""

    @abc.abstractmethod
    def write(self, slots: Slots, values: Array) -> None:
        """See Column."""


class HeldTable(abc.ABC):
    """A table as this rank holds it.

    name:       without TensorFlow's output number
    row_dtype:  NumPy's name of it, or "bfloat16"
    rows:       its column of rows
    key_type:   of a dynamic table: "int32" or "int64"
    capacity:   the most rows that this rank may hold; None: those of its keys
    gives_up_keys:    whether it is a HeldDynamicTable
    makes_room:       whether rows go by themselves, for new keys when it is full or in time
    most_candidates:  how many keys may wait for a row; 0: none
    kept:       columns of int64 [slots] of what is no row and no state, by the names that a dump gives them: "score",
                what rows are evicted by, and "used", when they were used last; to be written in this order
    stored:     its rows that are not in memory; None where it has no store
    """

    key_type = "int64"
    capacity: int | None = None
    gives_up_keys = False
    makes_room = False
    most_candidates = 0
    stored: StoredRows | None = None
    kept: Mapping[str, Column] = MappingProxyType({})

    def __init__(self, name: str, placement: Placement, row_dtype: str, rows: Column) -> None:
        self.name, self.placement, self.row_dtype, self.rows = name, placement, row_dtype, rows

    @property
    def load_owner(self) -> int:
        """Who needs which rows that are loaded, as the `owner` of a placement."""
        return self.placement.owner

    def takes(self, keys: Array) -> Array:
        """[n]: whether this rank needs the rows of global keys where they are loaded."""
        return np.asarray(dataclasses.replace(self.placement, owner=self.load_owner).mine(keys))

    @property
    def stored_dtype(self) -> str:
        """The dtype in which rows are handed around as NumPy arrays."""
        return stored_dtype(self.row_dtype)

    @property
    def is_dynamic(self) -> bool:
        """Whether any integer is a key."""
        return self.placement.num_rows == ANY_KEY

    @property
    def num_entries(self) -> int:
        """How many keys this rank holds."""
        return self.placement.local_rows

    def entries(self, size: int) -> Iterator[tuple[Array, Slots]]:
        """The keys that this rank holds and their slots, in pieces of `size` at most."""
        for first in range(0, self.num_entries, size):
            slots = slice(first, min(first + size, self.num_entries))
            yield self.keys(slots), slots

    def keys(self, slots: Slots) -> Array:
        """The global keys of slots, [n] int64."""
        numbers = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        return np.asarray(self.placement.global_keys(numbers.astype(np.int64)))

    def pieces(self, count: int) -> Iterator[slice]:
        """Of `count` keys those that it may be given at a time: no more than it may hold."""
        size = max(1, count) if self.capacity is None else self.capacity
        return (slice(first, first + size) for first in range(0, count, size))

    def begin_dump(self) -> None:
        """Before its rows are counted for a dump: a table may give some up."""
        return

    def begin_load(self, has_order: bool) -> None:
        """Before `slots` is asked for what is loaded: a dynamic table gives up all keys.

        has_order: whether what is loaded says which rows go first.
        """
        return

    def slots(self, keys: Array) -> Slots:
        """The slots of global keys that belong to this rank. A dynamic table inserts those that it does not hold."""
        slots = self.placement.key_map(keys)
        first, count = int(slots[0]) if len(slots) else 0, len(slots)
        follow = count == 0 or (int(slots[-1]) - first == count - 1 and bool((np.diff(slots) == 1).all()))
        return slice(first, first + count) if follow else slots

    @abc.abstractmethod
    def track(self) -> None:
        """Keeps from now on when each row changes; every row counts as changed now. A second call changes nothing."""

    @abc.abstractmethod
    def changed(self, stamp: int) -> Array:
        """[n] int64: the slots that changed at `stamp` or later, of a tracked table; where `rows` is a GatheredColumn,
        as far as this rank knows.
        """

    def check_room(self, coming: Array, going: Array) -> None:
        """Before it gives up the keys `going` [m] and is then given rows of `coming` [n], both int64 and each once:
        raises MismatchError where it has no room.
        """
        return

    @abc.abstractmethod
    def overwrite(self, keys: Array, rows: Array) -> None:
        """Writes rows [n, dimension] of `stored_dtype` to global keys [n] that this rank takes, each once; stamped."""


class Compared:
    """When rows changed last that nothing stamps, as it is found out by comparing them with what they were: a row
    counts as changed when somebody first looks after it changed, and all of them at the beginning.
    """

    def __init__(self, rows: Array) -> None:
        self._rows = np.array(rows)
        self._stamps = np.full(len(rows), time.time_ns())

    def changed(self, rows: Array, stamp: int) -> Array:
        """[n] int64: which of the rows, as they are now, changed at `stamp` or later."""
        if rows.dtype != self._rows.dtype:
            self.__init__(rows)  # type: ignore[misc]
        before, now = (np.ascontiguousarray(each).view(np.uint8) for each in (self._rows, rows))  # NaN is NaN
        different = np.flatnonzero((before != now).any(1))
        self._rows[different] = rows[different]
        self._stamps[different] = time.time_ns()
        return np.flatnonzero(self._stamps >= stamp)


def gives_up_keys(table: HeldTable) -> TypeGuard[HeldDynamicTable]:
    """Whether a table may lose keys that it holds."""
    return table.gives_up_keys


SLOTS_OF_CALL = 1 << 22
"""Of a dynamic table at once, where some of its slots are looked for."""


def admits(table: HeldTable) -> TypeGuard[HeldDynamicTable]:
    """Whether keys may wait for a row."""
    return table.most_candidates > 0


class LastUses:
    """When the rows of a dynamic table were used last: nanoseconds of UTC since 1970. Where rows are loaded, all of
    them are written by one of these, each after its score.
    """

    def __init__(self, table: HeldDynamicTable) -> None:
        self._table = table
        self._written = np.zeros((0, 2), np.int64)  # what the table knows by these alone, not by its insertions

    def read(self, slots: Slots) -> Array:
        """See Column."""
        scores = self._table.kept["score"].read(slots)
        return np.asarray(dynamic.times_of(scores, self._table.use_times(), time.time_ns()))

    def write(self, slots: Slots, values: Array) -> None:
        """See Column."""
        scores = self._table.kept["score"].read(slots)
        if self._table.was_numbered_anew_since(self._written[:, 0].max(initial=0)):
            has_number = self._written[:, 0] > dynamic.NUMBERED_LOWER
            self._written = self._written[has_number] - np.array([dynamic.NUMBERED_LOWER, 0])
        self._table.set_use_times(dynamic.with_times(self._written, scores, values))
        self._written = self._table.use_times()


class HeldDynamicTable(HeldTable):
    """A dynamic table as this rank holds it: any integers are keys, and rows of keys that it loads are made.

    Its column of rows, and those of its states, read and write slots that came after they were made.
    """

    gives_up_keys = True

    def keep(self, scores: Column | None) -> None:
        """Says what rows are evicted by, if anything."""
        self.kept = {} if scores is None else {"score": scores, "used": LastUses(self)}

    @property
    @abc.abstractmethod
    def num_entries(self) -> int:
        """How many keys this rank holds."""

    @property
    @abc.abstractmethod
    def num_slots(self) -> int:
        """All keys have slots below it."""

    @abc.abstractmethod
    def export(self, first_slot: int, size: int) -> tuple[Array, Array]:
        """The keys [n] int64 among `size` slots, and their slots, ascending."""

    @abc.abstractmethod
    def insert(self, keys: Array) -> Array:
        """The slots of keys [n] int64, which the table holds afterwards. No row is evicted for them."""

    @abc.abstractmethod
    def find(self, keys: Array) -> Array:
        """The slots of keys [n] int64; -1 of those that it does not hold."""

    @abc.abstractmethod
    def state_columns(self) -> list[StateColumn]:
        """The states of optimizers that it has, in the order in which they were made."""

    @abc.abstractmethod
    def erase(self, keys: Array) -> None:
        """Gives up keys [n] int64, those that it holds; its store keeps its own."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Gives up all keys, those that wait too."""

    @abc.abstractmethod
    def reset_epoch(self) -> None:
        """What is used from now on is of epoch 0 where rows go by epoch, until scores of a later one come."""

    @abc.abstractmethod
    def candidates(self) -> Array:
        """[n, 2] int64: the keys that wait for rows, and their scores, which count who asked for them."""

    @abc.abstractmethod
    def set_candidates(self, candidates: Array) -> None:
        """Replaces them, by `most_candidates` at most."""

    @abc.abstractmethod
    def use_times(self) -> Array:
        """[n, 2] int64, both ascending: generations, and when they began (sok_dynamic_table_use_times)."""

    @abc.abstractmethod
    def set_use_times(self, times: Array) -> None:
        """Replaces them."""

    @abc.abstractmethod
    def generations(self, seconds: float) -> tuple[int, int, int]:
        """By which scores say when rows were used last: the generation of now, the last that is known to have begun so
        long ago, and the last before the running step.
        """

    def was_numbered_anew_since(self, generation: int) -> bool:
        """Whether generations got lower numbers after this one had begun or rows had got scores of it."""
        return self.generations(0.0)[0] < generation

    def entries(self, size: int) -> Iterator[tuple[Array, Slots]]:
        """See HeldTable."""
        for first in range(0, self.num_slots, size):
            keys, slots = self.export(first, min(size, self.num_slots - first))
            if len(keys):
                yield keys, slots

    def in_use(self, slots: Array) -> Array:
        """Those of `slots` [n] int64, which ascend, that keys have."""
        found = [slots[:0]]
        for first in range(0, self.num_slots, SLOTS_OF_CALL):
            size = min(SLOTS_OF_CALL, self.num_slots - first)
            some = slots[slice(*np.searchsorted(slots, [first, first + size]))]
            if len(some):
                found.append(np.intersect1d(some, self.export(first, size)[1]))
        return np.concatenate(found)

    def keys(self, slots: Slots) -> Array:
        """See HeldTable."""
        held, places = self.export(0, self.num_slots)
        numbers = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        return np.asarray(held[np.searchsorted(places, numbers)])

    def begin_load(self, has_order: bool) -> None:
        """See HeldTable."""
        if self.stored is not None:  # first, as it may raise
            self.stored.clear()
        self.clear()
        if has_order:
            self.reset_epoch()

    def slots(self, keys: Array) -> Slots:
        """See HeldTable. Rows go to the store where there is one."""
        if self.stored is not None:
            self.stored.bring(self, keys.astype(np.int64))
        return self.insert(keys)

    def check_room(self, coming: Array, going: Array) -> None:
        """See HeldTable."""
        if self.makes_room or self.capacity is None:
            return
        is_new = (self.find(coming) < 0) | np.isin(coming, going)
        leave = self.find(going) >= 0
        rows = self.num_entries + int(is_new.sum()) - int(leave.sum())
        if rows > self.capacity:
            raise MismatchError(
                f"table '{self.name}' would hold {rows} rows on this rank", expected=f"at most {self.capacity}"
            )

    def give_up(self, keys: Array) -> None:
        """Gives up keys [n] int64, those that it or its store holds."""
        if self.stored is not None:  # first, as it may raise
            self.stored.erase(keys)
        self.erase(keys)

    def refuse_store(self, what: str) -> None:
        """Raises NotImplementedError where it has a store."""
        dynamic.refuse_store(self.stored, self.name, what)
