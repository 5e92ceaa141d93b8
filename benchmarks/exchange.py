# SPDX-License-Identifier: Apache-2.0
"""All-to-all between GPUs: the core's NCCL communicator beside the frameworks' own exchanges, in the same run.

    torchrun --nproc-per-node 2 -m benchmarks.exchange torch
    horovodrun -np 2 python -m benchmarks.exchange tensorflow
    HOROVOD_CYCLE_TIME=0.1 horovodrun -np 2 python -m benchmarks.exchange tensorflow
    python -m benchmarks.exchange plot

Every rank sends the size, in equal parts to all ranks; "swap of counts" is what a step waits for. Of each
subject and size: "waited_us", one exchange that is waited for, median of --repeat; "queued_us", one of --repeat
that are enqueued and waited for together. In TensorFlow also "function_us", one of those in a tf.function that
holds --chain of them. Each is the slowest rank's, after as many that do not count. Results go to
results/exchange.json, by framework, Horovod's cycle time where it is set, and number of ranks; what was measured
before stays there.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks import harness

SIZES = (0.25, 4.0, 16.0, 64.0, 256.0)  # MiB a rank
MODULES = {"torch": "exchange_torch", "tensorflow": "exchange_tensorflow"}


class Ranks(Protocol):
    """What a module of benchmarks.subjects gives: its `Ranks` joins the other ranks when it is made."""

    rank: int
    num_ranks: int
    versions: dict[str, str]

    def subjects(self) -> dict[str, Callable[[Any], Any]]:
        """Exchanges by name: each takes what `values` gives, enqueues and returns what came."""

    def values(self, mib: float) -> Any:
        """A tensor on the GPU, as many elements for each rank."""

    def wait(self) -> None:
        """Waits for the GPU."""

    def slowest(self, seconds: float) -> float:
        """The largest of the ranks' numbers; a barrier too."""

    def chains(self, length: int) -> dict[str, Callable[[Any], Any]]:
        """As subjects, of those that a compiled function can hold: each call makes `length` exchanges."""


def waited(ranks: Ranks, call: Callable[[], Any], repeat: int) -> float:
    """Median seconds of a call that is waited for."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        ranks.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def queued(ranks: Ranks, call: Callable[[], Any], repeat: int) -> float:
    """Seconds of one of `repeat` calls that are waited for together."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    ranks.wait()
    return (time.perf_counter() - start) / repeat


def measure(ranks: Ranks, repeat: int, chain: int, sizes: list[float]) -> dict[str, Any]:
    """{subject: {size: {"waited_us", "queued_us", "function_us"}}}"""
    results: dict[str, Any] = {}
    subjects, chains = ranks.subjects(), ranks.chains(chain)
    for mib in sizes:
        values = ranks.values(mib)
        for name, exchange in subjects.items():
            if name == "swap of counts" and mib != sizes[0]:
                continue  # has one size
            figures = {}
            for _ in range(repeat):  # the first ones are slower
                exchange(values)
            ranks.wait()
            for key, how in (("waited_us", waited), ("queued_us", queued)):
                ranks.slowest(0.0)
                seconds = how(ranks, functools.partial(exchange, values), repeat)
                figures[key] = 1e6 * ranks.slowest(seconds)
            if name in chains:
                calls = max(3, repeat // chain)
                for _ in range(calls):
                    chains[name](values)
                ranks.wait()
                ranks.slowest(0.0)
                seconds = queued(ranks, functools.partial(chains[name], values), calls)
                figures["function_us"] = 1e6 * ranks.slowest(seconds / chain)
            results.setdefault(name, {})[f"{mib:g}"] = {key: round(value, 1) for key, value in figures.items()}
            if ranks.rank == 0:
                text = "   ".join(f"{key[:-3]} {value:9.1f} us" for key, value in figures.items())
                print(f"{mib:7g} MiB  {name:20s} {text}", flush=True)
    return results


def plot() -> None:
    """results/exchange.png from results/exchange.json: microseconds over the size, one panel a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = json.loads((harness.RESULTS / "exchange.json").read_text())["runs"]
    figure, axes = plt.subplots(1, len(runs), figsize=(4.6 * len(runs), 3.6), squeeze=False, sharey=True)
    for axis, (_, run) in zip(axes[0], sorted(runs.items()), strict=True):
        for (name, figures), marker in zip(run["subjects"].items(), itertools.cycle("osDv"), strict=False):
            if len(figures) == 1:
                continue  # the swap of counts
            sizes = sorted(figures, key=float)
            ours = name == "nccl in the core"
            style = {"color": "#2a6f97", "linewidth": 2} if ours else {"color": "#8d939b", "linestyle": "--"}
            micros = [figures[s]["queued_us"] for s in sizes]
            axis.plot([float(s) for s in sizes], micros, marker=marker, label=name, **style)
        axis.set(xscale="log", yscale="log", xlabel="MiB a rank", title=f"{run['framework']}, {run['num_ranks']} ranks")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    axes[0][0].set_ylabel("microseconds an exchange")
    figure.suptitle("all-to-all between GPUs, queued")
    figure.tight_layout()
    path = harness.RESULTS / "exchange.png"
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*MODULES, "plot"])
    parser.add_argument("--sizes", nargs="+", type=float, default=list(SIZES), help="MiB that each rank sends")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--chain", type=int, default=10)
    args = parser.parse_args()
    if args.what == "plot":
        plot()
        return
    ranks: Ranks = importlib.import_module(f"benchmarks.subjects.{MODULES[args.what]}").Ranks()
    results = measure(ranks, args.repeat, args.chain, args.sizes)
    if ranks.rank == 0:
        cycle = os.environ.get("HOROVOD_CYCLE_TIME") if args.what == "tensorflow" else None
        harness.keep_run("exchange", f"{args.what}, cycle {cycle} ms" if cycle else args.what, ranks, subjects=results)


if __name__ == "__main__":
    main()
