# SPDX-License-Identifier: Apache-2.0
"""Reading chunks in parallel and in bounded memory, with their digests checked."""

import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import numpy as np

from .files import byte_view
from .reader import DumpFile, DumpTable
from .source import Array

THREADS = min(4, len(os.sched_getaffinity(0)) + 1)  # one more than CPUs: some wait for the disk
_SMALL = 1 << 16  # bytes; below, threads cost more than they bring
Job = TypeVar("Job")
Result = TypeVar("Result")


class Piece(NamedTuple):
    """Rows [first, end) of chunk `chunk` of some files of a table; bounds count from the table's first row."""

    chunk: int
    first: int
    end: int


class Buffers:
    """Reused byte arrays."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Array] = queue.SimpleQueue()

    def take(self, size: int) -> Array:
        try:
            array = self._free.get_nowait()
        except queue.Empty:
            return np.empty(size, np.uint8)
        return array if array.size >= size else np.empty(size, np.uint8)

    def give(self, array: Array) -> None:
        self._free.put(array)


def ordered(
    pool: ThreadPoolExecutor | None, function: Callable[[Job], Result], jobs: Iterable[Job]
) -> Iterator[Result]:
    """The results of `function` over `jobs`, in order; at most THREADS + 1 of them exist at a time."""
    if pool is None:
        yield from map(function, jobs)
        return
    pending: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(function, job))
            if len(pending) > THREADS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        wait([future for future in pending if not future.cancel()])


def pool_for(total_bytes: int) -> ThreadPoolExecutor | None:
    """Threads for so much reading, or None when it is too little for threads."""
    return ThreadPoolExecutor(THREADS) if total_bytes > _SMALL else None


def read(files: list[DumpFile], table: DumpTable, piece: Piece, checked: bool, buffers: list[Array]) -> list[Array]:
    """The rows of a piece from each file, [rows, columns]. Not `checked` yet: reads the whole chunk and compares
    digests.
    """
    first, end = (int(bound) for bound in table.bounds[piece.chunk])
    result = []
    for file, buffer in zip(files, buffers, strict=True):
        if checked or not file.digests:
            result.append(file.read_rows(piece.first, piece.end, buffer))
            continue
        rows = file.read_rows(first, end, buffer)
        file.check(piece.chunk, byte_view(rows))
        result.append(rows[piece.first - first : piece.end - first])
    return result


def check_chunks(
    jobs: list[tuple[DumpTable, DumpFile, int]],
    advance: Callable[[int], None],
    also: Callable[[DumpFile, Array, int], None] | None = None,
) -> None:
    """Compares the digests of chunks (table, file, chunk number); ChecksumError names the first file that differs.

    also:  is given each chunk afterwards: its file, its rows, and the number of the first. Threads call it
    """
    buffers = Buffers()

    def check(job: tuple[DumpTable, DumpFile, int]) -> int:
        table, file, chunk = job
        first, end = (int(bound) for bound in table.bounds[chunk])
        size = (end - first) * file.spec.row_bytes
        buffer = buffers.take(size)
        rows = file.read_rows(first, end, buffer)
        file.check(chunk, byte_view(rows))
        if also is not None:
            also(file, rows, first)
        buffers.give(buffer)
        return size

    total = sum((file.file.size for file in {id(job[1]): job[1] for job in jobs}.values()), 0)
    pool = pool_for(total)
    try:
        for size in ordered(pool, check, jobs):
            advance(size)
    finally:
        if pool is not None:
            pool.shutdown()


def chunk_jobs(
    table: DumpTable, files: list[DumpFile], whatever: DumpFile | None = None
) -> list[tuple[DumpTable, DumpFile, int]]:
    """Every chunk of `files` that has a digest, and those of `whatever`, in the order in which a disk likes to read."""
    wanted = (file for file in files if file.digests or file is whatever)
    return [(table, file, chunk) for file in wanted for chunk in range(len(table.bounds))]
