# SPDX-License-Identifier: Apache-2.0
"""Rows that changed since a moment: taken from the tables that train, applied to a copy that follows."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import incremental as _incremental
from sparse_operation_kit.checkpoint.header import stored_dtype
from sparse_operation_kit.incremental import Follower, Tracked
from sparse_operation_kit.tensorflow import stamps
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.group import Group, check_between_steps, on_host
from sparse_operation_kit.tensorflow.table_io import assign
from sparse_operation_kit.tensorflow.variable import Variable, as_table, is_table


@as_written
def track_changes(vars: Any) -> None:
    """Keeps, from now on, the time at which each row of the tables changes last: 8 bytes a row beside the table.

    What counts as a change: a step of OptimizerWrapper, DistributedOptimizer or this package's optimizers that names
    the row (whatever its gradient is), `sok.assign`, `sok.load`, `sok.load_incremental`, and the variable's own assign
    and scatter methods. At the beginning every row counts as changed now: what happened before is not known. A second
    call changes nothing.

    Args:
      vars: tables, or one. In a tf.compat.v1 graph with a default session.

    Raises:
      TypeError: something that is no table.
      RuntimeError: inside a tf.function, or in a graph without a default session.
    """
    check_between_steps("track_changes")
    for table in _tables(vars):
        _start(table)


@as_written
def incremental_model_dump(vars: Any, time_threshold: datetime.datetime) -> tuple[list[Any], list[Any]]:
    """The rows that changed since a moment, those of all ranks together.

    Called by every rank with the same tables, between steps. A table that is not tracked is from this call on
    (`track_changes`), and this first call gives all of its rows: which of them changed before is not known. So a server
    that follows begins like this:

        sok.track_changes(tables)
        sok.dump(path, tables)                      # the server loads it once
        since = datetime.datetime.now(datetime.timezone.utc)
        ... steps ...
        asked, since = since, datetime.datetime.now(datetime.timezone.utc)    # before the call: nothing falls between
        keys, values = sok.incremental_model_dump(tables, asked)

    Time is the UTC clock of the host whose rank holds the row, read when the change is made; the earliest threshold
    that a rank gives counts for all. Where clocks differ or are set back, ask from a little earlier than that
    difference: a row that is applied twice does no harm. A step captured in a CUDA graph has the time of its capture.

    Args:
      vars: tables, or one.
      time_threshold: timezone-aware; rows that changed at this time or later.

    Returns:
      (keys, values), lists with an entry a table: [n] int64 global keys, ascending, and [n, dimension] rows,
      those of bfloat16 tables as float32.
      `save_incremental` writes them, `load_incremental` applies them. The same on every rank; each holds all of it.

    Raises, on all ranks when on one:
      TypeError, ValueError: something that is no table; a threshold that is no datetime, or a naive one.
      RuntimeError: before init(), inside a tf.function, or in a tf.compat.v1 graph without a default session.
      sparse_operation_kit.checkpoint.PeerError: another rank failed.
    """
    check_between_steps("incremental_model_dump")
    return _incremental.collect(lambda: [_tracked(table) for table in _tables(vars)], time_threshold, Group())


def save_incremental(
    path: str | os.PathLike[str],
    vars: Any,
    keys: Sequence[Any],
    values: Sequence[Any],
    *,
    step: int | None = None,
    extra: Any = None,
) -> None:
    """Writes what incremental_model_dump returned to the directory `path`, for load_incremental of either frontend.

    One rank calls it, since each holds all rows. The directory is a checkpoint (docs/FORMAT.md): it appears whole or
    not at all, its checksums are verified when it is loaded, and the command-line tool reads it.

    Args:
      path: a directory; a checkpoint that is there is replaced.
      vars: the tables of incremental_model_dump, which give the names.
      keys, values: as it returned them.
      step, extra: an integer and plain JSON data of the caller's, kept in the manifest.

    Raises:
      TypeError, ValueError: what does not fit the tables; OSError: what the file system refuses. Nothing is left.
    """
    tables = [(table.table_name, table.placement) for table in _tables(vars)]
    _incremental.save(path, tables, keys, values, step=step, extra=extra, frontend=f"tensorflow {tf.__version__}")


@as_written
def load_incremental(path_or_arrays: Any, vars: Any) -> None:
    """Overwrites rows of tables by what incremental_model_dump gave on other ranks, or in the other frontend.

    Called by every rank with the same tables; each takes the rows that it holds. Other rows and optimizer states stay
    as they are: the copy is for serving. Everything is checked on all ranks before the first row changes.

    Args:
      path_or_arrays: the directory of save_incremental (or any checkpoint whose keys fit), which all ranks see; or
        (keys, values) as incremental_model_dump returned them, on every rank.
      vars: tables, or one: found by name in a directory, by position in arrays.

    Raises, on all ranks when on one; nothing has changed then:
      TypeError, ValueError: something that is no table; arrays of another shape or dtype, keys outside the table or
        twice (sparse_operation_kit.checkpoint.KeysError).
      RuntimeError: as incremental_model_dump.
      Otherwise what sparse_operation_kit.checkpoint raises.
    """
    check_between_steps("load_incremental")
    _incremental.apply(path_or_arrays, lambda: [_follower(table) for table in _tables(vars)], Group())


def _tables(variables: Any) -> list[Variable]:
    given = [variables] if is_table(variables) or not isinstance(variables, Iterable) else list(variables)
    return [as_table(variable) for variable in given]


def _start(table: Variable) -> None:
    on_host((table._unique_id, "track"), lambda: stamps.start(table) or ())


def _tracked(table: Variable) -> Tracked:
    _start(table)

    def changed(stamp: int) -> tuple[Any, Any]:
        slots, rows = on_host(
            (table._unique_id, "changed"), lambda since: stamps.changed(table, since), np.int64(stamp)
        )
        return slots, rows.astype(stored_dtype(rows.dtype.name), copy=False)

    return Tracked(table.table_name, table.placement, changed)


def _follower(table: Variable) -> Follower:
    def write(keys: Any, rows: Any) -> None:
        def update(where: Any, new: Any) -> Any:
            result = assign(table, where, new)
            return () if tf.executing_eagerly() else result

        on_host((table._unique_id, "write"), update, keys, rows)

    return Follower(table.table_name, table.placement, stored_dtype(table.dtype.name), write)
