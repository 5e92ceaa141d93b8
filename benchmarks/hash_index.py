# SPDX-License-Identifier: Apache-2.0
"""The hash index of dynamic tables, and dynamic tables: find, find_or_insert and erase at several load factors.

    python -m benchmarks.hash_index --device cuda --rows 67108864 --peer PROGRAM --output hash_index
    python -m benchmarks.hash_index --device cpu --rows 4194304

A load factor is the share of the rows that an index is made for that it holds; keys are distinct in an operation,
random among all that it holds or that it lacks, and other ones each time. Times are medians, on a GPU by events around
calls that wait in the stream's queue. Operations with rows are those of a table: find reads the rows of keys, and the
initial rows of those that are not there; find_or_insert also makes these, and reads all.

The floor is what the least bytes take at the speed of a large copy, in whole transactions: a bucket of 128 bytes and 16
bytes of arguments a key, a sector of 32 and 8 for the key's column where one is inserted or erased; rows that are read,
written as the answer, and made. On a GPU each kernel's time is reported too, by the profiler, and on an H200 what share
of it the memory's limit is (benchmarks.hash_index_limits).

A peer is a program that takes ROWS DIMENSION KEYS HELD REPEAT SEED LOAD... and prints the figures of the same
operations on a GPU (benchmarks/peers, whose sources say how they are compiled). Its LOAD is the share of its capacity.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from benchmarks import harness
from benchmarks.hash_index_limits import ENTRY_UPDATES, MOST_IN_USE, buckets, limits
from sparse_operation_kit import core
from sparse_operation_kit.hybrid.topology import topology_of_gpu


@dataclasses.dataclass(frozen=True)
class Operation:
    """held: the share of its keys that the index holds; rows: whether it is a table's."""

    name: str
    call: str
    held: float
    rows: bool = False

    def floor_bytes(self, row_bytes: int) -> float:
        """A key's."""
        new = {"find": 0.0, "find_or_insert": 1 - self.held, "erase": 1.0}[self.call]
        if not self.rows:
            return 128 + 16 + new * 40
        made, read = (new, 1.0) if self.call == "find_or_insert" else (0.0, self.held)
        return 128 + 8 + new * 40 + (1 + made + read) * row_bytes


Measured = TypeVar("Measured")

HELD = 0.6  # of the operations that a peer has too
PROFILED = 3  # calls, of each operation on a GPU
OPERATIONS = (
    Operation("find", "find", HELD),
    Operation("find, all held", "find", 1.0),
    Operation("find, none held", "find", 0.0),
    Operation("find_or_insert", "find_or_insert", HELD),
    Operation("find_or_insert, all held", "find_or_insert", 1.0),
    Operation("find_or_insert, none held", "find_or_insert", 0.0),
    Operation("erase", "erase", 1.0),
    Operation("find, rows", "find", HELD, rows=True),
    Operation("find_or_insert, rows", "find_or_insert", HELD, rows=True),
)


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

    def give_back(self) -> None:
        """Memory that others may want."""


class Gpu:
    """The same on a GPU, with PyTorch's arrays, memory and stream."""

    device = 0

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.name = torch.cuda.get_device_name(0)
        device, stream = torch.device("cuda", 0), torch.cuda.current_stream(0)
        dtypes = {"int64": torch.int64, "uint8": torch.uint8, "float32": torch.float32}
        self.errors = core.ErrorRecord(0)
        self.context = core.Context(
            device=0,
            stream=stream.cuda_stream,
            errors=self.errors,
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtypes[np.dtype(dtype).name], device=device),
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

    def kernels(self, call: Callable[[], object]) -> dict[str, float]:
        """Microseconds that each kernel of a call takes, by its name in the source."""
        times = harness.kernel_times(call)
        return {name[0] if (name := re.search(r"\w+_kernel", key)) else key: each for key, each in times.items()}

    def give_back(self) -> None:
        self.torch.cuda.empty_cache()


class Index:
    """The index alone."""

    def __init__(self, machine: Cpu | Gpu, rows: int, dimension: int) -> None:
        self.index = core.HashIndex(rows, initial_rows=rows, device=machine.device)
        self.context = machine.context

    def find(self, keys: Any) -> None:
        self.index.find(keys, context=self.context)

    def find_or_insert(self, keys: Any) -> None:
        self.index.find_or_insert(keys, context=self.context)

    def erase(self, keys: Any) -> None:
        self.index.erase(keys, context=self.context)

    def size(self) -> int:
        return self.index.size(context=self.context)

    def close(self) -> None:
        self.index.close()


class Table(Index):
    """A table, rows of float32."""

    def __init__(self, machine: Cpu | Gpu, rows: int, dimension: int) -> None:
        uniform = core.Initializer("uniform", -0.05, 0.05)
        self.held = core.DynamicTable(
            rows, dimension, initializer=uniform, initial_rows=rows, device=machine.device, name="t"
        )
        self.index, self.context = self.held.index, machine.context

    def find(self, keys: Any) -> None:
        self.held.read(keys, context=self.context)

    def find_or_insert(self, keys: Any) -> None:
        self.held.find_or_insert(keys, context=self.context)

    def erase(self, keys: Any) -> None:
        self.held.erase(keys, context=self.context)

    def close(self) -> None:
        self.held.close()


def keys_of(numbers: Any) -> Any:
    """A bijection of the numbers 0, 1, ...: random keys, of which it is known which ones the index holds."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def measure(
    machine: Cpu | Gpu, rows: int, dimension: int, num_keys: int, loads: list[float], repeat: int, seed: int
) -> list[dict[str, Any]]:
    """The figures of all operations, by load."""
    speed = machine.copy_speed()
    reports = []
    for has_rows, kind in ((False, Index), (True, Table)):
        subject = kind(machine, rows, dimension)
        try:
            for operation, size, report in _measure(machine, subject, has_rows, rows, num_keys, loads, repeat, seed):
                bytes_a_key = operation.floor_bytes(4 * dimension)
                report["share_of_floor"] = bytes_a_key * report["keys_per_second"] / speed
                if machine.name in ENTRY_UPDATES:
                    new = num_keys * (1 - operation.held) if operation.call == "find_or_insert" else 0
                    least = limits(
                        operation.call,
                        operation.held,
                        num_keys,
                        buckets(MOST_IN_USE * (size + new / 2) / rows),
                        read=topology_of_gpu(machine.name).device.read,
                        updates=ENTRY_UPDATES[machine.name],
                        copy=speed,
                        row_bytes=4 * dimension if has_rows else 0,
                    )
                    report["kernels_share_of_limit"] = {
                        kernel: 1e6 * seconds / report["kernels_us"][kernel] for kernel, seconds in least.items()
                    }
                reports.append(report)
                _print(report)
        finally:
            subject.close()
    return reports


def _measure(
    machine: Cpu | Gpu,
    subject: Index,
    has_rows: bool,
    rows: int,
    num_keys: int,
    loads: list[float],
    repeat: int,
    seed: int,
) -> Iterator[tuple[Operation, int, dict[str, Any]]]:
    """Of each operation with the index at each load: what it held before, and what was measured."""
    rng = np.random.default_rng(seed)
    size = 0
    for load in sorted(loads):
        wanted = int(load * rows) - num_keys  # room for what is inserted
        for begin in range(size, wanted, 1 << 20):
            numbers = np.arange(begin, min(wanted, begin + (1 << 20)))
            subject.find_or_insert(machine.array(keys_of(numbers)))
        size = max(size, wanted)
        for operation in OPERATIONS:
            if operation.rows != has_rows:
                continue
            once = functools.partial(_once, machine, subject, operation, size, num_keys, rng)
            times = [once(machine.timed) for _ in range(repeat + 2)][2:]
            profiles = [once(machine.kernels) for _ in range(PROFILED)] if isinstance(machine, Gpu) else []
            kernels = profiles[0] if profiles else ()
            report = {
                "operation": operation.name,
                "load": load,
                "keys_per_second": num_keys / statistics.median(times),
                "kernels_us": {kernel: statistics.median(each[kernel] for each in profiles) for kernel in kernels},
            }
            yield operation, size, report
        if subject.size() != size:
            raise AssertionError("the index holds other keys than before")


def _once(
    machine: Cpu | Gpu,
    subject: Index,
    operation: Operation,
    size: int,
    num_keys: int,
    rng: np.random.Generator,
    measured: Callable[[Callable[[], object]], Measured],
) -> Measured:
    """What `measured` says of a call with other keys, after which the index holds the `size` keys of before again."""
    num_held = int(operation.held * num_keys)
    numbers = np.r_[
        rng.choice(size, num_held, replace=False, shuffle=False),
        (1 << 50) + rng.integers(1 << 40) + np.arange(num_keys - num_held),
    ]
    rng.shuffle(numbers)
    keys = machine.array(keys_of(numbers))
    result = measured(lambda: getattr(subject, operation.call)(keys))
    if operation.call == "erase":
        subject.find_or_insert(keys)
    elif operation.call == "find_or_insert" and operation.held < 1:
        subject.erase(machine.array(keys_of(numbers[numbers >= 1 << 50])))
    return result


def run_peer(
    program: str, rows: int, dimension: int, num_keys: int, loads: list[float], repeat: int, seed: int
) -> dict[str, Any]:
    """What a peer's program prints: its name and its figures."""
    arguments = [rows, dimension, num_keys, HELD, repeat, seed, *sorted(loads)]
    done = subprocess.run([program, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found["peer"])
    for report in found["reports"]:
        _print(report)
    return found


def _print(report: dict[str, Any]) -> None:
    speed = report["keys_per_second"]
    share = f" {report['share_of_floor']:6.1%} of the floor" if "share_of_floor" in report else ""
    print(
        f"load {report['load']:4.2f} {report['operation']:26s} {speed / 1e6:9.1f} M keys/s"
        f" {speed / 2**30:6.2f} x 2^30/s{share}",
        flush=True,
    )
    shares = report.get("kernels_share_of_limit", {})
    for kernel, microseconds in report.get("kernels_us", {}).items():
        of_limit = f" {shares[kernel]:6.1%} of the limit" if kernel in shares else ""
        print(f"    {microseconds:8.1f} us {kernel}{of_limit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=1 << 22)
    parser.add_argument("--keys", type=int, help="of an operation; default: 65536 on the CPU, 1048576 on a GPU")
    parser.add_argument("--dimension", type=int, default=64, help="of the rows of the table")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 1.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", action="append", default=[], help="a peer's program, which runs on the same GPU")
    parser.add_argument("--output", default="", help="name of the result file; empty: write none")
    args = parser.parse_args()
    machine: Cpu | Gpu = Gpu() if args.device == "cuda" else Cpu(args.threads)
    num_keys = args.keys or (1 << 20 if args.device == "cuda" else 1 << 16)
    print(f"{machine.name}, {args.rows} rows, {num_keys} keys an operation")
    workload = (args.rows, args.dimension, num_keys, args.loads, args.repeat, args.seed)
    reports = measure(machine, *workload)
    machine.give_back()
    peers = [run_peer(program, *workload) for program in args.peer]
    if args.output:
        content = {"machine": harness.machine() | {"device": machine.name}, "rows": args.rows, "keys": num_keys}
        content |= {"dimension": args.dimension, "held": HELD, "reports": reports, "peers": peers}
        print(f"wrote {harness.save(args.output, content)}")


if __name__ == "__main__":
    main()
