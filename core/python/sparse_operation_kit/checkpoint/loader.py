# SPDX-License-Identifier: Apache-2.0
"""load(): all that can be wrong with a dump is found, on all ranks, before the first row is handed over.

Steps, each agreed on by all ranks: open and match; read the keys and plan; check the digests of weights and states,
every rank a share; then every rank reads its rows and assigns them. The last step goes through the files from their
ends, because what the digest check read last is what the page cache still holds of a dump larger than memory.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..placement import Placement
from .errors import MismatchError
from .group import Group, SingleProcess, agree
from .names import KEPT
from .narrow import Narrow
from .plan import plan, to_int64
from .progress import bar
from .reader import Dump, DumpFile, DumpTable, open_dump
from .source import Array, Rows
from .tables import DISTRIBUTED, DYNAMIC, State
from .verify import Buffers, Piece, check_chunks, chunk_jobs, ordered, pool_for, read

Verify = Literal["before", "during"]
_ATTEMPTS = 20  # while other processes replace the dump


@dataclass(frozen=True)
class Target:
    """A variable to load into.

    name, dimension, value_dtype:  must be the dump's
    assign:     takes Rows of this rank: keys of key_dtype [n], weights [n, dimension], states slot -> [n, columns].
                Called from the calling thread; the arrays are read-only in spirit and last until it returns
    rows:       rows of a static table on all ranks together; None for a dynamic one
    owner:      the rank that holds the whole table, or DISTRIBUTED
    key_dtype:  "int64" or "int32"
    capacity:   the most rows that this rank may be given; None: any number
    states:     the states wanted, slot -> State; {} loads none
    row_dtype:  of the variable, to which `assign` rounds rows: a finite element that it does not hold is refused.
                None: it holds them all
    kept:       what else is wanted where the dump has it, name -> dtype; it is among the states of Rows then
    """

    name: str
    dimension: int
    assign: Callable[[Rows], None]
    value_dtype: str = "float32"
    rows: int | None = None
    owner: int = DISTRIBUTED
    key_dtype: str = "int64"
    capacity: int | None = None
    states: Mapping[str, State] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    row_dtype: str | None = None


@dataclass(frozen=True)
class _Match:
    target: Target
    table: DumpTable
    placement: Placement
    files: list[DumpFile]  # weight, then the states as the target orders them, then what else is kept
    states: list[str]  # names of files[1:]
    narrow: Narrow | None  # what rows may not have
    whole: bool  # every row that a static table has must be there: rows that nobody trained are in no dynamic one


def load(
    source: str | os.PathLike[str] | Dump,
    targets: Sequence[Target],
    *,
    optimizer: str | None = None,
    group: Group | None = None,
    verify: Verify = "before",
    progress: bool | None = None,
) -> Dump:
    """Loads the dump `source` into `targets`. Called by every rank of `group`, with the same targets in the same
    order.

    source:     its directory, or what `open_together` gave
    optimizer:  the class whose states the targets want, e.g. "Adam"
    verify:     "before": no row is handed over before every byte needed was checked, which reads weights and states
                twice; "during": reads once, and a damaged file may be found after some rows were assigned
    progress:   see progress.bar

    Returns the dump, closed; its optimizer, step, extra and tables say what it was. All ranks raise when one does:
    FormatError and its kinds, MismatchError, StorageError, PeerError; with verify="before" then nothing was assigned.
    """
    if verify not in ("before", "during"):
        raise ValueError(f'verify is {verify!r}; it must be "before" or "during"')
    group = group or SingleProcess()
    dump = source if isinstance(source, Dump) else open_together(source, group)
    with dump:
        matches: list[_Match] = []
        agree(group, lambda: matches.extend(_match(dump, target, optimizer, group) for target in targets))
        total = sum(match.table.key.file.size for match in matches)
        with bar("check keys", total, group.rank, progress) as advance:
            pieces = _plan_together(matches, group, advance)
        if verify == "before":
            _verify_share(matches, group, progress)
        total = sum(
            (piece.end - piece.first) * sum(file.spec.row_bytes for file in match.files)
            for match, needed in zip(matches, pieces, strict=True)
            for piece in needed
        )
        with bar("load", total, group.rank, progress) as advance:

            def assign() -> None:
                for match, needed in reversed(list(zip(matches, pieces, strict=True))):
                    _assign(match, needed[::-1], verify == "before", advance)

            agree(group, assign)
    return dump


def open_together(path: str | os.PathLike[str], group: Group) -> Dump:
    """open_dump by every rank of `group`: the same dump on all ranks, also while another one takes its place."""
    for _ in range(_ATTEMPTS):
        dump, identities = _open_once(os.fspath(path), group)
        if len(set(identities)) == 1:
            return dump
        dump.close()
    raise MismatchError(
        "the ranks see different dumps", file=os.fspath(path), expected="one directory that all ranks share"
    )


def _open_once(path: str, group: Group) -> tuple[Dump, list[str]]:
    opened: list[Dump] = []

    def enter() -> str:
        opened.append(open_dump(path))
        return opened[0].identity

    try:
        identities = agree(group, enter)
        return opened[0], identities
    except BaseException:
        for dump in opened:
            dump.close()
        raise


def _match(dump: Dump, target: Target, optimizer: str | None, group: Group) -> _Match:
    table = dump.table(target.name)
    weight = table.weight
    if table.rows and weight.spec.columns != target.dimension:
        raise MismatchError(
            f"has rows of {weight.spec.columns} elements",
            file=weight.file.path,
            expected=f"dimension {target.dimension}",
        )
    _match_dtype(weight, target.value_dtype, target.name)
    # Without a manifest nobody knows which kind a table was.
    whole = dump.manifest is None or table.table.kind != DYNAMIC
    if target.rows is not None and table.rows != target.rows and whole:
        raise MismatchError(f"has {table.rows} rows", file=table.key.file.path, expected=f"{target.rows} rows")
    files = [weight]
    if target.states and optimizer is None:
        raise ValueError(f"target {target.name!r} wants states, but no optimizer is named")
    for slot, state in target.states.items():
        file = table.state(str(optimizer), slot, aliases=dump.manifest is None)
        _match_dtype(file, state.dtype, target.name)
        if table.rows and file.spec.columns != state.columns:
            raise MismatchError(
                f"has {file.spec.columns} elements a row", file=file.file.path, expected=f"{state.columns}"
            )
        files.append(file)
    states = list(target.states)
    for name, dtype in target.kept.items():
        kept = table.states.get((KEPT, name))
        if kept is not None:
            _match_dtype(kept, dtype, target.name)
            files.append(kept)
            states.append(name)
    placement = Placement(target.rows or 0, target.dimension, target.owner, group.size, group.rank)
    narrow = Narrow.of(table, target.row_dtype, target.name)
    return _Match(target, table, placement, files, states, narrow, whole)


def _match_dtype(file: DumpFile, dtype: str, name: str) -> None:
    if file.spec.header.dtype != dtype:
        raise MismatchError(
            f"holds {file.spec.header.dtype}", file=file.file.path, expected=f"{dtype}, the dtype of {name!r}"
        )


def _plan_together(matches: list[_Match], group: Group, advance: Callable[[int], None]) -> list[list[Piece]]:
    pieces: list[list[Piece]] = []

    def run() -> list[int]:
        for match in matches:
            target = match.target
            needed = plan(match.table, match.placement, target.rows, target.key_dtype, advance, whole=match.whole)
            if target.capacity is not None and needed.rows > target.capacity:
                raise MismatchError(
                    f"has {needed.rows} rows for this rank",
                    file=match.table.key.file.path,
                    expected=f"at most {target.capacity}, the capacity of {target.name!r}",
                )
            pieces.append(needed.pieces)
        return [len(needed) for needed in pieces]

    agree(group, run)
    return pieces


def _verify_share(matches: list[_Match], group: Group, progress: bool | None) -> None:
    """The ranks check every digest between them, and the numbers of rows that will be rounded. Parts lie in rank
    order, so a rank's share is about what it will read.
    """
    narrow = {id(match.table.weight): match.narrow for match in matches if match.narrow is not None}
    jobs = [
        job
        for match in matches
        for job in chunk_jobs(match.table, match.files, None if match.narrow is None else match.table.weight)
    ]
    share = jobs[len(jobs) * group.rank // group.size : len(jobs) * (group.rank + 1) // group.size]
    total = sum(int(table.bounds[chunk] @ (-1, 1)) * file.spec.row_bytes for table, file, chunk in share)
    with bar("verify", total, group.rank, progress) as advance:

        def also(file: DumpFile, rows: Array, first: int) -> None:
            if id(file) in narrow:
                narrow[id(file)].check(rows, first)

        agree(group, lambda: check_chunks(share, advance, also if narrow else None))


def _assign(match: _Match, pieces: list[Piece], checked: bool, advance: Callable[[int], None]) -> None:
    """Reads pieces ahead on threads and hands them over in order."""
    target, table = match.target, match.table
    files = [table.key, *match.files]
    buffers = Buffers()
    sizes = [file.spec.row_bytes * table.largest_chunk for file in files]

    def fetch(piece: Piece) -> tuple[list[Array], list[Array]]:
        taken = [buffers.take(size) for size in sizes]
        arrays = read(files, table, piece, checked, taken)
        if match.narrow is not None and not checked:
            match.narrow.check(arrays[1], piece.first)
        return taken, arrays

    pool = pool_for(sum(file.file.size for file in files))
    try:
        for taken, (stored, weights, *states) in ordered(pool, fetch, pieces):
            keys = to_int64(stored[:, 0], table.key.file.path)
            if not match.placement.holds_everything:
                mine = match.placement.mine(keys)
                if not mine.all():
                    rows = np.flatnonzero(mine)
                    keys, weights, states = keys[rows], weights[rows], [state[rows] for state in states]
            keys = keys.astype(target.key_dtype, copy=False)
            target.assign(Rows(keys, weights, dict(zip(match.states, states, strict=True))))
            advance(sum(array.nbytes for array in (weights, *states)))
            for array in taken:
                buffers.give(array)
    finally:
        if pool is not None:
            pool.shutdown()
