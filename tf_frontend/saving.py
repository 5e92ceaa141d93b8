# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer states in tf.train.Checkpoint and in Keras's weight files: rows that know whose they are.

Each rank saves its rows, under a name of its own, and loads them again with as many ranks:

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.write(f"{prefix}-{sok.rank()}")
    checkpoint.read(f"{prefix}-{sok.rank()}")

Another number of ranks reads the files of all that wrote, each rank all of them, and takes its own rows:

    from sparse_operation_kit.tensorflow import saving

    with saving.from_all_ranks():
        for rank in range(number_that_wrote):
            checkpoint.read(f"{prefix}-{rank}")  # or model.load_weights(...)

What rank 0 alone has saved has the rows of rank 0 alone: the other ranks refuse them with an error, they never take
them for theirs. So where rank 0 saves, save tables with `sok.dump`, load them with `sok.load`, and restore the rest
within `tables_left_alone()`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit.placement import Placement, mode_of
from sparse_operation_kit.tensorflow import horovod_functions
from sparse_operation_kit.tensorflow.slots import write

LAYOUT = "sok_layout"
"""Beside the rows in a checkpoint: [rows of the whole table, owner or -1, number of ranks, rank] int64, and of a
variable of a layer `Placement.contents`.
"""

VALUE = "VARIABLE_VALUE"
_left_alone = False


@contextlib.contextmanager
def tables_left_alone() -> Iterator[None]:
    """Within the block tf.train.Checkpoint and load_weights restore no tables and no states of tables; their rows stay.

    For checkpoints of other ranks, whose tables `sok.load` loads. What TensorFlow restores later, because it is not
    built yet, is not meant.
    """
    global _left_alone
    before, _left_alone = _left_alone, True
    try:
        yield
    finally:
        _left_alone = before


class _Piece:
    """The rows of one variable as they come from the files of all ranks that wrote it."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.rows = np.zeros(variable.shape.as_list(), variable.dtype.as_numpy_dtype)
        self.seen = np.ones(len(self.rows), bool)  # the slots between tables of a stack too
        for slots, _ in variable._placement.tables():
            self.seen[slots] = False

    def take(self, rows: Any, saved: Sequence[int]) -> None:
        """Takes this rank's rows from those of another."""
        place: Placement = self.variable._placement
        number, owner, num_ranks, rank = (int(n) for n in saved[:4])
        whole = place.elsewhere(owner, num_ranks, rank)
        rows = np.asarray(rows)
        if number != whole.num_rows or list(rows.shape) != [whole.local_rows, *self.rows.shape[1:]]:
            raise ValueError(
                f"table '{self.variable._sok_name}' has {place.num_rows} rows and "
                f"{list(self.rows.shape[1:])} elements in each; the checkpoint holds {list(rows.shape)} of {number}"
            )
        for (slots, table), (given, other) in zip(place.tables(), whole.tables(), strict=True):
            keys = other.global_keys(np.arange(other.local_rows))
            own = table.mine(keys)
            where = table.key_map(keys[own]) + slots.start
            self.rows[where] = rows[given][own]
            self.seen[where] = True

    def check(self) -> None:
        """Raises ValueError when rows are missing."""
        missing = int((~self.seen).sum())
        if missing:
            name = self.variable._sok_name
            raise ValueError(
                f"table '{name}': {missing} of this rank's {len(self.rows)} rows are in none of the files that were "
                "read within from_all_ranks(); every rank reads the files of all ranks that wrote"
            )

    def give(self) -> None:
        """Changes the variable."""
        self.variable.assign(self.rows)


_pieces: dict[int, Any] | None = None


@contextlib.contextmanager
def from_all_ranks() -> Iterator[None]:
    """Within the block tf.train.Checkpoint.read and load_weights put tables and their states together from the files of
    all ranks that wrote them, read one after another; whatever number of ranks wrote and reads. Eager mode only.

    Tables change at the end of the block, all or none of them; other variables as each file is read. Holds this rank's
    rows a second time. A dynamic table holds the keys of the files then and no others. Only states that are there can
    be restored: where no step was made yet, make them by `OptimizerWrapper.build(tables)` (`sok_build` of an optimizer
    from DistributedOptimizer).

    Raises:
      ValueError: at the end: rows that no file had; when a file is read: rows that are not this table's.
    """
    global _pieces
    if _pieces is not None:
        raise RuntimeError("from_all_ranks() is not to be nested")
    pieces = _pieces = {}
    try:
        yield
    finally:
        _pieces = None
    for piece in pieces.values():
        piece.check()
    for piece in pieces.values():
        piece.give()


def check_pickled(what: str, name: str, table: Any, place: Placement) -> None:
    """Raises ValueError for a table (`what` it is, and its name) that was pickled where it had another `place`."""
    if table.placement != place:
        raise ValueError(
            f"{what} '{name}' was pickled on rank {place.rank} of {place.num_ranks}, and this is rank "
            f"{table.placement.rank} of {table.placement.num_ranks}: sok.dump and sok.load go from one to the other"
        )


def are_left_alone() -> bool:
    """Whether this is within tables_left_alone()."""
    return _left_alone


def pieces_of(variable: Any, make: Callable[[], Any]) -> Any:
    """What collects the rows of a variable within from_all_ranks(), made by `make` the first time; None outside."""
    if _pieces is None:
        return None
    if id(variable) not in _pieces:
        _pieces[id(variable)] = make()
    return _pieces[id(variable)]


def layout(place: Placement) -> Any:
    """What is saved beside rows."""
    contents = [place.contents] if place.contents else []
    return np.array([place.num_rows, place.owner, place.num_ranks, place.rank, *contents], np.int64)


def content(table: Any, column: Any) -> dict[str, Any]:
    """What Keras's files have of a column of a table whose slots are its keys."""
    return {VALUE: column.numpy(), LAYOUT: layout(table.placement)}


def prepare(column: Any, saved: Mapping[str, Any]) -> Callable[[], Any]:
    """What gives such a column what `content` had. Raises ValueError for rows that are not its own."""
    own = rows_for(column, saved[VALUE], saved[LAYOUT].tolist())
    return (lambda: None) if own is None else functools.partial(column.assign, own)


def rows_for(variable: Any, rows: Any, saved: Sequence[int]) -> Any:
    """What this rank takes of saved rows: all of them where it saved them, its own where they are the whole table.

    Returns None within tables_left_alone() and from_all_ranks(). Raises ValueError, with the reason, for other rows.
    """
    if _left_alone:
        return None
    name: str = variable._sok_name
    place: Placement = variable._placement
    if list(saved[4:]) != layout(place)[4:].tolist():
        raise ValueError(
            f"table '{name}': the file has rows of a layer whose tables lie otherwise on the ranks, or of no layer: "
            "only sok.dump and sok.load go from one placement to another"
        )
    piece = pieces_of(variable, lambda: _Piece(variable))
    if piece is not None:
        piece.take(rows, saved)
        return None
    shape = variable.shape.as_list()
    number, owner, num_ranks, rank = (int(n) for n in saved[:4])
    if list(saved) == layout(place).tolist() and list(rows.shape) == list(shape):
        return rows
    if number == place.num_rows and list(rows.shape) == [number, *shape[1:]]:
        return rows[place.rows]
    raise ValueError(
        f"table '{name}' has {place.num_rows} rows ({place.mode}) and this is rank {place.rank} of {place.num_ranks}; "
        f"the checkpoint holds rows {list(rows.shape)} of rank {rank} of {num_ranks} ({mode_of(owner)}, of {number} "
        "rows). Each rank saves and loads a file of its own, with as many ranks; another number reads all files within "
        "sparse_operation_kit.tensorflow.saving.from_all_ranks(), or uses sok.dump and sok.load"
    )


class _Copy(tf.__internal__.tracking.Trackable):  # type: ignore[misc]
    """What is saved of a variable, in host memory, as it was at some moment."""

    def __init__(self) -> None:
        self._held: dict[str, tf.Variable] = {}

    def take(self, tensors: Mapping[str, Any]) -> None:
        """Replaces it. Eagerly the first time, then in a graph too."""
        for name, given in tensors.items():
            tensor = getattr(given, "tensor", given)  # of a SaveSpec, which TensorFlow's variables give
            if name in self._held:
                self._held[name].assign(tensor)
                continue
            with tf.device("CPU:0"):
                self._held[name] = tf.Variable(tensor, trainable=False, shape=tf.TensorShape(None))

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {name: held.read_value() for name, held in self._held.items()}


class ShardedVariable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A variable of this rank's rows, of a table or of a state of its optimizer, which is saved with its layout."""

    _placement: Placement
    _sok_name: str

    # What Horovod's broadcasts ask for before they write: the value, those in place the name.

    def _dense_var_to_tensor(self, *args: Any, **options: Any) -> Any:
        horovod_functions.refuse_broadcast(self._sok_name, self._placement.num_ranks)
        return super()._dense_var_to_tensor(*args, **options)

    @property
    def name(self) -> str:
        """As of tf.Variable."""
        if horovod_functions.is_caller():
            horovod_functions.refuse_broadcast(self._sok_name, self._placement.num_ranks)
        name: str = super().name
        return name

    def _serialize_to_tensors(self) -> dict[str, Any]:
        tensors = super()._serialize_to_tensors()
        with tf.device("CPU:0"):
            tensors[LAYOUT] = tf.constant(layout(self._placement))
        return dict(tensors)

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        rows, saved = restored_tensors[VALUE], restored_tensors[LAYOUT]
        if tf.executing_eagerly():
            own = rows_for(self, rows, saved.numpy().tolist())
            return tf.no_op() if own is None else self.assign(own)
        if _pieces is not None:
            raise NotImplementedError("from_all_ranks() works in eager mode only")
        # In a graph the layout is known when it runs, and must be this rank's.
        message = f"table '{self._sok_name}': the checkpoint holds rows of another rank, or of another number of ranks"
        with tf.control_dependencies([tf.debugging.assert_equal(saved, layout(self._placement), message)]):
            return super()._restore_from_tensors({VALUE: tf.identity(rows)})

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # An asynchronous checkpoint saves this copy. TensorFlow's own of a variable knows neither keys nor layout.
        try:
            content = self._serialize_to_tensors()
        except NotImplementedError as error:  # for which TensorFlow would leave the table out
            raise RuntimeError(str(error)) from error
        if self not in object_map:
            object_map[self] = _Copy()
        object_map[self].take(content)

    def read_slots(self, slots: tf.Tensor) -> tf.Tensor:
        """Rows by slot."""
        return self.sparse_read(slots)

    def write_slots(self, slots: tf.Tensor, rows: tf.Tensor) -> Any:
        """Overwrites rows by slot. Returns the operation in a graph."""
        return write(self, slots, rows, self._sok_name)


class StateVariable(ShardedVariable):
    """An optimizer state of a table."""

    def __init__(self, *, name: str, place: Placement, **options: Any) -> None:
        self._sok_name, self._placement = name, place
        super().__init__(name=name, **options)

    def show(self) -> Any:
        """What has to run before the state is used. Returns the operation in a graph."""
        return None
