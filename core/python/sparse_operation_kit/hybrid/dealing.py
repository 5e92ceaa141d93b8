# SPDX-License-Identifier: Apache-2.0
"""How slices of tables are dealt out to ranks.

A rule takes (elements, table) of each slice, table by table, and gives each rank the tables of its slices in the order
in which they were dealt, which is the order of the rank's inputs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

Slices = Sequence[tuple[int, int]]


def _basic(slices: Slices, num_ranks: int) -> list[list[int]]:
    """Round robin."""
    tables = [table for _, table in slices]
    return [tables[rank::num_ranks] for rank in range(num_ranks)]


def _memory_balanced(slices: Slices, num_ranks: int) -> list[list[int]]:
    """From the largest down, to and fro: as many slices on each rank, and nearly as many elements."""
    tables = [table for _, table in sorted(slices, reverse=True)]
    turn = 2 * num_ranks
    return [tables[rank::turn] + tables[turn - 1 - rank :: turn] for rank in range(num_ranks)]


def _memory_optimized(slices: Slices, num_ranks: int) -> list[list[int]]:
    """From the largest down, each to the rank with the fewest elements. At the end the lightest rank is the first."""
    ranks: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_ranks)]
    for elements, table in sorted(slices, reverse=True):
        total, tables = ranks.pop(0)
        bisect.insort(ranks, (total + elements, [*tables, table]))
    return [tables for _, tables in ranks]


RULES: dict[str, Callable[[Slices, int], list[list[int]]]] = {
    "basic": _basic,
    "memory_balanced": _memory_balanced,
    "memory_optimized": _memory_optimized,
}
