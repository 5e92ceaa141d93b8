# SPDX-License-Identifier: Apache-2.0
"""How slices of tables are dealt out to ranks.

A rule takes (elements, table) of each slice, table by table, and gives each rank the tables of its slices in the order
in which they were dealt, which is the order of the rank's inputs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from . import slicing

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


def deal_columns(
    shapes: Sequence[tuple[int, int]], num_ranks: int, rule: str, threshold: float | None
) -> tuple[list[dict[int, int]], set[int]]:
    """Cuts tables [rows, width] into columns and deals these out by the rule of that name.

    Returns:
      For each rank its tables, in the order in which they were dealt, and how many columns of each it has: slices of a
      table that meet become one. And the tables that were cut, also where all slices met.
    """
    widths = slicing.column_widths(shapes, num_ranks, threshold)
    sizes = [(rows * width, table) for table, (rows, _) in enumerate(shapes) for width in widths[table]]
    next_slice = [iter(each) for each in widths]
    ranks: list[dict[int, int]] = []
    for tables in RULES[rule](sizes, num_ranks):
        columns: dict[int, int] = {}
        for table in tables:
            columns[table] = columns.get(table, 0) + next(next_slice[table])
        ranks.append(columns)
    return ranks, {table for table, each in enumerate(widths) if len(each) > 1}
