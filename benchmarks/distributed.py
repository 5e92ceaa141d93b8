# SPDX-License-Identifier: Apache-2.0
"""Training steps of sharded tables on several GPUs: the project's frontends and TorchRec, with the same batches.

    torchrun --nproc-per-node 2 -m benchmarks.distributed torch
    horovodrun -np 2 python -m benchmarks.distributed tensorflow
    python -m benchmarks.distributed plot

The batch of a case is the global one; each rank takes its part. Milliseconds are the wall time of --repeat calls that
are queued and waited for together, over their number, of the slowest rank; the median of --rounds such measurements,
subjects in turn. Results go to results/distributed.json, by framework and number of ranks; what was measured before
stays there.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from benchmarks import harness
from benchmarks.cases import PLAIN, Batch, Case, make_batches

NUM_BATCHES = 3
COLORS = {
    "PyTorch, by row": "#1d4e72",
    "PyTorch, by table": "#4f94bd",
    "TensorFlow, by row": "#b5541c",
    "TensorFlow, by table": "#e9a26b",
    "TorchRec, table_wise": "#8c8c8c",
    "TorchRec, row_wise": "#a8a8a8",
    "TorchRec, planner": "#c4c4c4",
}
MODULES = {"torch": "distributed_torch", "tensorflow": "distributed_tensorflow"}

Maker = Callable[[Case, list[Batch], str], Any]
"""Of a case, batches and an optimizer makes a subject: forward(i) and step(i) enqueue the work of batch i. Where it has
estimate(), that says what it expects: {"estimated_forward_ms", "estimated_step_ms"}.
"""


class Ranks(Protocol):
    """What a module of benchmarks.subjects gives: its `Ranks` joins the other ranks when it is made. Each takes a GPU;
    where there is none they are on the CPU, for a trial.
    """

    rank: int
    num_ranks: int
    versions: dict[str, str]

    def placements(self) -> dict[str, Maker]:
        """lookup_sparse of all tables, by row and by table."""

    def peers(self) -> dict[str, Maker]:
        """Other projects of the same framework, as far as they are installed."""

    def layer(self, case: Case, batches: list[Batch], optimizer: str, options: dict[str, Any]) -> Any:
        """The subject that is a DistributedEmbedding with these options."""

    def wait(self) -> None:
        """Waits for the GPU."""

    def slowest(self, seconds: float) -> float:
        """The largest of the ranks' numbers; a barrier too."""

    def release(self) -> None:
        """Gives the memory of a subject that is gone back."""


def part_of(batch: Batch, case: Case, rank: int, num_ranks: int) -> Batch:
    """The bags of one rank."""
    first, last = case.batch * rank // num_ranks, case.batch * (rank + 1) // num_ranks
    entries = slice(batch.row_splits[first], batch.row_splits[last])
    return Batch([keys[entries] for keys in batch.keys], batch.row_splits[first : last + 1] - batch.row_splits[first])


def timed(ranks: Ranks, call: Callable[[int], Any], repeat: int, rounds: int) -> list[float]:
    """Seconds of a call in each round: of call(0), call(1), ... queued and waited for together, of the slowest rank."""
    times = []
    for _ in range(rounds):
        ranks.wait()
        ranks.slowest(0.0)
        start = time.perf_counter()
        for i in range(repeat):
            call(i)
        ranks.wait()
        times.append(ranks.slowest(time.perf_counter() - start) / repeat)
    return times


def _nth(call: Callable[[int], Any], i: int) -> None:
    call(i % NUM_BATCHES)


def measure(
    ranks: Ranks, case: Case, optimizer: str, makers: Mapping[str, Maker], repeat: int, rounds: int, seed: int
) -> dict[str, Any]:
    """{subject: {"forward_ms", "step_ms", ...}}; a subject at a time is in memory."""
    batches = [part_of(batch, case, ranks.rank, ranks.num_ranks) for batch in make_batches(case, NUM_BATCHES, seed)]
    results: dict[str, Any] = {}
    for name, make in makers.items():
        subject = make(case, batches, optimizer)
        figures: dict[str, float] = {}
        for phase in ("forward", "step"):
            call = getattr(subject, phase)
            for i in range(5):
                call(i % NUM_BATCHES)
            times = timed(ranks, functools.partial(_nth, call), repeat, rounds)
            figures[f"{phase}_ms"] = round(1e3 * statistics.median(times), 3)
        line = f"{case.name:7s} {optimizer:16s} {name:22s} {figures['forward_ms']:7.3f} / {figures['step_ms']:7.3f} ms"
        if hasattr(subject, "estimate"):
            figures |= {key: round(value, 3) for key, value in subject.estimate().items()}
            line += f", estimated {figures['estimated_forward_ms']:7.3f} / {figures['estimated_step_ms']:7.3f}"
        results[name] = figures
        if ranks.rank == 0:
            print(line, flush=True)
        del subject
        ranks.release()
    return results


def plot() -> None:
    """results/distributed.png from results/distributed.json: a step with SGD, one panel a number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = json.loads((harness.RESULTS / "distributed.json").read_text())["runs"].values()
    counts = sorted({run["num_ranks"] for run in runs})
    figure, axes = plt.subplots(1, len(counts), figsize=(7.2 * len(counts), 3.8), squeeze=False)
    for axis, count in zip(axes[0], counts, strict=True):
        steps: dict[str, dict[str, float]] = {}
        for run in runs:
            for report in run["reports"] if run["num_ranks"] == count else []:
                if report["optimizer"] == "sgd":
                    for name, figures in report["subjects"].items():
                        steps.setdefault(name, {})[report["case"]] = figures["step_ms"]
        cases = sorted({case for figures in steps.values() for case in figures})
        width = 0.8 / len(steps)
        for i, (name, figures) in enumerate(sorted(steps.items(), key=lambda item: item[0].startswith("TorchRec"))):
            places = [j - 0.4 + (i + 0.5) * width for j in range(len(cases))]
            heights = [figures.get(case, 0) for case in cases]
            bars = axis.bar(places, heights, width, label=name.replace("_", "-"), color=COLORS.get(name, "#d9d9d9"))
            axis.bar_label(bars, fmt="%.1f", fontsize=7)
        axis.set_xticks(range(len(cases)), cases)
        axis.set(ylabel="ms a step", title=f"{count} GPUs, global batch 65536, SGD")
        axis.spines[["top", "right"]].set_visible(False)
    handles = {
        label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, fontsize=8, frameon=False, loc="lower center", ncols=len(handles))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path = harness.RESULTS / "distributed.png"
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*MODULES, "plot"])
    parser.add_argument("--cases", nargs="+", default=["A", "A-zipf", "B", "B-zipf"], choices=sorted(PLAIN))
    parser.add_argument(
        "--optimizers", nargs="+", default=["sgd"], choices=["sgd", "rowwise_adagrad", "adagrad", "adam"]
    )
    parser.add_argument("--subjects", nargs="*", default=[], help="some of them (default: all)")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "plot":
        plot()
        return
    ranks: Ranks = importlib.import_module(f"benchmarks.subjects.{MODULES[args.what]}").Ranks()
    every = {**ranks.placements(), **ranks.peers()}
    makers = {name: make for name, make in every.items() if not args.subjects or name in args.subjects}
    reports = []
    for name in args.cases:
        for optimizer in args.optimizers:
            subjects = measure(ranks, PLAIN[name], optimizer, makers, args.repeat, args.rounds, args.seed)
            reports.append({"case": name, "optimizer": optimizer, "subjects": subjects})
    if ranks.rank == 0:
        harness.keep_run("distributed", args.what, ranks, reports=reports)


if __name__ == "__main__":
    main()
