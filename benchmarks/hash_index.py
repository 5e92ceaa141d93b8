# SPDX-License-Identifier: Apache-2.0
"""The hash index of dynamic tables: find, find_or_insert and erase at several load factors, on the CPU or a GPU.

    python -m benchmarks.hash_index --device cuda --rows 67108864
    python -m benchmarks.hash_index --device cpu --rows 4194304

A load factor is the share of the rows that the index is made for that it holds; keys are distinct in an operation,
random among all that it holds or that it lacks, and other ones each time. Times are medians, on a GPU by events around
calls that wait in the stream's queue. The floor is what the least bytes take at the speed of a large copy: a bucket of
128 bytes and 16 bytes of arguments a key, a sector of 32 and 8 for the key's column where one is inserted or erased.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import harness
from sparse_operation_kit import core

OPERATIONS = {
    # name -> (share of the keys that the index holds, call)
    "find": (0.6, "find"),
    "find, all held": (1.0, "find"),
    "find, none held": (0.0, "find"),
    "find_or_insert": (0.6, "find_or_insert"),
    "find_or_insert, all held": (1.0, "find_or_insert"),
    "find_or_insert, none held": (0.0, "find_or_insert"),
    "erase": (1.0, "erase"),
}


class Cpu:
    """Arrays, time and the speed of copies on the CPU."""

    device = None

    def __init__(self, threads: int) -> None:
        self.name = f"CPU, {threads} threads"
        self.pool = core.ThreadPool(threads)
        self.context = core.Context(self.pool)

    def array(self, values: Any) -> Any:
        return values

    def copy_speed(self) -> float:
        source = np.ones(1 << 28, np.uint8)
        target = source.copy()
        return 2 * source.size / min(self.timed(lambda: np.copyto(target, source)) for _ in range(5))

    def timed(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class Gpu:
    """The same on a GPU, with PyTorch's arrays, memory and stream."""

    device = 0

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.name = torch.cuda.get_device_name(0)
        device, stream = torch.device("cuda", 0), torch.cuda.current_stream(0)
        dtypes = {np.int64: torch.int64, np.uint8: torch.uint8}
        self.errors = core.ErrorRecord(0)
        self.context = core.Context(
            device=0,
            stream=stream.cuda_stream,
            errors=self.errors,
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtypes[dtype], device=device),
            allocate=lambda size: torch.cuda.caching_allocator_alloc(size, device, stream),
            release=torch.cuda.caching_allocator_delete,
        )

    def array(self, values: Any) -> Any:
        return self.torch.from_numpy(values).cuda()

    def copy_speed(self) -> float:
        source = self.torch.empty(2**31, dtype=self.torch.uint8, device="cuda").fill_(3)
        target = self.torch.empty_like(source)
        return 2 * source.numel() / statistics.median(self.timed(lambda: target.copy_(source)) for _ in range(15))

    def timed(self, call: Callable[[], object]) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(3_000_000)  # so that the host is ahead
        start.record()
        call()
        end.record()
        self.torch.cuda.synchronize()
        return 1e-3 * float(start.elapsed_time(end))


def floor_bytes(operation: str, held: float) -> float:
    """A key's."""
    return 128 + 16 + (0 if operation == "find" else (1 - held if operation == "find_or_insert" else 1) * 40)


def measure(machine: Cpu | Gpu, rows: int, num_keys: int, loads: list[float], repeat: int, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    # A bijection of the numbers 0, 1, ...: random keys, of which it is known which ones the index holds.
    keys_of = lambda numbers: (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)  # noqa: E731
    speed = machine.copy_speed()
    reports = []
    with core.HashIndex(rows, initial_rows=rows, device=machine.device) as index:
        size = 0
        for load in sorted(loads):
            wanted = int(load * rows) - num_keys  # room for what is inserted
            for begin in range(size, wanted, 1 << 22):
                numbers = np.arange(begin, min(wanted, begin + (1 << 22)))
                index.find_or_insert(machine.array(keys_of(numbers)), context=machine.context)
            size = max(size, wanted)
            for name, (held, call) in OPERATIONS.items():
                times = []
                for i in range(repeat + 2):
                    num_held = int(held * num_keys)
                    numbers = np.r_[
                        rng.choice(size, num_held, replace=False, shuffle=False),
                        (1 << 50) + rng.integers(1 << 40) + np.arange(num_keys - num_held),
                    ]
                    rng.shuffle(numbers)
                    keys = machine.array(keys_of(numbers))
                    elapsed = machine.timed(lambda: getattr(index, call)(keys, context=machine.context))  # noqa: B023
                    if i >= 2:
                        times.append(elapsed)
                    if call == "erase":
                        index.find_or_insert(keys, context=machine.context)
                    elif call == "find_or_insert" and held < 1:
                        index.erase(machine.array(keys_of(numbers[numbers >= 1 << 50])), context=machine.context)
                seconds = statistics.median(times)
                report = {
                    "operation": name,
                    "load": load,
                    "keys_per_second": num_keys / seconds,
                    "share_of_floor": floor_bytes(call, held) * num_keys / speed / seconds,
                }
                reports.append(report)
                print(
                    f"load {load:4.2f} {name:26s} {num_keys / seconds / 1e6:9.1f} M keys/s"
                    f" {num_keys / seconds / 2**30:6.2f} x 2^30/s {report['share_of_floor']:6.1%} of the floor",
                    flush=True,
                )
            if index.size(context=machine.context) != size:
                raise AssertionError("the index holds other keys than before")
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=1 << 22)
    parser.add_argument("--keys", type=int, help="of an operation; default: 65536 on the CPU, 1048576 on a GPU")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 1.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="", help="name of the result file; empty: write none")
    args = parser.parse_args()
    machine: Cpu | Gpu = Gpu() if args.device == "cuda" else Cpu(args.threads)
    num_keys = args.keys or (1 << 20 if args.device == "cuda" else 1 << 16)
    print(f"{machine.name}, {args.rows} rows, {num_keys} keys an operation")
    reports = measure(machine, args.rows, num_keys, args.loads, args.repeat, args.seed)
    if args.output:
        content = {"machine": harness.machine() | {"device": machine.name}, "rows": args.rows, "keys": num_keys}
        print(f"wrote {harness.save(args.output, content | {'reports': reports})}")


if __name__ == "__main__":
    main()
