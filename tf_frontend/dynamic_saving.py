# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables and their optimizer states in tf.train.Checkpoint, in Keras's files and in copies: rows and keys.

A table that is restored holds the keys of the file and no others. Its states are other objects to TensorFlow, which may
restore them before the table, after it, or when a step makes them: each finds its rows by key.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import dynamic
from sparse_operation_kit.placement import Placement, mode_of
from sparse_operation_kit.tensorflow import saving
from sparse_operation_kit.tensorflow.saving import LAYOUT, VALUE

KEYS, SCORES, USE_TIMES, CANDIDATES = "sok_keys", "sok_scores", "sok_use_times", "sok_candidates"
"""Beside the rows: [n] int64 keys; where they are, what rows are evicted by, when generations began [m, 2], and the
keys that wait for rows with their scores [k, 2].
"""

REFUSED = "what saves and copies variables of TensorFlow (use sok.dump and sok.load)"

USED = "used"  # while files are read: when each row was used last


def content(table: Any, column: Any) -> dict[str, Any]:
    """What is saved of a column of a table: of all keys that it holds, in the order of their slots."""
    table.refuse_store(REFUSED)
    keys, slots = table.held_among(0, table.num_slots())
    with tf.device("CPU:0"):
        saved = {
            VALUE: tf.identity(column.read_slots(slots)),
            KEYS: tf.identity(keys),
            LAYOUT: tf.constant(saving.layout(table.placement)),
        }
        if column is table and table.has_scores:
            saved[SCORES] = tf.identity(table.scores_at(slots))
            saved[USE_TIMES] = tf.identity(table.use_times())
        if column is table and table.most_candidates > 0:
            saved[CANDIDATES] = tf.identity(table.candidates())
    return saved


def restore(table: Any, column: Any, saved: Mapping[str, Any]) -> None:
    """Gives a table, or an optimizer state of it, what `content` had of this rank, of any within from_all_ranks()."""
    prepare(table, column, saved)()


def prepare(table: Any, column: Any, saved: Mapping[str, Any]) -> Callable[[], None]:
    """`restore`, which finds here what is wrong, and changes the table when the result is called."""
    table.refuse_store(REFUSED)
    if not tf.executing_eagerly():
        raise NotImplementedError(
            f"table '{table.table_name}' is dynamic: checkpoints of TensorFlow restore it in eager mode only; sok.load "
            "restores it in graphs"
        )
    arrays = {name: np.asarray(value) for name, value in saved.items()}
    if saving.are_left_alone():
        return lambda: None
    shape, number = [*column.shape[1:]], len(arrays[KEYS])
    if [*arrays[VALUE].shape] != [number, *shape]:
        raise ValueError(
            f"table '{table.table_name}' has {shape} elements in each row of '{column.name}'; the checkpoint holds "
            f"{[*arrays[VALUE].shape]} of {number} keys"
        )
    _check_keys(table, arrays)
    piece = saving.pieces_of(column, lambda: Pieces(table, column))
    if piece is not None:
        return functools.partial(piece.take, arrays)
    place, layout = table.placement, arrays[LAYOUT].tolist()
    if layout != saving.layout(place).tolist():
        _, owner, num_ranks, rank = layout
        raise ValueError(
            f"table '{table.table_name}' is dynamic ({place.mode}) and this is rank {place.rank} of {place.num_ranks}; "
            f"the checkpoint holds rows of rank {rank} of {num_ranks} ({mode_of(owner)}). Each rank saves and loads a "
            "file of its own, with as many ranks; another number reads all files within "
            "sparse_operation_kit.tensorflow.saving.from_all_ranks(), or uses sok.dump and sok.load"
        )
    _check_room(table, number)
    return functools.partial(_give, table, column, arrays)


class Pieces:
    """The rows of one column as they come from the files of all ranks that wrote it."""

    def __init__(self, table: Any, column: Any) -> None:
        self._table, self._column = table, column
        self._found: list[Mapping[str, Any]] = []
        self._ranks: set[int] = set()
        self._wanted: set[int] = set()

    def take(self, saved: Mapping[str, Any]) -> None:
        """Takes this rank's rows from those of another."""
        _, owner, num_ranks, rank = saved[LAYOUT].tolist()
        self._ranks.add(rank)
        self._wanted = set(range(num_ranks)) if owner < 0 else {owner}
        mine = self._table.placement.mine(saved[KEYS])
        found = {name: array[mine] for name, array in saved.items() if name in (KEYS, VALUE, SCORES)}
        if CANDIDATES in saved:
            waiting = saved[CANDIDATES]
            found[CANDIDATES] = waiting[self._table.placement.mine(waiting[:, 0])]
        if USE_TIMES in saved:  # of each rank its own
            found[USED] = dynamic.times_of(found[SCORES], saved[USE_TIMES], time.time_ns())
        self._found.append(found)

    def check(self) -> None:
        """Raises ValueError when rows are missing."""
        missing = sorted(self._wanted - self._ranks)
        if missing:
            raise ValueError(
                f"table '{self._table.table_name}': the rows of ranks {missing} are in none of the files that were "
                "read within from_all_ranks(); every rank reads the files of all ranks that wrote"
            )
        _check_room(self._table, sum(len(found[KEYS]) for found in self._found))

    def give(self) -> None:
        """Changes the column."""
        names = set.intersection(*(set(found) for found in self._found))
        joined = {n: np.concatenate([found[n] for found in self._found]) for n in names}
        if USED in joined:
            joined[USE_TIMES] = dynamic.with_times(np.zeros((0, 2), np.int64), joined[SCORES], joined.pop(USED))
        _give(self._table, self._column, joined)


def _check_keys(table: Any, arrays: Mapping[str, Any]) -> None:
    """The table would take a larger key than its key_type has for the key of the lower bits."""
    limits = np.iinfo(table.key_type.as_numpy_dtype)
    waiting = arrays.get(CANDIDATES, np.zeros((0, 2), np.int64))[:, 0]
    keys = np.concatenate([arrays[KEYS], waiting if table.most_candidates > 0 else waiting[:0]])
    wrong = keys[(keys < limits.min) | (keys > limits.max)]
    if len(wrong):
        raise ValueError(
            f"table '{table.table_name}': the checkpoint holds the key {wrong[0]}; expected keys in "
            f"[{limits.min}, {limits.max}]"
        )


def _check_room(table: Any, rows: int) -> None:
    if rows > table.capacity:
        raise ValueError(
            f"table '{table.table_name}' may hold {table.capacity} rows on this rank, and the checkpoint has {rows}"
        )


def _give(table: Any, column: Any, saved: Mapping[str, Any]) -> None:
    if column is table:
        replace(table, saved)
    else:
        column.take(saved[KEYS], saved[VALUE])


def replace(table: Any, saved: Mapping[str, Any]) -> None:
    """The table holds these keys and no others, with these rows, and of the rest what it has and is there. States of
    rows that it held before stay.
    """
    keys, rows = saved[KEYS], saved[VALUE]
    held, _ = table.held_among(0, table.num_slots())
    table.erase(np.setdiff1d(held, keys).astype(table.key_type.as_numpy_dtype))
    if table.has_scores:  # by which what inserts below would take rows for expired
        table.set_use_times(np.zeros((0, 2), np.int64))
    # Those that are there are not located as by a lookup, which would be a use of them.
    table.insert(keys[table.find(keys).numpy() < 0])
    slots = table.find(keys)
    table.write_slots(slots, tf.cast(rows, table.dtype))
    if SCORES in saved and table.has_scores:
        table.begin_epoch(0)
        table.write_scores(slots, saved[SCORES])
        table.set_use_times(saved.get(USE_TIMES, np.zeros((0, 2), np.int64)))
    waiting = saved.get(CANDIDATES, np.zeros((0, 2), np.int64))
    table.set_candidates(dynamic.most_wanted(waiting, table.most_candidates))
    table.end_step()
    table.restored = digest(keys)
    for state in table.states():
        state.table_is_restored()


def digest(keys: Any) -> bytes:
    """Of the keys of a file, by which a table and its states know that they come from one."""
    return hashlib.blake2b(np.ascontiguousarray(keys).tobytes(), digest_size=16).digest()


class RestoredState:
    """An optimizer state of a dynamic table that may be restored before its table is; a part of DynamicState."""

    _sok_table: Any
    _sok_waiting: tuple[bytes, Any, Any] | None = None

    def take(self, keys: Any, values: Any) -> None:
        """Takes the elements of keys that the table holds; of others when the table is restored with these keys."""
        origin = digest(keys)
        self._sok_waiting = None if self._sok_table.restored == origin else (origin, keys, values)
        self._write(keys, values)

    def table_is_restored(self) -> None:
        """To be called after the table was."""
        waiting, self._sok_waiting = self._sok_waiting, None
        if waiting is not None and waiting[0] == self._sok_table.restored:
            self._write(*waiting[1:])

    def _write(self, keys: Any, values: Any) -> None:
        column: Any = self
        slots = self._sok_table.find(keys).numpy()
        column.write_slots(slots[slots >= 0], values[slots >= 0])


class SavedTable:
    """How a dynamic table is saved, restored and copied; a part of DynamicVariable."""

    saved_parts: tuple[str, ...] = (VALUE, LAYOUT, KEYS)

    table_name: str
    placement: Placement
    made: Mapping[str, Any]

    def content(self, column: Any) -> dict[str, Any]:
        return content(self, column)

    def prepare(self, column: Any, saved: Mapping[str, Any]) -> Callable[[], Any]:
        return prepare(self, column, saved)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return self.content(self)

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        restore(self, self, restored_tensors)
        return tf.no_op()

    def _export_to_saved_model_graph(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"table '{self.table_name}' is dynamic: a SavedModel cannot hold it")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _rebuild(*self.__reduce_ex__(2)[1])
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if not tf.executing_eagerly():
            raise NotImplementedError(f"table '{self.table_name}' is dynamic: it is copied in eager mode only")
        content = {name: value.numpy() for name, value in self.content(self).items()}
        return _rebuild, (type(self), self.made, self.placement, content)


def _rebuild(cls: type[Any], made: Mapping[str, Any], place: Placement, content: Mapping[str, Any]) -> Any:
    """The table that was made so, with what it held on this rank."""
    table = cls(**made)
    saving.check_pickled("table", table.table_name, table, place)
    restore(table, table, content)
    return table
