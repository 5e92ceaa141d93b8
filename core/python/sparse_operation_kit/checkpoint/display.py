# SPDX-License-Identifier: Apache-2.0
"""Tables of text for people: with rich on a terminal that has it, plain columns otherwise."""

import sys
from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """A number of bytes, e.g. "1.5 GiB"."""
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def printable(text: str) -> str:
    """`text` on one line, without what a terminal would act upon."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows under column titles. Numbers stand right-justified."""
    cells = [[printable(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row] for row in rows]
    numeric = [all(isinstance(row[index], int) for row in rows) for index in range(len(columns))]
    if sys.stdout.isatty() and _show_rich(columns, cells, numeric):
        return
    widths = [max(len(line[index]) for line in [list(columns), *cells]) for index in range(len(columns))]
    for line in [list(columns), *cells]:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(parts).rstrip())


def _show_rich(columns: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> bool:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return False
    table = Table()
    for title, right in zip(columns, numeric, strict=True):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)
    return True
