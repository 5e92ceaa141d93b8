# SPDX-License-Identifier: Apache-2.0
"""What eviction costs: locating keys in a full dynamic table, beside one that evicts nothing and has room.

    python -m benchmarks.eviction --device cuda --rows 16777216 --output eviction
    python -m benchmarks.eviction --device cpu --rows 1048576

Keys are distinct in a call; those that the table holds are random among all of them, and each call is a step. The table
without eviction gives up the new keys between calls. Rows have one element, so that little but the index and the scores
is measured. Times are those of benchmarks.hash_index; a mean beside the median shows calls that sweep.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.hash_index import Cpu, Gpu
from sparse_operation_kit import core

STRATEGIES = (None, "lru", "lfu")


def keys_of(numbers: Any) -> Any:
    """A bijection of the numbers 0, 1, ...: random keys."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


class Table:
    """A full table."""

    def __init__(self, machine: Cpu | Gpu, rows: int, num_keys: int, strategy: str | None) -> None:
        self.machine, self.context, self.strategy = machine, machine.context, strategy
        capacity = rows if strategy else rows + num_keys
        self.table = core.DynamicTable(
            capacity, 1, initial_rows=capacity, device=machine.device, eviction=strategy, name=str(strategy)
        )
        for begin in range(0, rows, 1 << 20):
            self.locate(machine.array(keys_of(np.arange(begin, min(rows, begin + (1 << 20))))))
            self.table.end_step()
        self.next = rows
        self.table.index.size(context=self.context)

    def locate(self, keys: Any) -> None:
        core.locate([self.table.table()], keys, [[len(keys)]], insert=True, context=self.context)

    def held(self) -> Any:
        """Its keys, on the host."""
        exported: tuple[Any, ...] = self.table.index.export(context=self.context)
        keys, _, count = exported
        if self.machine.device is not None:
            keys, count = keys.cpu().numpy(), count.cpu().numpy()
        return keys[: count[0]]

    def seconds(self, rng: np.random.Generator, num_keys: int, share: float) -> float:
        """Of a call, of whose keys it holds a share."""
        num_new = num_keys - int(share * num_keys)
        new = keys_of(np.arange(self.next, self.next + num_new))
        self.next += num_new
        every = self.held()
        keys = np.r_[every[rng.choice(len(every), num_keys - num_new, replace=False, shuffle=False)], new]
        rng.shuffle(keys)
        array = self.machine.array(keys)
        elapsed = self.machine.timed(lambda: self.locate(array))
        self.table.end_step()
        if self.strategy is None and num_new > 0:
            self.table.erase(self.machine.array(new), context=self.context)
        self.table.index.size(context=self.context)
        return elapsed


def measure(
    machine: Cpu | Gpu, rows: int, num_keys: int, shares: list[float], repeat: int, seed: int
) -> list[dict[str, Any]]:
    reports = []
    for strategy in STRATEGIES:
        rng = np.random.default_rng(seed)
        table = Table(machine, rows, num_keys, strategy)
        for share in shares:
            times = [table.seconds(rng, num_keys, share) for _ in range(repeat + 2)][2:]
            report = {
                "eviction": strategy,
                "held": share,
                "median_us": 1e6 * statistics.median(times),
                "mean_us": 1e6 * statistics.fmean(times),
                "keys_per_second": num_keys / statistics.median(times),
            }
            reports.append(report)
            print(
                f"{strategy!s:5s} {share:4.0%} held {report['median_us']:9.1f} us, mean {report['mean_us']:9.1f} us"
                f" {num_keys / statistics.median(times) / 1e6:9.1f} M keys/s",
                flush=True,
            )
        counts = table.table.counts()
        if counts.evictions != (counts.insertions - rows if strategy else 0):
            raise AssertionError(f"{counts.evictions} rows were evicted for {counts.insertions} insertions")
        table.table.close()
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--keys", type=int, help="of a call; default: 65536 on the CPU, 1048576 on a GPU")
    parser.add_argument("--held", type=float, nargs="+", default=[0.6, 0.9, 1.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="", help="name of the result file; empty: write none")
    args = parser.parse_args()
    machine: Cpu | Gpu = Gpu() if args.device == "cuda" else Cpu(args.threads)
    num_keys = args.keys or (1 << 20 if args.device == "cuda" else 1 << 16)
    print(f"{machine.name}, {args.rows} rows, {num_keys} keys a call")
    reports = measure(machine, args.rows, num_keys, args.held, args.repeat, args.seed)
    if args.output:
        content = {"machine": harness.machine() | {"device": machine.name}, "rows": args.rows, "keys": num_keys}
        print(f"wrote {harness.save(args.output, content | {'reports': reports})}")


if __name__ == "__main__":
    main()
