# SPDX-License-Identifier: Apache-2.0
"""Lookup, backward and fused update on one GPU: the core beside FBGEMM's table-batched embedding, in the same run.

    python -m benchmarks.gpu_lookup [--cases A A-zipf B B-zipf C D] [--optimizers sgd rowwise_adagrad adagrad adam]
        [--dtypes float32 float16 bfloat16]

Times are CUDA events around each call, median of --repeat calls that are queued without waiting, over three batches in
turn; "together" is the wall time of 4 x --repeat calls over their number, all there is of TensorFlow, which runs in a
process of its own. Figures are medians of --rounds rounds, and the file has those of the rounds too. In each round
every subject is made and has its turn, another one first each time.
"floor" is the time that the bytes of docs/PERFORMANCE.md take at the speed of a device-to-device copy measured in the
same process. Writes results/<output>.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import gpu_alone, harness
from benchmarks.cases import CASES, Batch, Case, check_taken, make_batches
from benchmarks.dynamic import times_static
from benchmarks.plot import plot_steps, plot_times_static

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes an element of a row
OF_PYTORCH = (
    "core",
    "torch_frontend",
    "torch_frontend_concat",
    "torch_frontend_one_thread",
    "torch_frontend_graph",
    "torch_stack",
    "torch_dynamic",
    "torch_dynamic_lru",
    "fbgemm_tbe",
    "fbgemm_tbe_one_thread",
    "fbgemm_tbe_graph",
    "embedding_bag",
)
OF_TENSORFLOW = (
    "tensorflow_frontend",
    "tensorflow_frontend_concat",
    "tensorflow_frontend_concrete",
    "tensorflow_frontend_steps",
    "tensorflow_stack",
    "tensorflow_dynamic",
    "tensorflow_embedding_lookup_sparse",
)
DYNAMIC = ("torch_dynamic", "torch_dynamic_lru", "tensorflow_dynamic")
NUM_BATCHES = 3
DEVICE = torch.device("cuda", 0)


def copy_speed() -> float:
    """Bytes a second, read plus written, of a large device-to-device copy."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE).fill_(3)
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * timed(lambda i: target.copy_(source), 15))


def timed(call: Callable[[int], Any], repeat: int) -> float:
    """Median milliseconds of a call."""
    for i in range(3):
        call(i)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(pairs):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def count_unique(case: Case, batches: list[Batch]) -> float:
    """Distinct rows of a batch, mean over the batches."""
    total = 0
    for batch in batches:
        total += sum(int(torch.unique(torch.from_numpy(keys).to(DEVICE)).numel()) for keys in batch.keys)
    return total / len(batches)


def floors(case: Case, unique: float, optimizer: str, dtype: str, speed: float) -> dict[str, float]:
    """Milliseconds that the least bytes take (docs/PERFORMANCE.md)."""
    n, bags, width = case.lookups, case.tables * case.batch, case.dimension
    weights = 4 * n if case.weighted else 0
    rows = DTYPES[dtype] * unique * width
    states = {
        "sgd": 0.0,
        "rowwise_adagrad": 64 * unique,
        "adagrad": 8 * unique * width,
        "adam": 16 * unique * width,
    }[optimizer]
    update = 2 * rows + states
    forward = 8 * n + weights + 8 * bags + rows + 4 * bags * width
    passes = -(-(case.tables * case.rows).bit_length() // 8)
    sort = 16 * n + 8 * bags + (16 * passes + 4) * n
    backward = sort + weights + 4 * bags * width + update
    return {"forward": 1e3 * forward / speed, "step": 1e3 * (forward + backward) / speed}


def measure(
    case: Case,
    optimizer: str,
    dtype: str,
    batches: list[Batch],
    subjects: list[str],
    repeat: int,
    alone: gpu_alone.Process,
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in subjects:
        if name in OF_TENSORFLOW:
            result[name] = alone.measure(name, case.name, optimizer, dtype)
            continue
        try:
            module = importlib.import_module(f"benchmarks.subjects.gpu_{name}")
            check_taken(module.Subject, case)
            torch.manual_seed(0)
            subject = module.Subject(case, batches, optimizer, dtype)
        except (ImportError, NotImplementedError) as error:
            result[name] = {"missing": str(error)}
            continue
        result[name] = {"version": subject.version}
        for phase in ("forward", "step"):
            call = getattr(subject, phase)
            result[name][f"{phase}_ms"] = timed(call, repeat)
            result[name][f"{phase}_together_ms"] = gpu_alone.timed_together(
                call, 4 * repeat, wait=torch.cuda.synchronize
            )
        if hasattr(subject, "finish"):
            subject.finish()
        del subject
        gc.collect()
        torch.cuda.empty_cache()
    return result


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the times that `measure` gave in each round, which stand beside them."""
    result: dict[str, Any] = {}
    for name, first in rounds[0].items():
        result[name] = dict(first)
        for field in first if len(rounds) > 1 else ():
            if field.endswith("_ms"):
                times = [subjects[name][field] for subjects in rounds if field in subjects[name]]
                result[name] |= {field: statistics.median(times), f"{field}_of_rounds": times}
    return result


def kernels(case: Case, optimizer: str, dtype: str, batches: list[Batch]) -> dict[str, float]:
    """Milliseconds of each kernel of one step of the core, by the profiler."""
    from benchmarks.subjects.gpu_core import Subject

    subject = Subject(case, batches, optimizer, dtype)

    def steps() -> None:
        for i in range(3):
            subject.step(i)

    steps()
    times = {kernel[:110]: microseconds / 3e3 for kernel, microseconds in harness.kernel_times(steps).items()}
    subject.finish()
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["A", "A-zipf", "B", "B-zipf", "C", "D"], choices=sorted(CASES))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(DTYPES), help="of the rows")
    parser.add_argument(
        "--subjects",
        nargs="+",
        default=[s for s in OF_PYTORCH if s not in DYNAMIC],
        choices=[*OF_PYTORCH, *OF_TENSORFLOW],
    )
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5, help="in which each subject has its turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="list the kernels of the first optimizer's step")
    parser.add_argument("--output", default="gpu_lookup", help="name of the result file; empty: write none")
    args = parser.parse_args()
    speed = copy_speed()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name(DEVICE)}, copy {speed / 1e12:.2f} TB/s")
    machine = harness.machine() | {
        "gpu": torch.cuda.get_device_name(DEVICE),
        "copy_bytes_per_second": speed,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    reports = []
    with gpu_alone.Process(num_batches=NUM_BATCHES, repeat=args.repeat, seed=args.seed) as alone:
        for name in args.cases:
            case = CASES[name]
            batches = make_batches(case, NUM_BATCHES, args.seed)
            unique = count_unique(case, batches)
            for dtype, optimizer in itertools.product(args.dtypes, args.optimizers):
                report: dict[str, Any] = {"case": name, "optimizer": optimizer, "dtype": dtype, "unique": unique}
                report["floor_ms"] = floors(case, unique, optimizer, dtype, speed)
                rounds = []
                for turn in range(args.rounds):
                    first = turn * len(args.subjects) // args.rounds
                    order = args.subjects[first:] + args.subjects[:first]
                    rounds.append(measure(case, optimizer, dtype, batches, order, args.repeat, alone))
                report["subjects"] = medians(rounds)
                report["times_static"] = times_static(report["subjects"], "step_together_ms")
                if args.profile and optimizer == args.optimizers[0] and "core" in args.subjects:
                    report["kernels_ms"] = kernels(case, optimizer, dtype, batches)
                reports.append(report)
                _print(report)
            if args.output:  # after each case: a long run may be ended before its end
                path = harness.save(args.output, {"machine": machine, "seed": args.seed, "reports": reports})
    if args.output:
        print(f"wrote {path}")
    if args.output and "float32" in args.dtypes:
        chosen = [optimizer for optimizer in ("sgd", "adam") if optimizer in args.optimizers] or args.optimizers[:1]
        title = f"forward, backward and update on one {torch.cuda.get_device_name(DEVICE)}"
        path = harness.RESULTS / f"{args.output}.png"
        if any(subject in DYNAMIC for subject in args.subjects):
            plot_times_static(reports, f"{title}, in times of the frontend's static step", path)
        else:
            plot_steps(reports, chosen, title, path)


def _print(report: dict[str, Any]) -> None:
    line = f"{report['case']:7s} {report['optimizer']:16s} {report['dtype']:8s} U {report['unique'] / 1e6:5.2f}M"
    for name, subject in report["subjects"].items():
        if "missing" in subject:
            continue
        together = f"{subject['forward_together_ms']:.3f} / {subject['step_together_ms']:.3f} together"
        events = f"{subject['forward_ms']:.3f} / {subject['step_ms']:.3f}, " if "step_ms" in subject else ""
        line += f" | {name} {events}{together}"
        if name in report["times_static"]:
            line += f" ({report['times_static'][name]:.2f} x static)"
        if name == "core":
            shares = [report["floor_ms"][phase] / subject[f"{phase}_ms"] for phase in ("forward", "step")]
            line += f" (floor {shares[0]:.0%} / {shares[1]:.0%})"
    print(line, flush=True)
    for kernel, milliseconds in report.get("kernels_ms", {}).items():
        if milliseconds >= 0.002:
            print(f"    {milliseconds:8.3f} {kernel}")


if __name__ == "__main__":
    main()
