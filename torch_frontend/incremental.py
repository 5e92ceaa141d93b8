# SPDX-License-Identifier: Apache-2.0
"""Rows that changed since a moment: taken from the tables that train, applied to a copy that follows."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sparse_operation_kit import incremental as _incremental
from sparse_operation_kit.checkpoint.header import stored_dtype
from sparse_operation_kit.incremental import Follower, Tracked
from sparse_operation_kit.torch import stamps
from sparse_operation_kit.torch.group import Group
from sparse_operation_kit.torch.table_io import assign
from sparse_operation_kit.torch.variable import Variable, is_table


def track_changes(vars: Any) -> None:
    """Keeps, from now on, the time at which each row of the tables changes last: 8 bytes a row beside the table.

    What counts as a change: a step of OptimizerWrapper, DistributedOptimizer or this package's optimizers that names
    the row (whatever its gradient is), `sok.assign` and `sok.load_incremental`. After any other change in place
    (`sok.load`, load_state_dict, ``table.copy_(...)``) every row counts as changed; one through ``table.data`` is not
    seen. At the beginning every row counts as changed now: what happened before is not known. A second call changes
    nothing.

    Args:
      vars: tables, or one.

    Raises:
      TypeError: something that is no table.
    """
    for table in _tables(vars):
        stamps.start(table)


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
      RuntimeError: before init().
      sparse_operation_kit.checkpoint.PeerError: another rank failed.
    """
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
    tables = [(table.name, table.placement) for table in _tables(vars)]
    _incremental.save(path, tables, keys, values, step=step, extra=extra, frontend=f"torch {torch.__version__}")


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
    _incremental.apply(path_or_arrays, lambda: [_follower(table) for table in _tables(vars)], Group())


def _tables(variables: Any) -> list[Variable]:
    given = [variables] if is_table(variables) or not isinstance(variables, Iterable) else list(variables)
    for position, table in enumerate(given):
        if not is_table(table):
            raise TypeError(f"vars[{position}] must be a sok.Variable, got {type(table).__name__}")
    return given


def _tracked(table: Variable) -> Tracked:
    stamps.start(table)

    def changed(stamp: int) -> tuple[Any, Any]:
        tensor = stamps.of(table)
        assert tensor is not None
        slots = torch.nonzero(tensor >= stamp).flatten()
        rows = table.detach()[slots].cpu()
        return slots.cpu().numpy(), (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()

    return Tracked(table.name, table.placement, changed)


def _follower(table: Variable) -> Follower:
    def write(keys: Any, rows: Any) -> None:
        assign(table, torch.from_numpy(keys), torch.from_numpy(rows))

    dtype = stored_dtype(str(table.dtype).removeprefix("torch."))
    return Follower(table.name, table.placement, dtype, write)
