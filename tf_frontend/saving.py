# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer states in tf.train.Checkpoint and in Keras's weight files: rows that know whose they are.

Each rank saves its rows, under a name of its own, and loads them again with as many ranks:

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.write(f"{prefix}-{sok.rank()}")
    checkpoint.read(f"{prefix}-{sok.rank()}")

What rank 0 alone has saved has the rows of rank 0 alone: the other ranks refuse them with an error, they never take
them for theirs. So where rank 0 saves, and for another number of ranks, save tables with `sok.dump`, load them with
`sok.load`, and restore the rest within `tables_left_alone()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit.placement import Placement

LAYOUT = "sok_layout"
"""Beside the rows in a checkpoint: [rows of the whole table, owner or -1, number of ranks, rank] int64."""

_VALUE = "VARIABLE_VALUE"
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


def layout(place: Placement) -> Any:
    """What is saved beside rows."""
    return np.array([place.num_rows, place.owner, place.num_ranks, place.rank], np.int64)


def rows_for(name: str, place: Placement, rows: Any, saved: Sequence[int], shape: Sequence[int]) -> Any:
    """What this rank takes of saved rows: all of them where it saved them, its own where they are the whole table.

    Returns None within tables_left_alone(). Raises ValueError, with the reason, for any other rows.
    """
    if _left_alone:
        return None
    number, owner, num_ranks, rank = (int(n) for n in saved)
    if list(saved) == layout(place).tolist() and list(rows.shape) == list(shape):
        return rows
    if number == place.num_rows and list(rows.shape) == [number, *shape[1:]]:
        return rows[place.rows]
    mode = "distributed" if owner < 0 else f"localized:{owner}"
    raise ValueError(
        f"table '{name}' has {place.num_rows} rows ({place.mode}) and this is rank {place.rank} of {place.num_ranks}; "
        f"the checkpoint holds rows {list(rows.shape)} of rank {rank} of {num_ranks} ({mode}, of {number} rows). Each "
        "rank saves and loads a file of its own, with as many ranks; for another number use sok.dump and sok.load, and "
        "restore the rest within sparse_operation_kit.tensorflow.saving.tables_left_alone()"
    )


class ShardedVariable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A variable of this rank's rows, of a table or of a state of its optimizer, which is saved with its layout."""

    _sok_placement: Placement
    _sok_name: str

    def _serialize_to_tensors(self) -> dict[str, Any]:
        tensors = super()._serialize_to_tensors()
        with tf.device("CPU:0"):
            tensors[LAYOUT] = tf.constant(layout(self._sok_placement))
        return dict(tensors)

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        rows, saved = restored_tensors[_VALUE], restored_tensors[LAYOUT]
        if tf.executing_eagerly():
            own = rows_for(self._sok_name, self._sok_placement, rows, saved.numpy().tolist(), self.shape.as_list())
            return tf.no_op() if own is None else self.assign(own)
        # In a graph the layout is known when it runs, and must be this rank's.
        message = f"table '{self._sok_name}': the checkpoint holds rows of another rank, or of another number of ranks"
        with tf.control_dependencies([tf.debugging.assert_equal(saved, layout(self._sok_placement), message)]):
            return super()._restore_from_tensors({_VALUE: tf.identity(rows)})


class StateVariable(ShardedVariable):
    """An optimizer state of a table."""

    def __init__(self, *, name: str, place: Placement, **options: Any) -> None:
        self._sok_name, self._sok_placement = name, place
        super().__init__(name=name, **options)
