# SPDX-License-Identifier: Apache-2.0
"""Host time of a PyTorch training step over many small tables, by what else the training loop does with it.

    python -m benchmarks.host_time [--tables 100] [--rounds 30] [--ranks 1]

One thread, tables of 4 columns, a batch so small that the rows cost nothing. The plain step is the forward pass into
one output (`concat=True`), backward, step() and zero_grad() of one call and one parameter group; the others do one
thing more, or otherwise. Time is the processor time of the thread that trains, so that a machine with other work on it
can measure, and ranks that wait for each other. In each round every way runs some steps, in turn; the figure of a way
is the median of the rounds' least. With several ranks, which are processes of this machine, it is that of the slowest.

Writes results/host_time.json (host_time_2_ranks.json, ...) and its chart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import sparse_operation_kit.torch as sok
from benchmarks import harness, plot

ROWS, DIMENSION, BATCH, KEYS_PER_BAG = 8192, 4, 4, 2
MICRO_BATCHES = 4

OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
}


class Model:
    """Tables with an optimizer over one or two parameter groups."""

    def __init__(self, num_tables: int, optimizer: str, num_groups: int = 1) -> None:
        self.tables = [sok.Variable(shape=(ROWS, DIMENSION), initializer="uniform") for _ in range(num_tables)]
        size = num_tables // num_groups
        groups = [{"params": self.tables[i * size : (i + 1) * size]} for i in range(num_groups)]
        self.optimizer = sok.OptimizerWrapper(OPTIMIZERS[optimizer](groups))
        generator = torch.Generator().manual_seed(0)
        splits = torch.arange(BATCH + 1) * KEYS_PER_BAG
        self.ids = [(torch.randint(0, ROWS, (BATCH * KEYS_PER_BAG,), generator=generator), splits) for _ in self.tables]
        self.gradient = torch.ones(BATCH, num_tables * DIMENSION)

    def backward(self, first: int = 0, end: int | None = None) -> None:
        """Forward pass and backward of one call over some of the tables."""
        tables, ids = self.tables[first:end], self.ids[first:end]
        output = sok.lookup_sparse(tables, ids, combiners="sum", concat=True)
        output.backward(self.gradient[:, : output.shape[1]])

    def finish(self) -> None:
        """The optimizer's step and zero_grad()."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self) -> None:
        self.backward()
        self.finish()


class Stacked(Model):
    """All tables are one stack, with flat ids."""

    def __init__(self, num_tables: int, optimizer: str) -> None:
        shapes = {f"table{i}": (ROWS, DIMENSION) for i in range(num_tables)}
        self.stack = sok.TableStack(shapes, initializer="uniform")
        self.optimizer = sok.OptimizerWrapper(OPTIMIZERS[optimizer]([{"params": [self.stack]}]))
        generator = torch.Generator().manual_seed(0)
        keys = torch.randint(0, ROWS, (num_tables * BATCH * KEYS_PER_BAG,), generator=generator)
        self.flat = (keys, torch.arange(num_tables * BATCH + 1) * KEYS_PER_BAG)
        self.gradient = torch.ones(BATCH, num_tables * DIMENSION)

    def backward(self, first: int = 0, end: int | None = None) -> None:
        sok.lookup_sparse(self.stack, self.flat, combiners="sum").backward(self.gradient)


class OneTable(Model):
    """For comparison: one table of as many rows, with the same keys in as many bags."""

    def __init__(self, num_tables: int, optimizer: str) -> None:
        super().__init__(1, optimizer)
        generator = torch.Generator().manual_seed(0)
        self.tables = [sok.Variable(shape=(num_tables * ROWS, DIMENSION), initializer="uniform")]
        self.optimizer = sok.OptimizerWrapper(OPTIMIZERS[optimizer]([{"params": self.tables}]))
        keys = torch.randint(0, num_tables * ROWS, (num_tables * BATCH * KEYS_PER_BAG,), generator=generator)
        self.ids = [(keys, torch.arange(num_tables * BATCH + 1) * KEYS_PER_BAG)]
        self.gradient = torch.ones(num_tables * BATCH, DIMENSION)


class HalfCalls(Model):
    """Two calls of half of the tables each."""

    def plain(self) -> None:
        half = len(self.tables) // 2
        self.backward(0, half)
        self.backward(half)
        self.finish()


class OneRead(Model):
    """The gradient of one table is read."""

    def plain(self) -> None:
        self.backward()
        assert self.tables[7].grad is not None
        self.finish()


class MicroBatches(Model):
    """Several calls of all tables before a step; the figure is a call's."""

    def plain(self) -> None:
        for _ in range(MICRO_BATCHES):
            self.backward()
        self.finish()


class Clipped(Model):
    """All gradients are clipped by their norm."""

    def plain(self) -> None:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.tables, 1.0)
        self.finish()


class ClippedByThis(Model):
    """The same by this package's function."""

    def plain(self) -> None:
        self.backward()
        sok.clip_grad_norm_(self.tables, 1.0)
        self.finish()


class HookGone(Model):
    """One table had a hook, which was removed."""

    def __init__(self, num_tables: int, optimizer: str) -> None:
        super().__init__(num_tables, optimizer)
        handle = self.tables[7].register_hook(lambda gradient: None)
        self.plain()
        handle.remove()


class HookEachStep(Model):
    """A hook on one table comes and goes in each step."""

    def plain(self) -> None:
        handle = self.tables[7].register_hook(lambda gradient: None)
        self.backward()
        handle.remove()
        self.finish()


class DenseClipped:
    """For comparison: PyTorch's clipping alone, of as many small dense parameters."""

    def __init__(self, num_tables: int, optimizer: str) -> None:
        del optimizer
        self.parameters = [torch.nn.Parameter(torch.zeros(BATCH, DIMENSION)) for _ in range(num_tables)]
        for parameter in self.parameters:
            parameter.grad = torch.ones(BATCH, DIMENSION)

    def plain(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)


WAYS: dict[str, tuple[Callable[[int, str], Any], int]] = {
    "plain step": (Model, 1),
    "all tables in a stack": (Stacked, 1),
    "one table of all rows": (OneTable, 1),
    "two calls, half of the tables each": (HalfCalls, 1),
    "two parameter groups": (lambda tables, optimizer: Model(tables, optimizer, 2), 1),
    "one table's .grad read": (OneRead, 1),
    "four micro-batches, per call": (MicroBatches, MICRO_BATCHES),
    "clip_grad_norm_ over all": (Clipped, 1),
    "sok.clip_grad_norm_ over all": (ClippedByThis, 1),
    "a hook, added and removed before": (HookGone, 1),
    "a hook, added and removed in each step": (HookEachStep, 1),
    "PyTorch: clip_grad_norm_ alone, dense gradients": (DenseClipped, 1),
}
"""How each way is made, and how many calls of its step the figure is divided by."""


def measure(num_tables: int, optimizer: str, rounds: int, steps: int = 12) -> dict[str, float]:
    """Milliseconds of each way."""
    torch.set_num_threads(1)
    models = {name: make(num_tables, optimizer) for name, (make, _) in WAYS.items()}
    least: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            times = []
            for _ in range(steps):
                start = time.thread_time()
                model.plain()
                times.append(time.thread_time() - start)
            least[name].append(min(times) * 1e3 / WAYS[name][1])
    return {name: statistics.median(values) for name, values in least.items()}


def _rank(rank: int, ranks: int, store: str, arguments: tuple[Any, ...], queue: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    sok.init()
    queue.put(measure(*arguments))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(ranks: int, *arguments: Any) -> dict[str, float]:
    """`measure` on so many ranks: of each way the figure of the slowest."""
    if ranks == 1:
        sok.init()
        return measure(*arguments)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, f"{folder}/store", arguments, queue), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        figures = [queue.get() for _ in processes]
        for process in processes:
            process.join()
    return {name: max(each[name] for each in figures) for name in figures[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=100)
    parser.add_argument("--optimizers", nargs="+", default=["SGD", "Adagrad"], choices=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--output", help="name of the result files; empty: write none. Default: host_time[_N_ranks]")
    args = parser.parse_args()
    reports = {}
    for optimizer in args.optimizers:
        figures = reports[optimizer] = run(args.ranks, args.tables, optimizer, args.rounds)
        print(f"\n{optimizer}, {args.tables} tables, {args.ranks} rank{'s' * (args.ranks > 1)}")
        for name, value in figures.items():
            print(f"  {name:50s} {value:8.3f} ms {value / figures['plain step']:6.2f}")
    name = args.output
    if name is None:
        name = "host_time" if args.ranks == 1 else f"host_time_{args.ranks}_ranks"
    if name:
        content = {
            "machine": harness.machine(),
            "versions": {"torch": torch.__version__},
            "tables": args.tables,
            "ranks": args.ranks,
            "ms": reports,
        }
        path = harness.save(name, content)
        title = f"Host time of a step, PyTorch, {args.tables} tables, one thread, CPU"
        plot.plot_ways(reports, title, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
