# SPDX-License-Identifier: Apache-2.0
"""A training step on dynamic tables, all of whose ids have rows, beside the same step on static ones, on the CPU.

    python -m benchmarks.dynamic [--cases cpu-1 cpu-1-zipf cpu-10 cpu-10-zipf] [--optimizers sgd adagrad adam]

Beside them peers that take raw ids: a Python dict before torch.nn.EmbeddingBag, and TensorFlow's DenseHashTable before
a lookup. Ids, threads and machine are the same for all of a case, and they take turns. Of each subject the file has
milliseconds and how many times the static step of its frontend that is, as medians and as minima. Writes
results/dynamic_cpu.json and .png.

On a GPU `python -m benchmarks.gpu_lookup` does it:

    python -m benchmarks.gpu_lookup --cases A A-zipf B B-zipf dynamicemb --optimizers sgd adagrad adam
        --subjects torch_frontend_concat torch_dynamic torch_dynamic_lru fbgemm_tbe --output gpu_dynamic
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks import harness, plot
from benchmarks.cases import PLAIN

STATIC_OF = {
    "torch_dynamic": ("torch_frontend", "torch_frontend_concat"),
    "torch_dynamic_lru": ("torch_frontend", "torch_frontend_concat"),
    "tensorflow_dynamic": ("tensorflow_frontend_ragged", "tensorflow_frontend_concat"),
    "dict_embedding_bag": ("torch_frontend",),
    "tf_dense_hash_table": ("tensorflow_frontend_ragged",),
    "fbgemm_tbe": ("torch_frontend_concat",),
}
"""Subject -> whose step is the static one of its frontend, on the CPU or on a GPU."""

SUBJECTS = (
    *("torch_frontend", "torch_dynamic", "torch_dynamic_lru", "dict_embedding_bag"),
    *("tensorflow_frontend_ragged", "tensorflow_dynamic", "tf_dense_hash_table"),
)


def times_static(subjects: dict[str, dict[str, Any]], field: str) -> dict[str, float]:
    """For each subject that has one, its time over that of the static step of its frontend."""
    result = {}
    for name, subject in subjects.items():
        for static in STATIC_OF.get(name, ()):
            if field in subject and field in subjects.get(static, {}):
                result[name] = subject[field] / subjects[static][field]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    all_cases = ["cpu-1", "cpu-1-zipf", "cpu-10", "cpu-10-zipf"]
    parser.add_argument("--cases", nargs="+", default=all_cases, choices=sorted(PLAIN))
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adagrad", "adam"])
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=4, help="of a subject in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="dynamic_cpu", help="name of the result files; empty: write none")
    args = parser.parse_args()
    reports = []
    for name in args.cases:
        for optimizer in args.optimizers:
            chosen = [f"{subject}:{optimizer}" for subject in args.subjects]
            report = harness.run(
                chosen, name, rounds=args.rounds, calls=args.calls, threads=args.threads, seed=args.seed
            )
            for field in ("subjects", "missing"):
                report[field] = {subject.partition(":")[0]: value for subject, value in report[field].items()}
            report["optimizer"] = optimizer
            report["times_static"] = times_static(report["subjects"], "step_ms")
            # On a machine that has other work too, the quickest of many steps is the one that was disturbed least.
            report["times_static_of_minima"] = times_static(report["subjects"], "step_min_ms")
            reports.append(report)
            _print(report)
            if args.output:  # after each: a long run may be ended before its end
                content = {"machine": harness.machine(), "load_average": os.getloadavg()[0], "reports": reports}
                path = harness.save(args.output, content)
    if args.output:
        title = f"forward, backward and update on {args.threads} threads, in times of the frontend's static step"
        plot.plot_times_static(reports, title, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png').name}")


def _print(report: dict[str, Any]) -> None:
    print(f"\n{report['case']}, {report['optimizer']}")
    for name, subject in report["subjects"].items():
        ratio = report["times_static"].get(name)
        text = "" if ratio is None else f"{ratio:6.2f} x static, minima {report['times_static_of_minima'][name]:6.2f}"
        print(f"  {name:28s} forward {subject['forward_ms']:8.2f} ms   step {subject['step_ms']:8.2f} ms {text}")
    for name, reason in report["missing"].items():
        print(f"  {name:28s} not measured: {reason}", flush=True)


if __name__ == "__main__":
    main()
