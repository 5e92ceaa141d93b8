# SPDX-License-Identifier: Apache-2.0
"""The rows of a dynamic table that are in its store (row_store.py): how they go there and come back.

A key is in the table or in the store, never in both. Before a call that inserts keys those that the store has come to
the table, and rows that the table would give up first go to the store, so that the core itself finds room for all keys
and never gives up a row. A record has what the table keeps of a row: what it is evicted by, the row, and its states.

From there until the call is done no other thread may move rows: calls of a table with a store run `alone`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dynamic
from .row_store import Array, RowStore

if TYPE_CHECKING:
    from .held import Column, HeldDynamicTable

_MOST_BYTES = 256 << 20
"""Of rows that go at once, unless more have to."""
_CHUNK_BYTES = 8 << 20
_STATE = np.dtype(np.float32)
_numbers = itertools.count()


@dataclass(frozen=True)
class StateColumn:
    """An optimizer state of a dynamic table, a column of float32.

    owner:   the framework's object, by which it is known
    width:   elements a row; 0: it is one number
    initial: what the rows of new keys have
    """

    owner: Any
    column: Column
    width: int
    initial: float


@dataclass(frozen=True)
class _State:
    """A StateColumn in records, which does not keep it alive."""

    owner: Callable[[], Any]
    width: int
    initial: float

    @property
    def bytes(self) -> int:
        return max(1, self.width) * _STATE.itemsize


class StoredRows:
    """What a table has in its store. `table` is always the same one, as its frontend holds it; keys are int64.

    counts: whether the strategy of eviction counts uses, of which a row is to keep the number
    turn:   what a thread holds while it uses the table alone, as often as it likes; None: a lock
    """

    def __init__(
        self, store: RowStore, name: str, counts: bool, turn: AbstractContextManager[Any] | None = None
    ) -> None:
        if store.table is not None:
            raise ValueError(f"table '{name}': the store has the rows of table '{store.table}'; each has its own")
        if store.size():
            raise ValueError(
                f"table '{name}': the store has {store.size()} rows already, whose table is gone; give an empty one, "
                "and load a dump"
            )
        store.table = name
        self.store = store
        self.turn: Any = threading.RLock() if turn is None else turn
        self.number = next(_numbers)
        self._counts = counts
        self._lock = threading.RLock()
        self._states: list[_State] = []  # as they are in records
        self._before: list[_State] = []  # as they are in those of the keys that follow
        self._unwritten: list[Array] = []
        self._stale: Array | None = None  # keys that the table has and the store could not give up yet
        self._ahead: tuple[Array, Future[tuple[Array, Array]]] | None = None
        self._reader: ThreadPoolExecutor | None = None

    @property
    def size(self) -> int:
        """How many rows are in the store and not in the table."""
        with self._lock:
            self._settle()
            return self.store.size()

    def bring(self, table: HeldDynamicTable, keys: Array) -> None:
        """Before a call that inserts `keys`: those that the store has come to the table, as they were, and there is
        room for the others. Where it raises no row is lost, and none has changed.
        """
        keys = np.unique(keys)
        with self._lock:
            states = self._begin(table)
            slots = table.find(keys)
            missing = keys[slots < 0]
            found, records = self._read(missing)
            brought, present = missing[found], keys[slots >= 0]
            self._ahead = None
            assert table.capacity is not None
            room = table.capacity - len(present)
            if len(brought) > room:  # an error of the framework's
                table.insert(np.concatenate([present, brought]))
            self._make_room(table, states, slots[slots >= 0], min(len(missing), room))
            if len(brought):
                self._take_back(table, states, brought, records)

    def values(self, table: HeldDynamicTable, keys: Array, always: bool) -> tuple[Array, Array] | None:
        """(those of `keys` that the table or the store has, each once; their rows); unless `always` None where the
        table has all of these. Nothing changes.
        """
        keys = np.unique(keys)
        with self._lock:
            self._begin(table)
            slots = table.find(keys)
            there = slots >= 0
            found, records = self._read(keys[~there])
            if not always and not found.any():
                return None
            rows = [table.rows.read(slots[there]), self.rows(table, records)]
            return np.concatenate([keys[there], keys[~there][found]]), np.concatenate(rows)

    def fetch_ahead(self, table: HeldDynamicTable, keys: Array) -> None:
        """Begins to read what `bring` of these keys will want. Another thread does it."""
        keys = np.unique(keys)
        with self._lock:
            self._begin(table)
            missing = keys[table.find(keys) < 0]
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="sok_store")
            self._ahead = missing, self._reader.submit(self.store.read, missing)

    def erase(self, keys: Array) -> None:
        """Gives up those of the keys that are in the store."""
        with self._lock:
            self._settle()
            self._ahead = None
            self.store.erase(np.unique(keys))

    def clear(self) -> None:
        """Gives up all keys."""
        with self._lock:
            self._settle()
            self._ahead = None
            self.store.erase(np.concatenate([*self.store.keys(1 << 20), np.zeros(0, np.int64)]))  # all of them or none

    def pieces(self, table: HeldDynamicTable, size: int) -> Iterator[tuple[Array, Array]]:
        """(keys, records) of all rows that are in the store, `size` at most at a time."""
        with self._lock:
            self._begin(table)
            all_keys = iter(self.store.keys(size))
        while True:
            with self._lock:  # between pieces other threads may ask for `size`
                keys = next(all_keys, None)
                if keys is None:
                    return
                records = self.store.read(keys)[1]
            yield keys, records

    def everything(self, table: HeldDynamicTable) -> tuple[Array, Array]:
        """(keys, rows) of all that is in the store."""
        keys, rows = [np.zeros(0, np.int64)], [self.rows(table, np.zeros((0, 0), np.uint8))]
        for piece, records in self.pieces(table, 1 << 20):
            keys.append(piece)
            rows.append(self.rows(table, records))
        return np.concatenate(keys), np.concatenate(rows)

    # What is in records [n, size].

    def scores(self, table: HeldDynamicTable, records: Array) -> Array:
        """[n] int64, of sok_dynamic_table_scores, as the table numbers generations now."""
        scores = _scores(records)
        return np.where(dynamic.uses_in(scores) > table.generations(0.0)[0], dynamic.lowered(scores), scores)

    def rows(self, table: HeldDynamicTable, records: Array) -> Array:
        """[n, dimension] of `stored_dtype`."""
        return _part(records, 8, np.dtype(table.stored_dtype), table.placement.dimension)

    def state(self, table: HeldDynamicTable, records: Array, column: Column) -> Array:
        """[n, width] or [n], of the state that `column` is."""
        first = 8 + _row_bytes(table)
        for state in self._states:
            if state.owner() is column.owner:  # type: ignore[attr-defined]
                return _part(records, first, _STATE, state.width)
            first += state.bytes
        raise ValueError(f"table '{table.name}': the store has no column for a state of the optimizer")

    # How they come there.

    def _settle(self) -> None:
        """Waits for who reads ahead, and does what an earlier call has left to do."""
        if self._ahead is not None:
            self._ahead[1].exception()
        if self._stale is not None:
            self.store.erase(self._stale)
            self._stale = None

    def _begin(self, table: HeldDynamicTable) -> list[StateColumn]:
        """The same, and records have the states that the table has. Returns these: an optimizer that is given up while
        somebody holds them does not change what records have.
        """
        self._settle()
        while True:
            while self._unwritten:  # another size of records
                keys = self._unwritten[-1]
                found, records = self.store.read(keys)  # some may have been erased since
                if len(records):
                    self.store.write(keys[found], self._rewritten(table, records))
                del self._unwritten[-1]
            states = table.state_columns()
            if len(states) == len(self._states) and all(
                new.owner is state.owner() for new, state in zip(states, self._states, strict=True)
            ):
                return states
            self._ahead = None
            self._unwritten = list(self.store.keys(max(1, _CHUNK_BYTES // self._record_bytes(table))))
            self._before = self._states
            self._states = [_State(weakref.ref(each.owner), each.width, each.initial) for each in states]

    def _rewritten(self, table: HeldDynamicTable, records: Array) -> Array:
        """Records with the states of now: those that were there before stay, others begin."""
        first = places = 8 + _row_bytes(table)
        known = {}
        for state in self._before:
            if state.owner() is not None:
                known[id(state.owner())] = slice(places, places + state.bytes)
            places += state.bytes
        parts = [records[:, :first]]
        for state in self._states:
            new = np.full((len(records), max(1, state.width)), state.initial, _STATE).view(np.uint8)
            place = known.get(id(state.owner()))
            parts.append(new if place is None else records[:, place])
        return np.concatenate(parts, axis=1)

    def _read(self, keys: Array) -> tuple[Array, Array]:
        """RowStore.read of ascending keys, some of which may have been read ahead."""
        if self._ahead is None:
            return self.store.read(keys)
        ahead, future = self._ahead
        try:
            found_ahead, records_ahead = future.result()
        except BaseException:
            self._ahead = None
            raise
        places = np.minimum(np.searchsorted(ahead, keys), max(0, len(ahead) - 1))
        known = ahead[places] == keys if len(ahead) else np.zeros(len(keys), np.bool_)
        found = np.zeros(len(keys), np.bool_)
        found[known] = found_ahead[places[known]]
        found[~known], others = self.store.read(keys[~known])
        taken = records_ahead[np.cumsum(found_ahead)[places[known & found]] - 1]
        if not len(taken) or not len(others):
            return found, others if len(others) else taken
        records = np.empty((int(found.sum()), taken.shape[1]), np.uint8)
        is_ahead = known[found]
        records[is_ahead], records[~is_ahead] = taken, others
        return found, records

    def _record_bytes(self, table: HeldDynamicTable) -> int:
        return 8 + _row_bytes(table) + sum(state.bytes for state in self._states)

    def _make_room(self, table: HeldDynamicTable, states: Sequence[StateColumn], present: Array, coming: int) -> None:
        """For so many rows, beside those at the slots `present`, which stay."""
        assert table.capacity is not None
        wanted = coming - (table.capacity - table.num_entries)
        if wanted <= 0:
            return
        keys, slots = table.export(0, table.num_slots)
        may_go = np.ones(table.num_slots, np.bool_)
        may_go[present] = False
        may_go = may_go[slots]
        scores = table.kept["score"].read(slots)
        idle = dynamic.uses_in(scores) <= table.generations(0.0)[2]
        # To look at all scores costs as much for one row as for many.
        most = _MOST_BYTES // self._record_bytes(table)
        goes = _lowest(scores, may_go & idle, max(wanted, min(table.capacity // 64, most)))
        if len(goes) < wanted:
            goes = np.concatenate([goes, _lowest(scores, may_go & ~idle, wanted - len(goes))])
        keys, slots = keys[goes], slots[goes]
        parts = [scores[goes], table.rows.read(slots), *(s.column.read(slots) for s in states)]
        self.store.write(keys, np.concatenate([_bytes(part) for part in parts], axis=1))
        self._stale = keys
        table.erase(keys)
        self._stale = None

    def _take_back(self, table: HeldDynamicTable, states: Sequence[StateColumn], keys: Array, records: Array) -> None:
        slots = table.insert(keys)
        try:
            table.rows.write(slots, self.rows(table, records))
            for state in states:
                state.column.write(slots, self.state(table, records, state.column))
            if self._counts:
                column = table.kept["score"]
                column.write(slots, dynamic.with_ranks(column.read(slots), dynamic.ranks_in(_scores(records))))
        except BaseException:
            table.erase(keys)
            raise
        self._stale = keys
        self.store.erase(keys)
        self._stale = None


def in_order(stores: Iterable[StoredRows | None]) -> list[StoredRows]:
    """Those that there are, each once, in the order in which all threads take turns."""
    return sorted({each for each in stores if each is not None}, key=lambda each: each.number)


@contextlib.contextmanager
def alone(stores: Iterable[StoredRows | None]) -> Iterator[None]:
    """While it is open no other thread uses the tables that have these."""
    with contextlib.ExitStack() as held:
        for each in in_order(stores):
            held.enter_context(each.turn)
        yield


def _scores(records: Array) -> Array:
    """[n] int64, as they were when the rows went."""
    return _part(records, 0, np.dtype(np.int64), 0)


def _row_bytes(table: HeldDynamicTable) -> int:
    return table.placement.dimension * np.dtype(table.stored_dtype).itemsize


def _bytes(values: Array) -> Array:
    """[n, bytes of each]."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


def _part(records: Array, first: int, dtype: np.dtype[Any], width: int) -> Array:
    """[n, width] of a dtype, or [n] where the width is 0, from the byte `first` of each record on."""
    if not len(records):
        return np.zeros((0, width) if width else 0, dtype)
    # A copy: what is contiguous in NumPy's eyes, as one record is, may keep strides that frameworks do not take.
    part = records[:, first : first + max(1, width) * dtype.itemsize].copy().view(dtype)
    return part if width else part[:, 0]


def _lowest(scores: Array, may_go: Array, count: int) -> Array:
    """Places of the lowest scores that may go, `count` at most."""
    places = np.flatnonzero(may_go)
    if len(places) <= count:
        return places
    return places[np.argpartition(scores[places], count)[:count]]
