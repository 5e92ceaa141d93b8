# SPDX-License-Identifier: Apache-2.0
"""How tables are cut into columns and rows, and which of them become one variable."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


def even_parts(total: int, number: int) -> list[int]:
    """`total` in `number` parts that differ by one at most, the larger ones first."""
    size, more = divmod(total, number)
    return [size + (part < more) for part in range(number)]


def inverse(order: Sequence[int]) -> list[int]:
    """Where `order` has its smallest number, the next one, ...; of equal ones the first comes first."""
    return sorted(range(len(order)), key=order.__getitem__)


def column_widths(shapes: Sequence[tuple[int, int]], num_ranks: int, threshold: float | None) -> list[list[int]]:
    """The widths of the columns into which each table [rows, width] is cut.

    threshold: in elements. None: what gives each rank something to hold, if columns can.
    """
    if threshold is None:
        threshold = _for_all_ranks([rows * width for rows, width in shapes], num_ranks)
    return [
        even_parts(width, _number_of_slices(rows * width, threshold, min(num_ranks, width))) for rows, width in shapes
    ]


def _for_all_ranks(sizes: list[int], num_ranks: int) -> float:
    """The threshold at which there are slices for all ranks, found by halving the largest one again and again."""
    threshold = float("inf")
    sizes = sorted(sizes)
    while sizes and len(sizes) < num_ranks:
        largest = sizes.pop()
        threshold = max(largest - 1, 0)
        sizes = sorted([*sizes, largest // 2, largest // 2])
    return threshold


def _number_of_slices(elements: int, threshold: float, most: int) -> int:
    slices, size = 1, float(elements)
    while size > threshold and slices < most:
        slices, size = 2 * slices, size / 2
    return min(slices, most)


def mark_offloaded(configs: Sequence[dict[str, Any]], limit: float | None) -> None:
    """Sets `cpu_offload` of each: the smallest ones whose elements together are at most `limit` stay on the device."""
    total = 0
    for config in sorted(configs, key=lambda each: each["input_dim"] * each["output_dim"]):
        total += config["input_dim"] * config["output_dim"]
        config["cpu_offload"] = limit is not None and total > limit


def group_alike(configs: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Hashable]) -> list[list[int]]:
    """Positions of tables that become one variable, in order; an offloaded table is a variable of its own."""
    groups: list[list[int]] = []
    known: dict[Hashable, list[int]] = {}
    for position, config in enumerate(configs):
        if not config["cpu_offload"] and key(config) in known:
            known[key(config)].append(position)
            continue
        groups.append([position])
        if not config["cpu_offload"]:
            known[key(config)] = groups[-1]
    return groups
