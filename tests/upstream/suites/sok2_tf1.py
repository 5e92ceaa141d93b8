# SPDX-License-Identifier: Apache-2.0
"""SparseOperationKit 2.x's function tests for TensorFlow 1.15, which make graphs, in a clone as of `sok2`."""

import sok2
from edits import GRAPHS, of
from run import Edit, Run

COMMIT = sok2.COMMIT
FOLDER = sok2.FOLDER

TESTS = sok2.TESTS.replace("tf2", "tf1")

TRACKED = Edit(
    r"^(    sess\.run\(init_op, .*\))$",
    r"\1\n    with sess.as_default():\n        sok.track_changes(sok_vars)",
    "the first dump gives the rows changed since, and not all",
)
SEED = Edit(
    r"^    sok\.init\(\)$",
    "    sok.init()\n    np.random.seed(0)",
    "each rank draws its tables' initial values, and its own reference has them",
)
VOCABULARY = Edit(r"1024 \* 128\b", "1024", "smaller tables, whose initial values are a list in the graph")


def run(name, *edits, **options):
    path = f"{TESTS}/{name}.py"
    return Run(name, path, edits=of(path, GRAPHS, *edits), **{"ranks": (1, 2), **options})


SIZES = (sok2.ROWS, sok2.ITERATIONS)

RUNS = [
    *(
        run(f"lookup/{name}", *SIZES)
        for name in (
            "all2all_dense_embedding_test",
            "lookup_sparse_distributed_test",
            "lookup_sparse_distributed_dynamic_test",
            "lookup_sparse_localized_test",
            "lookup_sparse_localized_dynamic_test",
        )
    ),
    run("lookup/lookup_sparse_distributed_hkv_test", *SIZES, sok2.CAPACITY),
    run("lookup/lookup_sparse_localized_hkv_test", *SIZES, sok2.CAPACITY),
    run("lookup/lookup_sparse_hkv_incremental_dump_test", sok2.ROWS, sok2.CAPACITY, sok2.PAUSES, TRACKED),
    run("lookup/sparse_read_evict", sok2.ROWS, sok2.IN1D, ranks=(1,)),
    run("lookup_sp_weight/lookup_sparse_distributed_test", *SIZES),
    run("lookup_sp_weight/lookup_sparse_distributed_dynamic_test", *SIZES),
    # They feed the second of two tables, and have one for each rank.
    run("lookup_sp_weight/lookup_sparse_localized_test", *SIZES, ranks=(2,)),
    run("lookup_sp_weight/lookup_sparse_localized_dynamic_test", *SIZES, SEED, ranks=(2,)),
    run("variable/filter_variables_test"),
    run("variable/sok_sgd_test", VOCABULARY, sok2.ROWS, sok2.STEPS, **sok2.ALONE),
    run("variable/assign_and_export_test", sok2.ASSIGNED, **sok2.ALONE),
    run("variable/dynamic_variable_test", VOCABULARY, sok2.ROWS, sok2.STEPS, **sok2.ALONE),
    run("variable/hkv_test", VOCABULARY, sok2.ROWS, sok2.STEPS, **sok2.ALONE),
]
