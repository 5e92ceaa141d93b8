# SPDX-License-Identifier: Apache-2.0
"""Lookup, backward and SGD update on the CPU: this project beside its peers, the same inputs, threads and run.

    python -m benchmarks.lookup [--cases cpu-1 cpu-10] [--threads 2] [--rounds 15]

Writes results/lookup_cpu.json and results/lookup_cpu.png.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks import harness, plot
from benchmarks.cases import PLAIN

OURS = ["core", "torch_frontend", "tensorflow_frontend", "tensorflow_frontend_ragged"]
PEERS = ["embedding_bag", "fbgemm_tbe_cpu", "tf_embedding_lookup_sparse", "tf_embedding_lookup_sparse_ragged"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["cpu-1", "cpu-10"], choices=sorted(PLAIN))
    parser.add_argument("--subjects", nargs="+", default=OURS + PEERS, choices=OURS + PEERS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="lookup_cpu", help="name of the result files; empty: write none")
    args = parser.parse_args()
    reports = []
    for name in args.cases:
        report = harness.run(args.subjects, name, rounds=args.rounds, threads=args.threads, seed=args.seed)
        case = PLAIN[name]
        report["title"] = (
            f"{case.tables} tables x {case.rows:,} x {case.dimension}, "
            f"batch {case.batch}, {case.keys_per_bag} key{'s' * (case.keys_per_bag > 1)} a bag"
        )
        reports.append(report)
        _print(report)
    if args.output:
        path = harness.save(args.output, {"machine": harness.machine(), "reports": reports})
        threads = "one thread" if args.threads == 1 else f"{args.threads} threads"
        title = f"forward + backward + SGD, {threads}"
        plot.plot_cases(reports, set(OURS), "step", title, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png').name}")


def _print(report: dict[str, Any]) -> None:
    print(f"\n{report['case']}: {report['title']} (seed {report['seed']})")
    peers = [subject["step_ms"] for name, subject in report["subjects"].items() if name in PEERS]
    for name, subject in report["subjects"].items():
        ratio = f"{min(peers) / subject['step_ms']:6.2f}x fastest peer" if peers else ""
        print(f"  {name:28s} forward {subject['forward_ms']:8.2f} ms   step {subject['step_ms']:8.2f} ms {ratio}")
    for name, reason in report["missing"].items():
        print(f"  {name:28s} not measured: {reason}")


if __name__ == "__main__":
    main()
