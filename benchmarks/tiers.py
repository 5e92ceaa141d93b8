# SPDX-License-Identifier: Apache-2.0
"""A training step on dynamic tables of which the GPU holds a part of the rows, beside the same step on it alone.

    python -m benchmarks.tiers --case dynamicemb --share 0.1 --optimizers sgd adam --output gpu_tiers

Every step has a batch of its own, so the rows that it needs are not those of the steps before. "device": all rows are
in the GPU's memory. "tiers": `max_hbm_for_vectors` holds --share of them, and they come when the lookup asks for them.
"prefetch": `sok.prefetch` brings those of the next batch beside backward and the step. Times are wall times of --steps
steps, the median of --rounds, after as many steps that are not counted. "copy" is the time that the copy engine takes
for the bytes that have to come, both ways at once; "ratio" is a step over the larger of this and the step of "device".
Writes results/<output>.json.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np
import torch

import sparse_operation_kit.torch as sok
from benchmarks import harness
from benchmarks.cases import PLAIN, Batch, Case, make_batches, raw_ids
from benchmarks.subjects.torch_inputs import make_dynamic, make_optimizer

DEVICE = torch.device("cuda", 0)
STATES = {"sgd": 0, "adagrad": 1, "adam": 2}  # of a row, as wide as it
SUBJECTS = ("device", "tiers", "prefetch")


def copy_speed() -> float:
    """Bytes a second and direction while both directions copy."""
    size = 1 << 30
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    best = float("inf")
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return size / best


class Subject:
    def __init__(self, case: Case, batches: list[Batch], optimizer: str, kind: str, share: float) -> None:
        sok.init()
        gigabytes = None if kind == "device" else share * case.rows * case.dimension * 4 / 2**30
        self.tables = [make_dynamic(case, t, "float32", DEVICE, True, gigabytes) for t in range(case.tables)]
        self.optimizer = make_optimizer(optimizer, self.tables)
        self.prefetches = kind == "prefetch"
        splits = torch.from_numpy(batches[0].row_splits).to(DEVICE)
        self.inputs = [[(torch.from_numpy(raw_ids(k)).to(DEVICE), splits) for k in batch.keys] for batch in batches]
        self.gradient = torch.randn((case.batch, case.tables * case.dimension), device=DEVICE)
        self.step(0)

    def step(self, i: int) -> None:
        output = sok.lookup_sparse(self.tables, self.inputs[i], combiners="sum", concat=True)
        if self.prefetches:
            sok.prefetch(self.tables, self.inputs[(i + 1) % len(self.inputs)])
        output.backward(self.gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moves(self) -> int:
        return sum(table.statistics().moves for table in self.tables)

    def host_hits(self) -> int:
        return sum(table.statistics().host_hits for table in self.tables)


def measure(subject: Subject, rounds: int) -> dict[str, Any]:
    steps = len(subject.inputs)
    times = []
    for turn in range(rounds + 1):
        torch.cuda.synchronize()
        moves, hits, start = subject.moves(), subject.host_hits(), time.perf_counter()
        for i in range(steps):
            subject.step(i)
        torch.cuda.synchronize()
        if turn > 0:
            times.append(1e3 * (time.perf_counter() - start) / steps)
    sok.check_errors()
    return {
        "step_ms": statistics.median(times),
        "step_ms_of_rounds": times,
        "moves": (subject.moves() - moves) / steps,
        "host_hits": (subject.host_hits() - hits) / steps,
        "host_bytes": sum(table.statistics().host_bytes for table in subject.tables),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="dynamicemb", choices=sorted(PLAIN))
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that the GPU holds")
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"], choices=list(STATES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="gpu_tiers", help="name of the result file; empty: write none")
    args = parser.parse_args()
    case, speed = PLAIN[args.case], copy_speed()
    batches = make_batches(case, args.steps, args.seed)
    unique = np.mean([len(np.unique(keys)) for keys in batches[0].keys]) * case.tables
    reports = []
    for optimizer in args.optimizers:
        report: dict[str, Any] = {"optimizer": optimizer, "unique": float(unique)}
        for kind in SUBJECTS:
            subject = Subject(case, batches, optimizer, kind, args.share)
            found = measure(subject, args.rounds)
            del subject
            gc.collect()
            torch.cuda.empty_cache()
            if kind != "device":
                row_bytes = 4 * case.dimension * (1 + STATES[optimizer])
                found["copy_ms"] = 1e3 * found["moves"] * row_bytes / speed
                found["ratio"] = found["step_ms"] / max(found["copy_ms"], report["device"]["step_ms"])
            report[kind] = found
            print(optimizer, kind, {key: value for key, value in found.items() if not isinstance(value, list)})
        reports.append(report)
    if args.output:
        machine = harness.machine() | {
            "gpu": torch.cuda.get_device_name(DEVICE),
            "copy_bytes_per_second": speed,
            "torch": torch.__version__,
        }
        harness.save(args.output, {"machine": machine, "case": args.case, "share": args.share, "reports": reports})


if __name__ == "__main__":
    main()
