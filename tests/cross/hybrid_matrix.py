# SPDX-License-Identifier: Apache-2.0
"""What test_hybrid_checkpoint.py and its workers share: a layer's tables, ways to place them, batches.

A worker defines `Frontend` and calls `main FOLDER ACTION ...`, on every rank. Actions:
  write:NAME:PLACEMENT:OPTIMIZER       trains HALF steps from known rows, then dumps
  read:FROM:NAME:PLACEMENT:OPTIMIZER   loads, dumps again as it is, trains on and keeps the tables
  changes:NAME:PLACEMENT:OPTIMIZER     trains STEPS steps from known rows, an increment after each, keeps the tables
  follow:FROM:NAME:PLACEMENT:OPTIMIZER applies these to zeros and keeps the tables
"""

import pathlib
import sys

import numpy as np

TABLES = [(21, 6), (7, 4), (12, 6), (5, 9), (16, 4), (9, 6)]
HALF, STEPS, BATCH = 2, 4, 12
RATE = 0.0625

PLACEMENTS = {
    "basic": {"strategy": "basic"},
    "columns": {"strategy": "memory_optimized", "column_slice_threshold": 30},
    "groups": {
        "strategy": "memory_balanced",
        "data_parallel_threshold": 28,
        "row_slice_threshold": 100,
        "column_slice_threshold": 50,
    },
    "rows": {"row_slice_threshold": 1},
    "replicated": {"data_parallel_threshold": 1000},
    "planned": {"strategy": "planned"},
    "mixed": {  # constraints of a plan
        0: {"choices": ["columns"]},
        1: {"choices": ["rows"]},
        2: {"choices": ["whole"]},
        3: {"choices": ["columns"], "on_host": True},
        4: {"choices": ["replicated"]},
        5: {"choices": ["rows"], "on_host": True},
    },
}


def options_of(placement, plan):
    options = PLACEMENTS[placement]
    return {"strategy": plan(options)} if placement == "mixed" else options


def first_rows():
    rng = np.random.default_rng(8)
    return [rng.normal(size=shape).astype(np.float32) for shape in TABLES]


def batch(step, rank, num_ranks):
    """This rank's part: for each table ids [b, 2], and upstream gradients of the global mean loss times the ranks."""
    rng = np.random.default_rng([step, 5])
    share = slice(BATCH * rank // num_ranks, BATCH * (rank + 1) // num_ranks)
    ids = [rng.integers(0, rows, (BATCH, 2))[share] for rows, _ in TABLES]
    return ids, [num_ranks * rng.normal(size=(BATCH, width))[share].astype(np.float32) for _, width in TABLES]


def keep(path, layer, rank):
    """Its tables."""
    tables = layer.get_weights()
    if rank == 0:
        np.savez(path, *tables)


def main(frontend):
    folder = pathlib.Path(sys.argv[1])
    for action in sys.argv[2:]:
        kind, *names, placement, optimizer = action.split(":")
        layer = frontend.layer(placement)
        trained = frontend.optimizer(optimizer, layer)
        layer.set_weights(first_rows())
        if kind == "write":
            for step in range(HALF):
                frontend.step(layer, trained, *batch(step, frontend.rank, frontend.num_ranks))
            frontend.sok.dump(folder / names[0], layer, trained)
        elif kind == "changes":
            changes = frontend.sok.increments(layer)
            for step in range(STEPS):
                frontend.step(layer, trained, *batch(step, frontend.rank, frontend.num_ranks))
                changes.save(folder / f"{names[0]}-{step}")
            keep(folder / f"{names[0]}.npz", layer, frontend.rank)
        elif kind == "follow":
            layer.set_weights([np.zeros(shape, np.float32) for shape in TABLES])
            following = frontend.sok.increments(layer)
            for step in range(STEPS):
                assert following.load(folder / f"{names[0]}-{step}")
            keep(folder / f"{names[1]}.npz", layer, frontend.rank)
        else:
            frontend.sok.load(folder / names[0], layer, trained)
            frontend.sok.dump(folder / names[1], frontend.listed(layer), trained)
            for step in range(HALF, STEPS):
                frontend.step(layer, trained, *batch(step, frontend.rank, frontend.num_ranks))
            keep(folder / f"{names[1]}.npz", layer, frontend.rank)
        if frontend.rank == 0:
            print(f"passed {action}", flush=True)
