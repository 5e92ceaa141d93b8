# SPDX-License-Identifier: Apache-2.0
"""What both frameworks' trainings share: the tables of NVIDIA's DLRM on Criteo's terabyte, samples, arguments, and what
is printed and drawn of a plan.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Rows of the 26 tables when ids that come less than 15 times are one.
ROWS = (
    *(7_912_889, 33_823, 17_139, 7_339, 20_046, 4, 7_105, 1_382, 63, 5_554_114, 582_469, 245_828, 11),
    *(2_209, 10_667, 104, 4, 968, 15, 8_165_896, 2_675_940, 7_156_453, 302_516, 12_022, 97, 35),
)
DENSE = 13
SKEW = 1.05


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains NVIDIA's DLRM shape on made-up clicks, on one or more processes."
    )
    parser.add_argument("--scale", type=float, default=0.001, help="of the tables' rows (%(default)s)")
    parser.add_argument("--width", type=int, default=16, help="of the tables; NVIDIA's have 128 (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=1024, help="samples of a step, of all processes (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=50, help="(%(default)s)")
    parser.add_argument(
        "--strategy", default="planned", help='"planned", "basic", "memory_balanced", "memory_optimized"'
    )
    parser.add_argument("--picture", help="where the plan is drawn, as plan.png")
    return parser.parse_args()


def table_rows(scale: float) -> list[int]:
    """Of all tables, a few at least."""
    return [max(3, round(rows * scale)) for rows in ROWS]


class Clicks:
    """Samples by their number: the same ones on any number of processes.

    Each id of a table has a hidden weight; the odds of a click are the sum of a sample's.
    """

    def __init__(self, rows: list[int]) -> None:
        self._rows = np.array(rows)
        self._weights = [np.random.default_rng(table).normal(0, 0.5, count) for table, count in enumerate(rows)]

    def batch(self, step: int, size: int, rank: int, num_ranks: int) -> tuple[Array, list[Array], Array]:
        """(dense [b, 13], ids [b, 1] for each table, clicks [b, 1]) of this process's share of a batch."""
        rng = np.random.default_rng([7, step])
        share = slice(size * rank // num_ranks, size * (rank + 1) // num_ranks)
        dense = rng.normal(size=(size, DENSE)).astype(np.float32)
        power = 1 - SKEW
        drawn = rng.random((len(self._rows), size))
        most = (self._rows[:, None] + 1.0) ** power
        ids = ((drawn * (most - 1) + 1) ** (1 / power)).astype(np.int64) - 1
        ids = np.minimum(ids, self._rows[:, None] - 1)
        odds = dense[:, 0] + sum(weights[own] for weights, own in zip(self._weights, ids, strict=True))
        clicks = (rng.random(size) < 1 / (1 + np.exp(-odds))).astype(np.float32)
        return dense[share], [own[share, None] for own in ids], clicks[share, None]


def show(report: Any, args: argparse.Namespace, rank: int) -> None:
    """Prints what each process will hold and do, and draws it."""
    if rank == 0:
        print(report, flush=True)
        if args.picture:
            report.picture(args.picture)


def progress(step: int, loss: float, args: argparse.Namespace, rank: int) -> None:
    """Prints the loss now and then."""
    if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
        print(f"step {step:4}  loss {loss:.4f}", flush=True)
