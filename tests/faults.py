# SPDX-License-Identifier: Apache-2.0
"""What may be wrong on one rank of a step, for the workers of both frontends: a table of faults (FAULTS) and the
batches that they spoil.

The step looks up two tables, one of them twice, with weights at the second time, and updates both. A fault of phase
"forward" spoils what the lookup is given; the frontends themselves bring about those of the phases "backward" and
"step", by their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, DIMENSIONS = (23, 11), (4, 3)
NAMES = ("items", "users")
TABLES = (0, 1, 0)
"""The table of each lookup."""
COMBINERS = ("sum", "mean", "sqrtn")


def mode(table: int, num_ranks: int) -> str:
    """The `mode` argument of a table: the first is distributed, the second is on the last rank."""
    return f"localized:{num_ranks - 1}" if table else "distributed"


@dataclasses.dataclass
class Batch:
    """The bags of one lookup of this rank."""

    keys: Any
    row_splits: np.ndarray
    weights: np.ndarray | None


def batches(step: int, rank: int) -> list[Batch]:
    """Right ones, other ones at each step and rank; the number of bags is that of the rank."""
    rng = np.random.default_rng((step, rank))
    result = []
    for lookup, table in enumerate(TABLES):
        lengths = rng.integers(0, 4, 5 + rank)
        lengths[[0, -1]] = 2
        splits = np.r_[0, np.cumsum(lengths)].astype(np.int64)
        weights = (rng.integers(1, 17, splits[-1]) / 8).astype(np.float32) if lookup == 2 else None
        result.append(Batch(rng.integers(0, ROWS[table], splits[-1]), splits, weights))
    return result


@dataclasses.dataclass(frozen=True)
class Fault:
    """Attributes:
    name: of the fault.
    phase: "forward", "backward" or "step".
    words: one of them is in the error of the rank whose fault it is.
    spoil: changes the batches of that rank.
    """

    name: str
    phase: str
    words: tuple[str, ...]
    spoil: Callable[[list[Batch]], object] = lambda batches: None


def _of_keys(lookup: int, position: int, key: int) -> Callable[[list[Batch]], None]:
    def spoil(batches: list[Batch]) -> None:
        batches[lookup].keys[position] = key

    return spoil


def _of_splits(lookup: int, position: int, change: int) -> Callable[[list[Batch]], None]:
    def spoil(batches: list[Batch]) -> None:
        batches[lookup].row_splits[position] += change

    return spoil


def _set(lookup: int, field: str, change: Callable[[Any], Any]) -> Callable[[list[Batch]], None]:
    def spoil(batches: list[Batch]) -> None:
        setattr(batches[lookup], field, change(getattr(batches[lookup], field)))

    return spoil


def _faults():
    for lookup, table in ((0, 0), (1, 1)):
        of = f"of '{NAMES[table]}'"
        for what, key in (("just too large", ROWS[table]), ("negative", -1), ("of 64 bits", 2**40)):
            words = (f"key {key} is outside [0, {ROWS[table]})",)
            yield Fault(f"key {what} {of}", "forward", words, _of_keys(lookup, 1, key))
        for what, position, change in (
            ("begin late", 0, 1),
            ("are negative", 0, -1),
            ("descend", -2, 100),
            ("end early", -1, -1),
            ("end late", -1, 1),
        ):
            words = ("row_splits", "row splits")
            yield Fault(f"row splits {what} {of}", "forward", words, _of_splits(lookup, position, change))
    yield Fault(
        "no row splits", "forward", ("row_splits", "row splits", "offsets"), _set(1, "row_splits", lambda x: x[:0])
    )
    yield Fault("weights too short", "forward", ("weights",), _set(2, "weights", lambda x: x[:-1]))
    yield Fault("weights of integers", "forward", ("weights",), _set(2, "weights", lambda x: x.astype(np.int64)))
    yield Fault("ids of floats", "forward", ("int32 or int64",), _set(0, "keys", lambda x: x.astype(np.float32)))
    yield Fault("no ids", "forward", ("ids",), _set(1, "keys", lambda x: None))
    yield Fault("a lookup too few", "forward", ("ids",), lambda batches: batches.pop())
    yield Fault("ids overwritten", "backward", ("modified by an inplace operation",))
    yield Fault("state of another shape", "step", ("states[0]", "optimizer state"))
    yield Fault("learning rate that is none", "step", ("fast",))
    yield Fault("gradient that does not fit", "step", ("one sparse dimension", "must have [1, 4]"))
    yield Fault("gradient of a row that is not there", "step", ("slot 99",))


FAULTS = tuple(_faults())


CAPACITY = 8
"""Rows a rank of the dynamic tables that get full."""


def too_many_keys(culprit: int, num_ranks: int, rank: int) -> np.ndarray:
    """Keys of this rank's batch with which the table of rank `culprit` gets more rows than CAPACITY, all ranks' keys
    together, and those of the others do not.
    """
    own = np.arange(CAPACITY + 1) * num_ranks + culprit
    others = 1000 * num_ranks + np.array([other for other in range(num_ranks) if other != culprit], np.int64)
    return np.r_[own[rank::num_ranks], others]


def error_of(call: Callable[..., Any], *arguments: Any) -> Exception | None:
    """What the call raises."""
    try:
        call(*arguments)
    except Exception as error:
        return error
    return None


def on_each_rank(
    make_job: Callable[[], Any],
    rank: int,
    num_ranks: int,
    left_out: Callable[[Fault], bool],
    is_right: Callable[[Exception, bool], bool],
) -> None:
    """Each fault on each rank: all ranks raise, nothing changes, and the next steps are those of a job without it.

    Args:
      make_job: makes tables and their optimizer: an object with `step(batches, fault)`, where `fault` names one of a
        later phase than "forward", `values()`, a list of arrays, and `everything()`, the bytes that may not change.
      is_right: (an error, whether it is of the rank whose fault it is) -> whether it is of the type that it must be.
    """
    job, undisturbed = make_job(), make_job()
    step = 0
    for each in (job, undisturbed):
        each.step(batches(step, rank))
    for fault in FAULTS:
        if left_out(fault):
            continue
        for culprit in range(num_ranks):
            step += 1
            given, own, where = batches(step, rank), culprit == rank, f"{fault.name} on rank {culprit}"
            if own:
                fault.spoil(given)
            before = job.everything()
            error = error_of(job.step, given, fault.name if own else None)
            assert error is not None, f"{where}: no error"
            words = fault.words if own else (f"rank {culprit}",)
            assert is_right(error, own) and any(word in str(error) for word in words), f"{where}: {error!r}"
            assert job.everything() == before, f"{where}: something changed"
            for each in (job, undisturbed):
                each.step(batches(step, rank))
            for mine, wanted in zip(job.values(), undisturbed.values(), strict=True):
                assert np.array_equal(mine, wanted), f"{where}: the next step is another one"
