# SPDX-License-Identifier: Apache-2.0
"""Saver: rows of a table from and to the files of SparseOperationKit 1.x."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.checkpoint import sok1
from sparse_operation_kit.checkpoint.errors import CheckpointError, FormatError, KeysError, PeerError
from sparse_operation_kit.placement import ANY_KEY
from sparse_operation_kit.tensorflow import communication, devices, runtime
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.legacy.variables import EmbeddingVariable, HashEmbeddingVariable
from sparse_operation_kit.tensorflow.table_io import assign, export
from sparse_operation_kit.tensorflow.table_variable import as_table, is_table

_ROWS_AT_A_TIME = 1 << 16


class Saver:
    """Rows of the tables of `sok.DistributedEmbedding` and `sok.All2AllDenseEmbedding` in files, and from arrays.

    The files hold keys and rows alone. `sok.dump` also writes what optimizers keep, checks what it reads, and loads in
    PyTorch; `python -m sparse_operation_kit.checkpoint convert` makes one of the other.

    Each method is called on every rank, eagerly or while a tf.compat.v1 graph is built, not inside a tf.function. It
    returns the string tensor "OK", in a graph one that does the work when it is run.
    """

    @as_written
    def dump_to_file(self, embedding_variable: Any, filepath: Any) -> Any:
        """Writes `<m_var_name>_keys.file` and `<m_var_name>_values.file` into a folder; rank 0 alone does.

        Keys are of the layer's key_dtype (int32 ones as int64), rows float32. Keys come rank by rank, those of a hash
        table in any order. Rows travel in pieces. Files appear when they are whole, in place of those that were there.

        Raises, on all ranks:
          sparse_operation_kit.checkpoint.StorageError (an OSError): no such folder, no space.
          TypeError: not a table of these layers.
        """
        table, folder = _table(embedding_variable), os.fspath(filepath)
        writing = _Writing(folder, table.m_var_name, "uint32" if table.key_dtype == tf.uint32 else "int64")
        with tf.device(devices.HOST):
            keys, rows = export(table)
            keys, rows = tf.cast(keys, tf.int64), tf.cast(rows, tf.float32)
            count = tf.size(keys, tf.int64)
            counts = communication.allgather(tf.reshape(count, [1]), name="sok_saver_counts")
            ends = tf.cumsum((counts + (_ROWS_AT_A_TIME - 1)) // _ROWS_AT_A_TIME)
            rank, ranks = runtime.rank(), runtime.num_ranks()

            def piece(number: tf.Tensor) -> tf.Tensor:
                """Sends a piece of one rank's rows to rank 0, which appends it."""
                sender = tf.searchsorted(ends, tf.reshape(number, [1]), side="right", out_type=tf.int64)[0]
                before = tf.concat([tf.zeros([1], tf.int64), ends], 0)[sender]
                first = (number - before) * _ROWS_AT_A_TIME
                mine = tf.minimum(count - first, _ROWS_AT_A_TIME)
                length = tf.where(tf.equal(sender, rank), mine, 0)
                first = tf.where(tf.equal(sender, rank), first, 0)
                splits = tf.concat([tf.reshape(length, [1]), tf.zeros([ranks - 1], tf.int64)], 0)
                got = [
                    communication.alltoall(value[first : first + length], splits, name=name)
                    for value, name in ((keys, "sok_saver_keys"), (rows, "sok_saver_rows"))
                ]
                return _call(writing.append, got)

            done = _loop(ends[-1], piece, [_call(writing.begin, [])])
            return _agreed(_call(writing.end, [done]))

    @as_written
    def restore_from_file(self, embedding_variable: Any, filepath: Any) -> Any:
        """Reads what `dump_to_file`, or SparseOperationKit 1.x, wrote of a table of this name, on any number of ranks.

        Rows go by key, whatever the order of the files is, and keys of either dtype into a table of any. A hash table
        gets what it lacks and keeps what the files do not name. All ranks read the files.

        Raises, on all ranks and before anything has changed:
          sparse_operation_kit.checkpoint.FormatError (a ValueError): a file is missing or empty, sizes that do not fit
            the table's embedding_vec_size, keys that come twice, or that the table cannot hold; a PeerError where
            another rank alone found it, in a graph a tf.errors.InvalidArgumentError.
          TypeError: not a table of these layers.
        """
        table, folder = _table(embedding_variable), os.fspath(filepath)
        with tf.device(devices.HOST):
            held = export(table)[0] if table.placement.num_rows == ANY_KEY else tf.zeros([0], tf.int64)
            reading = _Reading(folder, table)
            checked = _agreed(_call(reading.check, [tf.cast(held, tf.int64)]))

            def piece(number: tf.Tensor) -> tf.Tensor:
                dimension = table.placement.dimension
                keys, rows = _arrays(reading.piece, [number], [tf.int64, tf.float32], [[None], [None, dimension]])
                assign(table, tf.cast(keys, table.key_type), rows)
                return number

            with tf.control_dependencies([] if tf.executing_eagerly() else [checked]):
                (total,) = _arrays(reading.pieces, [], [tf.int64], [[]])
                return _ok(_loop(total, piece, []))

    @as_written
    def load_embedding_values(self, embedding_variable: Any, tensors: Any) -> Any:
        """Makes row i of a tensor or array [n, embedding_vec_size], or of a list of them joined, the row of key i.

        There may be fewer rows than the table has; a hash table gets keys 0 to n - 1.

        Raises:
          ValueError: tensors of another shape, or more rows than the table has.
          TypeError: not a table of these layers.
          tf.errors.ResourceExhaustedError: a hash table holds other keys, and has no room for all of these. The other
            ranks raise PeerError, and no rank has changed its part (in a graph the others have).
        """
        table = _table(embedding_variable)
        parts = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        parts = [part if tf.is_tensor(part) else np.asarray(part) for part in parts]
        dimension, rank, ranks = table.placement.dimension, runtime.rank(), runtime.num_ranks()
        most = table.rows_per_rank * ranks
        for part in parts:
            if len(part.shape) != 2 or part.shape[1] != dimension:
                raise ValueError(f"table '{table.table_name}' takes rows of {dimension}, got the shape {part.shape}")
        count = sum(int(part.shape[0]) for part in parts)
        if count > most:
            raise ValueError(f"table '{table.table_name}' has {most} rows on {ranks} ranks, got {count}")
        with tf.device(devices.HOST):
            if any(tf.is_tensor(part) for part in parts):
                own = tf.concat([tf.cast(part, tf.float32) for part in parts], 0)[rank::ranks]
            else:
                (own,) = _arrays(lambda: (_every(parts, rank, ranks),), [], [tf.float32], [[None, dimension]])
            keys = tf.range(rank, count, ranks, dtype=table.key_type)
            if tf.executing_eagerly():
                _agreed(_no_room(table, keys))
            written = assign(table, keys, own)
            return _ok(None if tf.executing_eagerly() else written)


def _no_room(table: Any, keys: tf.Tensor) -> Exception | None:
    """The error of a hash table that would be too full, None where it is not."""
    if not isinstance(table, HashEmbeddingVariable) or table.made["evict_strategy"] is not None:
        return None
    rows = int(table.size) + int(tf.math.count_nonzero(table.find(keys) < 0))
    if rows <= table.capacity:
        return None
    message = f"table '{table.table_name}' may hold {table.capacity} rows on this rank, and would have {rows}"
    return tf.errors.ResourceExhaustedError(None, None, message)


def _every(parts: Sequence[Any], first: int, step: int) -> Any:
    """Rows first, first + step, ... of arrays joined, without joining them."""
    begins = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    own = [part[(first - begin) % step :: step] for begin, part in zip(begins, parts, strict=False)]
    return np.concatenate(own).astype(np.float32)


def _table(value: Any) -> Any:
    table = as_table(value) if is_table(value) else value
    if not isinstance(table, EmbeddingVariable):
        raise TypeError(
            "embedding_variable must be that of a DistributedEmbedding or All2AllDenseEmbedding, got "
            f"{type(value).__name__}; sok.dump writes any table"
        )
    return table


class _Writing:
    """Rank 0's files. What goes wrong is told when all ranks have come to the end, since the others go on sending."""

    def __init__(self, folder: str, name: str, key_dtype: str) -> None:
        self._arguments = (folder, name, key_dtype)
        self._writer: sok1.Writer | None = None
        self._problem: CheckpointError | None = None

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._problem = error
            if self._writer is not None:
                self._writer.close()
            self._writer = None

    def begin(self) -> None:
        self._problem = None
        if runtime.rank() == 0:
            with self._noting():
                self._writer = sok1.Writer(*self._arguments)

    def append(self, keys: Any, rows: Any) -> None:
        if self._writer is not None:
            with self._noting():
                self._writer.append(keys, rows)

    def end(self, _: Any) -> CheckpointError | None:
        if self._writer is not None:
            with self._noting():
                self._writer.commit()
        self._writer = None
        return self._problem


class _Reading:
    """The files on each rank, which takes the rows of its keys."""

    def __init__(self, folder: str, table: Any) -> None:
        self._folder, self._table = folder, table
        self._files: sok1.Files | None = None
        self._pieces: Iterator[Any] = iter(())

    def check(self, held: Any) -> CheckpointError | None:
        """What stands in the way of the rows, before any has changed."""
        table = self._table
        place = table.placement
        try:
            files = self._files = sok1.Files(self._folder, table.m_var_name, place.dimension)
            keys = files.keys()
            where = f"{table.m_var_name}{sok1.KEYS}"
            any_key = place.num_rows == ANY_KEY
            limits = np.iinfo(table.key_dtype.as_numpy_dtype)
            low, high = (int(limits.min), int(limits.max)) if any_key else (0, place.num_rows - 1)
            if len(np.unique(keys)) != len(keys):
                raise KeysError("holds a key twice", file=where)
            if int(keys.min()) < low or int(keys.max()) > high:
                raise KeysError(
                    f"holds keys from {keys.min()} to {keys.max()}", file=where, expected=f"[{low}, {high}]"
                )
            if any_key:
                own = keys.astype(np.int64)
                needed = len(np.union1d(held, own[place.mine(own)]))
                if needed > table.capacity:
                    raise KeysError(
                        f"table '{table.table_name}' would hold {needed} keys on rank {place.rank} of "
                        f"{place.num_ranks}",
                        file=where,
                        expected=f"at most {table.capacity} (max_vocabulary_size_per_gpu)",
                    )
        except CheckpointError as error:
            return error
        self._pieces = files.pieces(_ROWS_AT_A_TIME)
        return None

    def pieces(self) -> tuple[Any]:
        assert self._files is not None
        return (np.int64(-(-self._files.rows // _ROWS_AT_A_TIME)),)

    def piece(self, number: Any) -> tuple[Any, Any]:
        del number
        keys, rows = next(self._pieces)
        keys = keys.astype(np.int64)
        own = self._table.placement.mine(keys)
        return keys[own], rows[own]


# --- eagerly, or as nodes of a graph ----------------------------------------------------------------------------------


def _arrays(
    function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[tf.DType], shapes: Sequence[Any]
) -> list[Any]:
    """The arrays that function(*inputs) gives, as tensors."""
    if tf.executing_eagerly():
        given = function(*(value.numpy() for value in inputs))
        return [tf.constant(value, dtype) for value, dtype in zip(given, dtypes, strict=True)]
    made = tf.numpy_function(function, inputs, list(dtypes))
    for value, shape in zip(made, shapes, strict=True):
        value.set_shape(shape)
    return list(made)


def _call(function: Callable[..., CheckpointError | None], inputs: Sequence[Any]) -> Any:
    """function(*inputs), which says what went wrong: the error, in a graph its message as a vector of bytes."""
    if tf.executing_eagerly():
        return function(*(value.numpy() if tf.is_tensor(value) else value for value in inputs))

    def message(*arrays: Any) -> tuple[Any]:
        problem = function(*arrays)
        return (np.frombuffer(str(problem or "").encode(), np.uint8),)

    (made,) = _arrays(message, inputs, [tf.uint8], [[None]])
    return made


def _agreed(problem: Any) -> Any:
    """ "OK", or on all ranks an error where one has a problem, as `_call` gives them."""
    if tf.executing_eagerly():
        sent = tf.constant(np.frombuffer(str(problem or "").encode(), np.uint8))
        told = communication.allgather(sent, name="sok_saver_agree").numpy().tobytes().decode(errors="replace")
        if problem is not None:
            raise problem
        if told:
            raise PeerError(f"another rank failed: {told}")
        return tf.constant("OK")

    def refuse(told: Any) -> tuple[Any]:
        if len(told):
            raise FormatError(told.tobytes().decode(errors="replace"))
        return (np.bytes_(b"OK"),)

    return _arrays(refuse, [communication.allgather(problem, name="sok_saver_agree")], [tf.string], [[]])[0]


def _loop(count: tf.Tensor, body: Callable[[tf.Tensor], Any], first: Sequence[Any]) -> Any:
    """body(0), ..., body(count - 1), one after the other, after `first`; a tensor that is there when all are done."""
    if tf.executing_eagerly():
        for number in range(int(count)):
            body(tf.constant(number, tf.int64))
        return None

    # As a function, of which all that changes something runs.
    run = tf.function(body, autograph=False)

    def step(number: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([run(number)]):
            return number + 1

    with tf.control_dependencies(list(first)):
        begin = tf.constant(0, tf.int64)
        made = tf.while_loop(lambda number: number < count, step, [tf.identity(begin)], parallel_iterations=1)
        return tf.nest.flatten(made)[0]


def _ok(done: Any) -> Any:
    with tf.control_dependencies([] if done is None else [done]):
        return tf.constant("OK")
