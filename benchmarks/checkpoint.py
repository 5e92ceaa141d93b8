# SPDX-License-Identifier: Apache-2.0
"""Dump and load of a table with Adam states beside a plain sequential write and read of the same bytes.

    python -m benchmarks.checkpoint --folder /path/on/the/disk [--gigabytes 8] [--ranks 1] [--rounds 5]
    python -m benchmarks.checkpoint --folder /path/on/the/disk --frontend torch

Without a frontend NumPy arrays stand for the tables; a frontend (on one rank) dumps and loads its own. In each round
every subject runs once, in turn, on the same disk; before a read the files leave the page cache (posix_fadvise; dirty
pages were synced). Each write ends with fsync. "dump_async" is the call, for which training stops, and "wait" all that
comes after it, where nothing else runs meanwhile. The figure of a subject is the median over the rounds; plain and ours
change places every round. Several ranks are processes of this machine; the plain write and read have one. Writes
results/checkpoint.json, or checkpoint_FRONTEND.json.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pathlib
import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import sparse_operation_kit.checkpoint as ck
from benchmarks import harness
from sparse_operation_kit.checkpoint.files import byte_view

PIECE = 8 << 20
SLOTS = ("m", "v")
WRITES = ("plain write", "dump")
READS = ("plain read", "load", "load, verify during")
IN_BACKGROUND = ("dump_async", "wait")


class PipeGroup:
    """Ranks as processes; rank 0 gathers and sends back."""

    def __init__(self, rank: int, size: int, links: list[Connection]) -> None:
        self.rank, self.size, self._links = rank, size, links

    def allgather(self, data: bytes) -> list[bytes]:
        if self.rank:
            self._links[0].send_bytes(data)
            return self._links[0].recv()
        everything = [data, *(link.recv_bytes() for link in self._links)]
        for link in self._links:
            link.send(everything)
        return everything

    def alltoall(self, values: np.ndarray[Any, Any], splits: Sequence[int]) -> np.ndarray[Any, Any]:
        ends = [np.frombuffer(data, np.int64) for data in self.allgather(np.cumsum(splits, dtype=np.int64).tobytes())]
        of_all = [np.frombuffer(data, values.dtype) for data in self.allgather(values.tobytes())]
        return np.concatenate([np.split(of, end)[self.rank] for of, end in zip(of_all, ends, strict=True)])


def make_table(dimension: int) -> ck.Table:
    states = {slot: ck.State("float32", dimension) for slot in SLOTS}
    return ck.Table("table0:0", dimension, optimizer="Adam", states=states)


def leave_page_cache(folder: pathlib.Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Disk:
    """The plain subjects: as many bytes as a dump of all ranks has, from arrays that are there."""

    def __init__(self, folder: pathlib.Path, rows: int, dimension: int) -> None:
        self.folder = folder
        self._size = rows * (8 + (1 + len(SLOTS)) * 4 * dimension)

    def write(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        fd = os.open(self.folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        views = [byte_view(array) for array in arrays]
        written = 0
        while written < self._size:
            view = views[(written // PIECE) % len(views)]
            first = (written // PIECE * PIECE) % max(1, len(view) - PIECE)
            written += os.write(fd, view[first : first + min(PIECE, self._size - written)])
        os.fsync(fd)
        os.close(fd)

    def read(self) -> None:
        buffer = np.empty(PIECE, np.uint8)
        fd = os.open(self.folder / "plain", os.O_RDONLY)
        while os.readv(fd, [buffer.data]):
            pass
        os.close(fd)


class FrontendModel:
    """The subjects on one rank, by a frontend."""

    def __init__(self, frontend: str, disk: Disk, rows: int, dimension: int) -> None:
        module = importlib.import_module(f"benchmarks.subjects.{frontend}_checkpoint")
        self._disk, self._model = disk, module.Model(rows, dimension)
        self._data = np.random.default_rng(0).integers(0, 256, 8 * PIECE, np.uint8)

    def run(self, subject: str) -> None:
        path = self._disk.folder / "d"
        {
            "plain write": lambda: self._disk.write([self._data]),
            "plain read": self._disk.read,
            "dump": lambda: self._model.dump(path),
            "load": lambda: self._model.load(path, "before"),
            "load, verify during": lambda: self._model.load(path, "during"),
            "dump_async": lambda: self._model.dump_async(path.with_name("a")),
            "wait": lambda: self._model.wait(),
        }[subject]()


class ArraysModel:
    """The subjects on one rank of several, over NumPy arrays."""

    def __init__(self, group: PipeGroup, disk: Disk, rows: int, dimension: int) -> None:
        self._group, self._disk, self._folder, self._rows = group, disk, disk.folder, rows
        self._table = make_table(dimension)
        local = len(range(group.rank, rows, group.size))
        self._arrays = {}
        for name in ("weights", *SLOTS):
            array = np.empty((local, dimension), np.float32)
            for first in range(0, local, 1 << 16):
                part = array[first : first + (1 << 16)]
                part[:] = np.random.default_rng([first, group.rank]).random(part.shape, np.float32)
            self._arrays[name] = array

    def dump(self, name: str = "d", write: Callable[..., Any] = ck.dump) -> Any:
        states = {slot: self._arrays[slot] for slot in SLOTS}
        keys = np.arange(self._group.rank, self._rows, self._group.size)
        source = ck.from_arrays(self._table, keys, self._arrays["weights"], states)
        return write(self._folder / name, [source], optimizer=ck.Optimizer("Adam"), group=self._group, progress=False)

    def dump_async(self) -> None:
        self._pending = self.dump("a", ck.dump_async)

    def load(self, verify: Any = "before") -> None:
        size = self._group.size

        def assign(held: ck.Rows) -> None:
            slots = held.keys // size
            place: Any = slots
            if slots[-1] - slots[0] + 1 == len(slots):
                place = slice(int(slots[0]), int(slots[-1]) + 1)
            self._arrays["weights"][place] = held.weights
            for slot, array in held.states.items():
                self._arrays[slot][place] = array

        target = ck.Target(self._table.name, self._table.dimension, assign, rows=self._rows, states=self._table.states)
        folder = self._folder / "d"
        ck.load(folder, [target], optimizer="Adam", group=self._group, verify=verify, progress=False)

    def run(self, subject: str) -> None:
        actions: dict[str, Callable[[], None]] = {
            "dump": self.dump,
            "load": self.load,
            "load, verify during": lambda: self.load("during"),
            "dump_async": self.dump_async,
            "wait": lambda: self._pending.wait(),
        }
        if self._group.rank == 0:
            arrays = list(self._arrays.values())
            actions.update({"plain write": lambda: self._disk.write(arrays), "plain read": self._disk.read})
        actions.get(subject, lambda: None)()


def memory(field: str) -> int:
    """VmRSS or VmHWM (its peak) of this process, in bytes. ru_maxrss would begin at the peak of the parent."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def rank_process(
    group: PipeGroup, commands: Connection, folder: pathlib.Path, rows: int, dimension: int, frontend: str | None
) -> None:
    disk = Disk(folder, rows, dimension)
    model: Any
    if frontend is None:
        model = ArraysModel(group, disk, rows, dimension)
    else:
        model = FrontendModel(frontend, disk, rows, dimension)
    before = memory("VmRSS")
    commands.send(0)
    while (subject := commands.recv()) is not None:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        model.run(subject)
        commands.send(memory("VmHWM") - before)


def start(
    ranks: int, folder: pathlib.Path, rows: int, dimension: int, frontend: str | None
) -> tuple[list[Any], list[Connection]]:
    context = multiprocessing.get_context("spawn")
    links = [context.Pipe() for _ in range(ranks - 1)]
    processes, commands = [], []
    for rank in range(ranks):
        ends = [first for first, _ in links] if rank == 0 else [links[rank - 1][1]]
        ours, theirs = context.Pipe()
        group = PipeGroup(rank, ranks, ends)
        arguments = (group, theirs, folder, rows, dimension, frontend)
        process = context.Process(target=rank_process, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        commands.append(ours)
    for command in commands:
        command.recv()
    return processes, commands


def measure(
    ranks: int, folder: pathlib.Path, rows: int, dimension: int, rounds: int, frontend: str | None = None
) -> dict[str, Any]:
    """{"seconds": {subject: median}, "all_seconds": {subject: [...]}, "peak_bytes": {subject: largest growth of a
    rank}}.
    """
    processes, commands = start(ranks, folder, rows, dimension, frontend)
    times: dict[str, list[float]] = {subject: [] for subject in WRITES + READS + IN_BACKGROUND}
    peaks = dict.fromkeys(times, 0)
    for number in range(rounds):
        for name in ("plain", "d", "a"):  # each write makes new files
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        step = 1 if number % 2 == 0 else -1
        for subject in WRITES[::step] + READS[::step] + IN_BACKGROUND:
            if subject != "wait":
                os.sync()
                leave_page_cache(folder)
            started = time.perf_counter()
            for command in commands:
                command.send(subject)
            peaks[subject] = max(peaks[subject], *(command.recv() for command in commands))
            times[subject].append(time.perf_counter() - started)
    for process, command in zip(processes, commands, strict=True):
        command.send(None)
        process.join(30)
    medians = {subject: statistics.median(values) for subject, values in times.items()}
    return {"seconds": medians, "all_seconds": times, "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=pathlib.Path, help="a new folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=8, help="GiB of weights; the states take twice as much")
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frontend", choices=("tensorflow", "torch"), help="whose dump and load; on one rank")
    parser.add_argument("--output", help="name of the result file; empty: write none. Default: checkpoint[_frontend]")
    args = parser.parse_args()
    if args.frontend and args.ranks != 1:
        parser.error("--frontend goes with --ranks 1")
    if args.output is None:
        args.output = "checkpoint" + (f"_{args.frontend}" if args.frontend else "")
    rows = int(args.gigabytes * 2**30) // (4 * args.dimension)
    args.folder.mkdir(parents=True)
    try:
        report = measure(args.ranks, args.folder, rows, args.dimension, args.rounds, args.frontend)
    finally:
        shutil.rmtree(args.folder)
    size = rows * (8 + 3 * 4 * args.dimension)
    report.update(bytes=size, rows=rows, dimension=args.dimension, ranks=args.ranks, rounds=args.rounds)
    report["frontend"] = args.frontend
    by = args.frontend or f"NumPy, {args.ranks} ranks"
    print(f"{size / 2**30:.1f} GiB, {rows:,} rows x {args.dimension}, Adam, by {by}")
    print(f"load average {os.getloadavg()[0]:.1f}: only on a quiet machine do the figures mean anything")
    for subject, seconds in report["seconds"].items():
        plain = report["seconds"]["plain read" if subject in READS else "plain write"]
        print(
            f"  {subject:26s} {seconds:7.2f} s  {size / 2**30 / seconds:6.2f} GiB/s  {plain / seconds:5.0%} of plain, "
            f"{report['peak_bytes'][subject] >> 20:6} MiB a rank above the tables"
        )
    if args.output:
        print(f"wrote {harness.save(args.output, {'machine': harness.machine(), 'report': report})}")


if __name__ == "__main__":
    main()
