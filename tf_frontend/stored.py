# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables with a store (`sparse_operation_kit.stored_rows`) before they are looked up."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import stored_rows
from sparse_operation_kit.row_store import RowStore
from sparse_operation_kit.stored_rows import StoredRows
from sparse_operation_kit.tensorflow import devices
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.exchange import Exchange
from sparse_operation_kit.tensorflow.ids import Batch
from sparse_operation_kit.tensorflow.runtime import Runtime
from sparse_operation_kit.tensorflow.table_variable import TableVariable

Array = np.ndarray[Any, Any]
_numbers = itertools.count()
_MAY_RUN_PYTHON = {
    "EagerPyFunc",
    "PyFunc",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "Case",
    "While",
}


class Turn:
    """Who uses a table with a store alone: a thread, which may begin it again, or a part of a graph that runs."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device(devices.HOST):
            self.mutex = tf.raw_ops.MutexV2(shared_name=f"sok_store_{next(_numbers)}")
        self._thread = threading.RLock()
        self._taken: list[tf.Tensor] = []  # who gives its tensor up gives up the mutex

    def __enter__(self) -> None:
        self._thread.acquire()
        try:
            with tf.device(devices.HOST):
                self._taken.append(self._taken[-1] if self._taken else tf.raw_ops.MutexLock(mutex=self.mutex))
        except BaseException:
            self._thread.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._taken.pop()
        self._thread.release()


@contextlib.contextmanager
def alone(tables: Iterable[Any], inputs: Any = ()) -> Iterator[None]:
    """No other thread uses those of the tables that have a store while what is made here runs; in a graph from when
    the tensors among the inputs are there.
    """
    stores = stored_rows.in_order(getattr(table, "stored_rows", None) for table in tables)
    if not stores:
        yield
        return
    if tf.executing_eagerly():
        with stored_rows.alone(stores):
            yield
        return
    # The parts of a graph take turns in its own order, or two graphs would wait for each other. So do they with Python
    # that it runs, which may use the table, and which TensorFlow runs before that of `_run`. Where one fails its
    # tensors go, and the mutexes are free.
    graph, locks = tf.compat.v1.get_default_graph(), list[tf.Tensor]()
    python = (operation for operation in graph.get_operations() if operation.type in _MAY_RUN_PYTHON)
    before = [*filter(tf.is_tensor, tf.nest.flatten(inputs)), *getattr(graph, "_sok_alone", ()), *python]
    with devices.on_host():
        for each in stores:
            with tf.control_dependencies([*before, *locks]):
                locks.append(tf.raw_ops.MutexLock(mutex=each.turn.mutex))
    first = len(graph.get_operations())
    with tf.control_dependencies(locks):
        yield
    with devices.on_host(), tf.control_dependencies(graph.get_operations()[first:]):
        graph._sok_alone = [tf.raw_ops.ConsumeMutexLock(mutex_lock=lock) for lock in locks]


Given = list[tuple[TableVariable, tf.Tensor]]
"""Tables that have a store, each once, and what is looked up there of the rows that this rank holds."""


def given(state: Runtime, tables: Sequence[TableVariable], batches: Sequence[Batch]) -> Given:
    """Of a lookup of batches in tables, one each."""
    found: Given = []
    for table in dict(zip(map(id, tables), tables, strict=True)).values():
        if not has_store(table):
            continue
        with devices.beside(table):
            own = [batch.keys for of, batch in zip(tables, batches, strict=True) if of is table]
            keys = tf.concat([tf.cast(each, tf.int64) for each in own], axis=0)
            if state.exchange is not None:
                keys = sent_to_owners(keys, table, state.exchange, state.num_ranks, "store")
        found.append((table, keys))
    return found


def prepare(looked_up: Given, tables: Sequence[TableVariable], training: bool) -> Sequence[TableVariable]:
    """Before a lookup in tables: those that are trained get what their stores have of the keys. Returns the tables to
    look up, where others are read in the place of those that are not trained.
    """
    instead: dict[int, TableVariable] = {}
    for table, keys in looked_up:
        if training:
            bring(table, keys)
        else:
            instead[id(table)] = _read_instead(table, keys)
    return [instead.get(id(table), table) for table in tables] if instead else tables


def has_store(table: Any) -> bool:
    """Whether some of its rows may be in a store."""
    return getattr(table, "stored_rows", None) is not None


def bring(table: Any, keys: tf.Tensor) -> None:
    """Before keys, which belong to this rank, are inserted."""
    if has_store(table):
        _run(lambda numbers: table.stored_rows.bring(table.held(), numbers), [table], keys)


def fetch_ahead(table: Any, keys: tf.Tensor) -> None:
    """See StoredRows; keys belong to this rank."""
    _run(lambda numbers: table.stored_rows.fetch_ahead(table.held(), numbers), [table], keys)


def _read_instead(table: Any, keys: tf.Tensor) -> Any:
    """What has the rows of these keys, wherever they are."""
    if tf.executing_eagerly():
        found = table.stored_rows.values(table.held(), keys.numpy(), False)
        if found is None:
            return table
        reader = _reader(table, max(1, len(found[0])))
        _hold(reader, *found)
        return reader
    with tf.init_scope():
        reader = _reader(table, None)
    table.readers.append(reader)
    _run(lambda numbers: _hold(reader, *table.stored_rows.values(table.held(), numbers, True)), [table, reader], keys)
    return reader


def _reader(table: Any, max_capacity: int | None) -> Any:
    """An empty table with the initial rows of `table`."""
    ours = ("dimension", "initializer", "name", "key_type", "dtype", "mode", "seed")
    options = {name: table.made[name] for name in ours}
    with devices.beside(table):
        return type(table)(var_type="hbm", trainable=False, max_capacity=max_capacity, **options)


def _hold(reader: Any, keys: Array, rows: Array) -> None:
    """It has these rows alone."""
    reader.clear()
    reader.write_slots(reader.insert(tf.constant(keys)), tf.constant(rows, reader.dtype))


def with_stored(table: Any, keys: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """With those that are in the table's store."""
    if not has_store(table):
        return keys, rows
    stored_keys, stored_rows = table.stored_rows.everything(table.held())
    with tf.device(devices.HOST):
        return tf.concat([keys, stored_keys], axis=0), tf.concat([rows, tf.cast(stored_rows, table.dtype)], axis=0)


def begin(store: RowStore | None, name: str, counts: bool) -> StoredRows | None:
    """What the table of that name has in its store, if it has one."""
    return None if store is None else StoredRows(store, name, counts, Turn())


def erase(table: Any, keys: tf.Tensor) -> Any:
    """Gives up keys [n] of the table and its store. Returns how many there were, as DynamicVariable.erase does."""
    with alone([table]):
        before = table.stored
        if has_store(table):  # first, as it may raise
            table.stored_rows.erase(tf.cast(keys, tf.int64).numpy())
        count = tf.math.count_nonzero(table.erased(keys) >= 0)
        return int(count) + before - table.stored if tf.executing_eagerly() else count


def clear(table: Any) -> None:
    """Gives up all that is in the table's store."""
    if has_store(table):
        table.stored_rows.clear()


def check_eager(table: Any, what: str) -> None:
    """Raises RuntimeError in a graph where the table has a store."""
    if has_store(table) and not tf.executing_eagerly():
        raise RuntimeError(f"table '{table.table_name}' has rows in a store: {what} runs outside of tf.function")


def _run(function: Callable[[Array], Any], tables: Sequence[Any], keys: tf.Tensor) -> None:
    """function(keys), int64 arrays, before whatever uses the tables next."""
    if tf.executing_eagerly():
        function(tf.cast(keys, tf.int64).numpy())
        return
    # A py_function of a GPU's table would have to be on that GPU. By an op of each table before it and one after it
    # TensorFlow knows what it has to be run after, and what after it.
    before = [table.generations(0.0) for table in tables]
    with devices.on_host():
        given = [tf.cast(keys, tf.int64), *before]
        done = tf.py_function(lambda numbers, *_: (function(numbers.numpy()), 0.0)[1], given, tf.float64)
    done.set_shape([])
    for table in tables:
        table.generations(done)


def tell_peers(state: Runtime, table: TableVariable, what: str) -> None:
    """Eagerly takes part in the first exchange of `sent_to_owners` as a rank that has failed."""
    assert state.exchange is not None
    with devices.beside(table):
        sent = tf.fill([state.num_ranks, 2], tf.constant(tf.errors.ABORTED * state.num_ranks + state.rank, tf.int64))
        state.exchange.swap_counts(sent, name=f"sok_{what}_{table.table_name}_counts")


def sent_to_owners(
    keys: tf.Tensor, table: TableVariable, exchange: Exchange, num_ranks: int, what: str = "prefetch"
) -> tf.Tensor:
    """The keys of all ranks that this one holds rows of."""
    owners = tf.cast(table.placement.owner_of(keys), tf.int32)
    counts = tf.math.bincount(owners, minlength=num_ranks, maxlength=num_ranks, dtype=tf.int64)
    name = f"sok_{what}_{table.table_name}"
    # The last column is for ranks that fail.
    sent, received = exchange.swap_counts(tf.stack([counts, tf.zeros_like(counts)], axis=1), name=f"{name}_counts")
    with tf.device(devices.HOST):
        told = tf.reduce_max(received[:, 1:], axis=0)
        told = tf.where(told < num_ranks, tf.zeros_like(told), told)  # 1: a GPU has found what the lookup will say
        raised = ops.sok_raise_together(received=told, message="", num_ranks=num_ranks)
    with tf.control_dependencies([] if raised is None else [raised]):
        keys = tf.gather(keys, tf.argsort(owners, stable=True))
    return exchange.all_to_all(keys, sent[:, 0], received[:, 0], name=f"{name}_keys")
