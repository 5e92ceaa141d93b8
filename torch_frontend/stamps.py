# SPDX-License-Identifier: Apache-2.0
"""When each row of a table changed last: the tensor that says so, and who writes it.

The optimizer's step (table_step.py) writes the stamps of the rows that it steps; what changes rows in other ways marks
them with the functions of this module. What changed a table without them (load_state_dict, `table.copy_(...)`) is seen
by PyTorch's count of changes in place: then every row counts as changed.

A stamp is the UTC time of the host in nanoseconds since 1970.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch.table_parameter import new_column


@dataclasses.dataclass
class Stamps:
    """Of a tracked table: int64 [local rows], and PyTorch's count of the table's changes that they know of."""

    tensor: Tensor
    version: int


_any_tracked = False
"""Whether a table was ever tracked in this process; while none is, no table is asked."""


def start(table: Any) -> None:
    """Begins to track, unless it did before: every row counts as changed now."""
    global _any_tracked
    _any_tracked = True
    if table._stamps is None:
        tensor = new_column(table, 0, dtype=torch.int64).fill_(time.time_ns())
        table._stamps = Stamps(tensor, table._version)


def of(table: Any) -> Tensor | None:
    """The stamps of a table where its rows are, up to date; None when it is not tracked."""
    stamps: Stamps | None = getattr(table, "_stamps", None)
    if stamps is None:
        return None
    if stamps.tensor.device != table.device:
        stamps.tensor = stamps.tensor.to(table.device)
    if stamps.version != table._version:
        stamps.tensor.fill_(time.time_ns())
        stamps.version = table._version
    return stamps.tensor


@contextlib.contextmanager
def known(tables: Sequence[Any], places: Iterable[Sequence[int]]) -> Iterator[tuple[list[Tensor], list[int]]]:
    """Within the block the caller changes rows of some of the tables, which `places` name by position, and stamps them:
    (stamps, positions) of those that are tracked.
    """
    if not _any_tracked:
        yield [], []
        return
    everywhere = (position for some in places for position in some)
    positions = [position for position in everywhere if getattr(tables[position], "_stamps", None) is not None]
    yield [tensor for position in positions if (tensor := of(tables[position])) is not None], positions
    for position in positions:
        tables[position]._stamps.version = tables[position]._version


def now(tracked: Sequence[Tensor]) -> int:
    """The stamp of this moment, if anything is to be stamped with it."""
    return time.time_ns() if tracked else 0


@contextlib.contextmanager
def marking(table: Any, slots_after: Callable[[], Tensor]) -> Iterator[None]:
    """Within the block the caller changes the rows `slots_after()` and no others; none where one is not there."""
    with known([table], [[0]]) as (stamps, _):
        yield
        for tensor in stamps:
            if len(tensor):
                slots = slots_after()
                # On a GPU the block has not raised for a wrong slot yet, and PyTorch's kernels end the process for one.
                inside = slots.clamp(0, len(tensor) - 1).to(torch.int64)
                tensor[inside] = torch.where((inside == slots).all(), time.time_ns(), tensor[inside])
