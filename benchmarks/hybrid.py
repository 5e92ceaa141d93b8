# SPDX-License-Identifier: Apache-2.0
"""Training steps of DistributedEmbedding on several ranks, placed by each strategy and by the planner, beside
lookup_sparse of the same tables and batches, and TorchRec with its planner.

    torchrun --nproc-per-node 2 -m benchmarks.hybrid torch
    horovodrun -np 2 python -m benchmarks.hybrid tensorflow

Figures are taken as benchmarks.distributed takes them. Beside those of a layer is what its report() estimates for the
batch. Results go to results/hybrid.json, by framework and number of ranks. With --rows or --batch, for a trial on a
CPU, nothing is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
from typing import Any

from benchmarks import harness
from benchmarks.cases import PLAIN, Case
from benchmarks.distributed import MODULES, Ranks, measure

LAYOUTS = ("basic", "memory_balanced", "memory_optimized", "columns", "rows", "planned")


def options_of(layout: str, case: Case, num_ranks: int) -> dict[str, Any]:
    """What a DistributedEmbedding takes for a layout: all tables in columns on all ranks, by rows, or by a strategy."""
    size = case.rows * case.dimension
    if layout == "columns":
        return {"strategy": "memory_balanced", "column_slice_threshold": size / num_ranks}
    return {"row_slice_threshold": size} if layout == "rows" else {"strategy": layout}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MODULES)
    parser.add_argument("--cases", nargs="+", default=["A", "A-zipf", "B", "B-zipf"], choices=sorted(PLAIN))
    parser.add_argument("--optimizers", nargs="+", default=["sgd"], choices=["sgd", "adagrad", "adam"])
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--peers", nargs="*", default=["TorchRec, planner"], help="of benchmarks.distributed")
    parser.add_argument("--rows", type=int, help="of a table, in place of the case's")
    parser.add_argument("--batch", type=int, help="of all ranks, in place of the case's")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ranks: Ranks = importlib.import_module(f"benchmarks.subjects.{MODULES[args.what]}").Ranks()
    sizes = {name: given for name, given in (("rows", args.rows), ("batch", args.batch)) if given}
    reports = []
    for name in args.cases:
        case = dataclasses.replace(PLAIN[name], **sizes)
        for optimizer in args.optimizers:
            makers = dict(ranks.placements())
            makers.update((name, maker) for name, maker in ranks.peers().items() if name in args.peers)
            for layout in args.layouts:
                options = options_of(layout, case, ranks.num_ranks)
                makers[f"layer, {layout}"] = functools.partial(ranks.layer, options=options)
            subjects = measure(ranks, case, optimizer, makers, args.repeat, args.rounds, args.seed)
            reports.append({"case": name, "optimizer": optimizer, "subjects": subjects})
    if ranks.rank == 0 and not sizes:
        harness.keep_run("hybrid", args.what, ranks, reports=reports)


if __name__ == "__main__":
    main()
