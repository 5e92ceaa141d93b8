# SPDX-License-Identifier: Apache-2.0
"""A training step of a whole DLRM on several GPUs, where the batches are already: tables and dense layers.

    torchrun --nproc-per-node 2 -m benchmarks.whole_step torch
    horovodrun -np 2 python -m benchmarks.whole_step tensorflow

26 tables of --table-rows rows of --embedding-dim columns, ids from a power law with exponent 1.05, one a bag; dense
layers 512-256-<dim> and 1024-1024-512-256-1. The batch is the global one. Milliseconds are the wall time of --repeat
steps that are queued and waited for together, over their number, of the slowest rank; the median of --rounds. Results
go to results/<output>.json, by framework and number of ranks; what was measured before stays there. Without GPUs it
runs on CPUs, for a trial.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pathlib
import statistics
from typing import Any, SupportsFloat

import numpy as np

from benchmarks import harness
from benchmarks.cases import ZIPF_EXPONENT
from benchmarks.distributed import MODULES, Ranks, timed
from benchmarks.whole_job_data import Job
from examples.dlrm import columns
from examples.dlrm.architecture import Architecture
from examples.dlrm.features import Batch
from examples.dlrm.keyed_ids import KeyedIds
from examples.dlrm.power_law import BoundedPowerLaw, scatter

NUM_BATCHES = 4
WARM_UP = 8


@dataclasses.dataclass(frozen=True)
class Step(Job):
    """The demo's model with the dense layers of NVIDIA's DLRM."""

    def architecture(self) -> Architecture:
        """See Settings."""
        return Architecture(self.embedding_dim, (512, 256), (1024, 1024, 512, 256))


def make_batches(step: Step, rank: int, num_ranks: int) -> list[Batch]:
    """This rank's rows of NUM_BATCHES global batches."""
    first, last = (step.batch_size * place // num_ranks for place in (rank, rank + 1))
    rows, law = last - first, BoundedPowerLaw(step.max_table_rows, ZIPF_EXPONENT)
    offsets = np.arange(len(columns.CATEGORICAL) * rows + 1, dtype=np.int64)
    batches = []
    for index in range(NUM_BATCHES):
        generator = np.random.default_rng([step.seed, index, rank])
        ids = [
            scatter(law.sample(generator, rows), step.max_table_rows, step.seed + place)
            for place in range(len(columns.CATEGORICAL))
        ]
        dense = generator.standard_normal((rows, len(columns.DENSE))).astype(np.float32)
        labels = generator.integers(0, 2, rows).astype(np.float32)
        keyed = KeyedIds(columns.CATEGORICAL, np.concatenate(ids).astype(np.int64), offsets, offsets[::rows].tolist())
        batches.append(Batch(index, step.batch_size, labels, dense, keyed))
    return batches


def measure(ranks: Ranks, step: Step, framework: str, repeat: int, rounds: int) -> dict[str, Any]:
    """{"step_ms", "step_ms_of_rounds", "samples_per_second", "loss"}, the latter of the last step."""
    model = importlib.import_module(f"benchmarks.subjects.{MODULES[framework]}").whole_model(step)
    batches = [model.prepare(batch) for batch in make_batches(step, ranks.rank, ranks.num_ranks)]
    total: SupportsFloat = 0.0

    def train(i: int) -> None:
        nonlocal total
        total = model.train(batches[i % NUM_BATCHES])

    for i in range(WARM_UP):
        train(i)
    times = timed(ranks, train, repeat, rounds)
    seconds = statistics.median(times)
    return {
        "step_ms": round(1e3 * seconds, 3),
        "step_ms_of_rounds": [round(1e3 * each, 3) for each in times],
        "samples_per_second": round(step.batch_size / seconds),
        "loss": float(total) * ranks.num_ranks / step.batch_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=list(MODULES))
    parser.add_argument("--table-rows", type=int, default=1_000_000)
    parser.add_argument("--embedding-dim", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=65536)
    parser.add_argument("--optimizers", nargs="+", default=["adagrad"], choices=["sgd", "adagrad"])
    parser.add_argument("--precisions", nargs="+", default=["bfloat16"], choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--compiled", action="store_true", help="the dense layers, by XLA and by torch.compile")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="whole_step", help="name of the result file; empty: write none")
    args = parser.parse_args()
    ranks: Ranks = importlib.import_module(f"benchmarks.subjects.{MODULES[args.framework]}").Ranks()
    reports = []
    for precision in args.precisions:
        for optimizer in args.optimizers:
            step = Step(
                data=pathlib.Path(),
                batch_size=args.batch_size,
                seed=args.seed,
                embedding_dim=args.embedding_dim,
                max_table_rows=args.table_rows,
                precision=precision,
                optimizer=optimizer,
                compiled=args.compiled,
            )
            figures = measure(ranks, step, args.framework, args.repeat, args.rounds)
            ranks.release()
            reports.append({"optimizer": optimizer, "precision": precision, "compiled": args.compiled, **figures})
            if ranks.rank == 0:
                compiled = " compiled" if args.compiled else ""
                print(
                    f"{args.framework} {ranks.num_ranks} GPUs {optimizer} {precision}{compiled}: {figures}", flush=True
                )
    if ranks.rank == 0 and args.output:
        kind = f"{args.framework}-compiled" if args.compiled else args.framework
        harness.keep_run(args.output, kind, ranks, reports=reports)


if __name__ == "__main__":
    main()
