# SPDX-License-Identifier: Apache-2.0
"""Numbered changes of tables: rows that changed and keys that went, for copies that follow at their own pace."""

from __future__ import annotations

import operator
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import checkpoint
from .checkpoint.errors import MismatchError
from .checkpoint.files import check_is_new
from .checkpoint.group import Group, agree
from .checkpoint.names import gone_name, stem, tensor_name
from .checkpoint.scratch import folder_of, on_disk
from .checkpoint.source import Array, Rows, Source
from .checkpoint.variables import check_names, check_same_names
from .held import HeldTable, gives_up_keys
from .incremental import checked_keys, gathered_slots, keys_of, some_rows, target_of

MEMBER = "sok_increment"
"""Of `extra` in the manifest: what series an increment is of, its number, and the user's own `extra`."""


class Increments:
    """What happens to tables from now on, cut into increments: where tables are trained `save` writes the next one,
    where copies of them follow `load` applies it. Frontends make it (`sok.increments`).

    number:  of the increment that was saved or loaded last
    series:  tells the increments of one training from others; None: those that are loaded first say it
    """

    number: int
    series: str | None

    def __init__(
        self,
        describe: Callable[[str], tuple[Group, Sequence[HeldTable]]],
        frontend: str,
        number: int,
        series: str | None,
    ) -> None:
        self._describe, self._frontend = describe, frontend
        self._since = time.time_ns()
        self._held: list[Array] = []  # the keys of dynamic tables, sorted
        group, tables = describe("increments")

        def track() -> list[Any]:
            self.number, self.series = _checked(number, series)
            for table in tables:
                table.track()
                keys = table.export(0, table.num_slots)[0] if gives_up_keys(table) else np.zeros(0)
                self._held.append(np.sort(keys))
            return [check_names(tables), [self.number, self.series]]

        everyone = agree(group, track)
        check_same_names([names for names, _ in everyone])
        begun = [begins for _, begins in everyone]
        if any(begins != begun[0] for begins in begun):
            raise MismatchError(f"ranks begin with the number and series {begun}")

    def save(self, path: str | os.PathLike[str], *, step: int | None = None, extra: Any = None) -> int:
        """Writes what has changed since the last increment, or since this object was made: rows with their keys, and
        of dynamic tables the keys that went. Called by every rank, between steps; each writes its own rows.

        Args:
          path: a directory that all ranks see and that is not there yet. It appears whole or not at all.
          step, extra: an integer and plain JSON data of the caller's, kept in the manifest.

        Returns:
          Its number: one more than that of the last.

        Raises, on all ranks when on one, and the next increment has these changes too: what `sok.dump` raises, and
          sparse_operation_kit.checkpoint.StorageError (an OSError) where something is at the path: copies may have
          applied it.
        """
        group, tables = self._describe("Increments.save")
        found: list[tuple[Array, Array, Array, Array]] = []  # of each table: keys and slots that changed, gone, held
        looked: list[int] = []
        folders: list[str] = []

        def find() -> list[Any]:
            folders.append(folder_of(path))
            check_is_new(path)
            found.extend(self._changes(table, held) for table, held in zip(tables, self._held, strict=True))
            looked.append(time.time_ns())  # after it: a table may say only now that it changed
            return [check_names(tables), self.number, self.series or secrets.token_hex(8)]

        everyone = agree(group, find)
        check_same_names([names for names, _, _ in everyone])
        if len({number for _, number, _ in everyone}) > 1:
            raise MismatchError(f"ranks are at the increments {[number for _, number, _ in everyone]}")
        number, series = self.number + 1, everyone[0][2]
        make = on_disk(folders[0])
        sources = []
        for table, (keys, changed, gone, _) in zip(tables, found, strict=True):
            slots = gathered_slots(table, changed, group, make)
            sources.append(_rows_of(table, keys if slots is changed else table.keys(slots), slots))
            if gives_up_keys(table):
                sources.append(_keys_of(table, gone))
        described = {MEMBER: {"series": series, "number": number, "follows": number - 1, "extra": extra}}
        checkpoint.dump(path, sources, step=step, extra=described, group=group, frontend=self._frontend, progress=False)
        self._since, self._held = looked[0], [held for _, _, _, held in found]
        self.number, self.series = number, series
        return number

    def _changes(self, table: HeldTable, before: Array) -> tuple[Array, Array, Array, Array]:
        slots = table.changed(self._since)
        if not gives_up_keys(table):
            return np.asarray(table.keys(slots)), slots, np.zeros(0, np.int64), before
        keys, places = table.export(0, table.num_slots)
        # A row that was made and has not been stepped has no stamp: its key is new, or came back after it went.
        made = np.setdiff1d(table.changed(0), table.changed(1))
        slots = np.union1d(slots, np.union1d(made, places[~np.isin(keys, before)]))
        return keys[np.searchsorted(places, slots)], slots, np.setdiff1d(before, keys), np.sort(keys)

    def load(self, path: str | os.PathLike[str]) -> bool:
        """Applies the next increment: first gives up the keys that went, then writes rows. Optimizer states stay as
        they are; the copy is for serving. Called by every rank, of any number.

        Args:
          path: what `save` wrote, in either frontend; all ranks see it.

        Returns:
          Whether it was the next: of one that was applied before nothing changes.

        Raises, on all ranks when on one, and nothing has changed unless the table's framework fails to write:
          sparse_operation_kit.checkpoint.MismatchError (a ValueError): an increment lies between this one and the last,
            or it is one of another training, or none at all.
          Otherwise as `load_incremental`.
        """
        group, tables = self._describe("Increments.load")
        member = agree(group, lambda: [check_names(tables), self._next(path)])[0][1]
        if member is None:
            return False
        rows: list[list[Rows]] = [[] for _ in tables]
        gone: list[list[Rows]] = [[] for _ in tables]
        with checkpoint.open_dump(path) as opened:
            there = set(opened.tables)
        targets = []
        for table, changed, went in zip(tables, rows, gone, strict=True):
            gone_keys = gone_name(table.name)
            targets.append(target_of(table, table.name, table.placement.dimension, table.stored_dtype, changed))
            if gives_up_keys(table) and stem(tensor_name(gone_keys)) in there:
                targets.append(target_of(table, gone_keys, 1, "float32", went))
        dump = checkpoint.load(path, targets, group=group, progress=False)

        def check() -> None:
            for table, changed, went in zip(tables, rows, gone, strict=True):
                table.check_room(checked_keys(table, changed, dump), keys_of(went))

        agree(group, check)

        def write() -> None:
            for table, changed, went in zip(tables, rows, gone, strict=True):
                if gives_up_keys(table) and went:
                    table.give_up(keys_of(went))
                for piece in changed:
                    table.overwrite(piece.keys, piece.weights)

        agree(group, write)
        self.number, self.series = member["number"], member["series"]
        return True

    def _next(self, path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
        """What the manifest says of an increment that is to be applied; None: it was before."""
        with checkpoint.open_dump(path) as opened:
            member = opened.extra.get(MEMBER) if isinstance(opened.extra, dict) else None
        if not isinstance(member, dict) or not {"series", "number", "follows"} <= member.keys():
            raise MismatchError("is no increment", file=os.fspath(path), expected="what Increments.save wrote")
        if self.series not in (None, member["series"]):
            raise MismatchError("is an increment of another training", file=os.fspath(path), expected=self.series)
        if member["number"] <= self.number:
            return None
        if member["follows"] != self.number:
            raise MismatchError(
                f"is increment {member['number']}, which follows {member['follows']}",
                file=os.fspath(path),
                expected=f"increment {self.number + 1}; those between are missing",
            )
        return member


def _checked(number: Any, series: Any) -> tuple[int, str | None]:
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"number must be an integer, got {number!r}")
    if operator.index(number) < 0:
        raise ValueError(f"number must not be negative, got {number}")
    if series is not None and not isinstance(series, str):
        raise TypeError(f"series must be a string, got {series!r}")
    if series == "":
        raise ValueError("series must not be empty")
    return operator.index(number), series


def _rows_of(table: HeldTable, keys: Array, slots: Array) -> Source:
    described = some_rows(table, table.name, table.placement.dimension, table.stored_dtype)

    def chunks(size: int) -> Iterator[Rows]:
        for first in range(0, len(keys), size):
            yield Rows(keys[first : first + size], table.rows.read(slots[first : first + size]), {})

    return Source(described, len(keys), chunks)


def _keys_of(table: HeldTable, keys: Array) -> Source:
    described = some_rows(table, gone_name(table.name), 1, "float32")
    return checkpoint.from_arrays(described, keys, np.zeros((len(keys), 1), np.float32))
