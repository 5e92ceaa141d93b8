# SPDX-License-Identifier: Apache-2.0
"""What a GPU's memory allows the kernels of a hash index: accesses at random places, and bytes side by side.

    python -m benchmarks.hash_index_limits

prints how many buckets a key takes (the table of docs/DYNAMIC_TABLES.md, "How the index lies in memory").

Not counted is what the L2 holds: the cells in which new keys of a call meet, 8 bytes per key of the call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from sparse_operation_kit.hybrid.topology import Accesses

BUCKETS, ENTRIES, CLASSES = 512, 8, 8  # of a segment, of a bucket, of keys
MOST_IN_USE = 0.87  # of the entries of an index that was made for its capacity


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Of a key that the index holds, and of one that it lacks: those that find reads. Of one that is inserted: those
    that are read and written, the full ones that count it and the one that takes it.
    """

    hit: float
    miss: float
    inserted: float


ENTRY_UPDATES = {"NVIDIA H200": 11.3e9}
"""Entries of 16 bytes that a GPU, by its name, reads and writes back a second at random places."""


@functools.cache
def buckets(in_use: float, *, segments: int = 32, seed: int = 0) -> Buckets:
    """By simulation: of an index in which keys were inserted until this share of its entries is in use."""
    rng = np.random.default_rng(seed)
    num_entries = segments * BUCKETS * ENTRIES
    used = np.zeros(segments * BUCKETS, int).tolist()
    passes = np.zeros((segments * BUCKETS, CLASSES), int).tolist()

    def paths(count: int) -> Iterator[tuple[int, int, int, int]]:
        """Of random keys: where their segment begins, their first and second bucket there, their class."""
        begins = rng.integers(segments, size=count) * BUCKETS
        firsts = rng.integers(BUCKETS, size=count)
        seconds = firsts ^ rng.integers(1, BUCKETS, size=count)
        classes = rng.integers(CLASSES, size=count)
        yield from zip(*(a.tolist() for a in (begins, firsts, seconds, classes)), strict=True)

    def at(begin: int, first: int, second: int, step: int) -> int:
        return begin + (first if step == 0 else (second + step * (step - 1) // 2) % BUCKETS)

    def free_from(begin: int, first: int, second: int) -> int:
        step = 0
        while used[at(begin, first, second, step)] == ENTRIES:
            step += 1
        return step

    total = 0
    num_keys = round(in_use * num_entries)
    for begin, first, second, key_class in paths(num_keys):
        last = free_from(begin, first, second)
        for step in range(last):
            passes[at(begin, first, second, step)][key_class] += 1
        used[at(begin, first, second, last)] += 1
        total += last + 1
    samples = 100_000
    missed = inserted = 0
    for begin, first, second, key_class in paths(samples):
        step = 0
        while passes[at(begin, first, second, step)][key_class]:
            step += 1
        missed += step + 1
        inserted += free_from(begin, first, second) + 1
    return Buckets(total / max(1, num_keys), missed / samples, inserted / samples)


def limits(
    call: str,
    held: float,
    num_keys: int,
    per_key: Buckets,
    *,
    read: Accesses,
    updates: float,
    copy: float,
    row_bytes: int = 0,
) -> dict[str, float]:
    """Seconds of each kernel of a call, at the least, where it is bound by memory.

    call: "find", "find_or_insert" or "erase". held: the share of the keys that the index holds. read: at random places.
    updates: of ENTRY_UPDATES. copy: bytes a second, read and written. row_bytes: where the call reads rows, their size.
    """
    new = 1 - held
    searched = (held * per_key.hit + new * per_key.miss) * float(read.seconds(np.array(128)))
    row_read = held * float(read.seconds(np.array(row_bytes)))
    if call == "find" and row_bytes:
        return {"read_rows_kernel": num_keys * (searched + row_read + (8 + row_bytes) / copy)}
    # A key and its slot; where the index may change a cell, and in an insertion a flag and the room of a new key.
    arguments = {"find": 16, "erase": 20, "find_or_insert": 21 + 4 * new}[call]
    each = {"find_kernel": searched + arguments / copy}
    changed = {"find": 0.0, "erase": held, "find_or_insert": new}[call]
    if changed > 0:  # else these end at once
        each["count_kernel"] = 5 / copy  # a cell and a rank
    if changed > 0 and call == "erase":  # cell and rank, key, slot, free slot
        each["erase_kernel"] = changed * per_key.hit / updates + (5 + 24 * changed) / copy
    if changed > 0 and call == "find_or_insert":  # cell; rank, room, key, slot, flag, and the column of keys
        each["insert_kernel"] = changed * per_key.inserted / updates + (4 + 30 * changed) / copy
    if row_bytes:  # key, slot and flag; a row for the answer, and one in the table
        each["read_rows_kernel"] = row_read + (17 + (1 + new) * row_bytes) / copy
    return {kernel: num_keys * seconds for kernel, seconds in each.items()}


def main() -> None:
    print("entries in use  read, hit  read, miss  read and written, inserted")
    for load in (0.5, 0.75, 1.0):
        per_key = buckets(load * MOST_IN_USE)
        print(f"{load * MOST_IN_USE:14.1%} {per_key.hit:10.2f} {per_key.miss:11.2f} {per_key.inserted:27.2f}")


if __name__ == "__main__":
    main()
