# SPDX-License-Identifier: Apache-2.0
"""SparseOperationKit 2.x's function tests for TensorFlow 2 and its examples, smaller.

They are in a clone of https://github.com/NVIDIA-Merlin/HugeCTR. Those of lookups, of dump and load, and the examples
run on one and on two ranks by horovodrun; those of variables are single processes.
"""

from edits import of
from run import Edit, Run

COMMIT = "2f2016fa897916717d7193c4c1b5f4f5701bff4b"
FOLDER = "sparse_operation_kit"

TESTS = "sparse_operation_kit/sparse_operation_kit/test/function_test/tf2"

# Sizes. The scripts leave the first five iterations out of their times, and need one more.
ROWS = Edit(r"\b(8192|65536)\b", "1024", "smaller tables and batches")
ITERATIONS = Edit(r"^    iters = 100$", "    iters = 8", "fewer iterations")
CAPACITY = Edit(r"1024 \* 1024\b", "16 * 1024", "smaller tables")
BIG_ROWS = Edit(r"\b819200\b", "1024", "a smaller table")
VOCABULARY = Edit(r"1024 \* 128\b", "1024 * 4", "smaller tables")
STEPS = Edit(r"range\(100\)", "range(10)", "fewer iterations")
ASSIGNED = Edit(r"vocab_size = 1023 \* 1024 \* 2", "vocab_size = 1023 * 16", "a smaller table")
PAUSES = Edit(r"^    sleep_seconds = 15$", "    sleep_seconds = 1", "shorter pauses")

# What docs/MIGRATING.md says.
IN1D = Edit(r"np\.in1d\(", "np.isin(", "NumPy 2.4 has no in1d")
TRACKED = Edit(
    r'^(    print\("HKV var created"\))$',
    r"\1\n    sok.track_changes(sok_vars)",
    "the first dump gives the rows changed since, and not all",
)
LEGACY = Edit(
    r"tf\.optimizers\.(?!legacy)(\w+)\(",
    r"tf.optimizers.legacy.\1(",
    "without sok.init() they are tf_keras's own, which move all rows of the reference by their momentum",
)


def run(name, *edits, folder=TESTS, **options):
    path = f"{folder}/{name}.py"
    return Run(name, path, edits=of(path, *edits), **{"ranks": (1, 2), **options})


BATCHES = Edit(r'(args\["global_batch_size"\] = )1024', r"\g<1>64", "smaller batches")

EXAMPLES = "sparse_operation_kit"  # which has a folder `example`
ALONE = {"ranks": (1,), "start": "python"}

RUNS = [
    *(
        run(f"lookup/{name}", ROWS, ITERATIONS)
        for name in (
            "all2all_dense_embedding_test",
            "lookup_sparse_distributed_test",
            "lookup_sparse_distributed_dynamic_test",
            "lookup_sparse_distributed_dynamic_test_without_redefine",
            "lookup_sparse_localized_test",
            "lookup_sparse_localized_dynamic_test",
        )
    ),
    run("lookup/lookup_sparse_distributed_hkv_test", ROWS, ITERATIONS, CAPACITY),
    run("lookup/lookup_sparse_localized_hkv_test", ROWS, ITERATIONS, CAPACITY),
    run("lookup/lookup_sparse_hkv_low_frequency_test", ROWS, CAPACITY),
    run("lookup/lookup_sparse_hkv_incremental_dump_test", ROWS, CAPACITY, PAUSES, TRACKED),
    # On two ranks it looks for samples of the whole batch in the half that its rank has.
    run("lookup/lookup_sparse_distributed_dynamic_with_sample_key_zero_test", ROWS, ranks=(1,)),
    # Each rank would evict keys of the other.
    run("lookup/sparse_read_evict", ROWS, IN1D, ranks=(1,)),
    *(
        run(f"lookup_sp_weight/{name}", ROWS, ITERATIONS)
        for name in (
            "lookup_sparse_distributed_test",
            "lookup_sparse_distributed_dynamic_test",
            "lookup_sparse_localized_test",
            "lookup_sparse_localized_dynamic_test",
        )
    ),
    *(
        run(f"dump_load/{name}", ROWS, ITERATIONS)
        for name in (
            "dump_load_distribute_static",
            "dump_load_distribute_dynamic",
            "dump_load_localized_static",
            "dump_load_localized_dynamic",
        )
    ),
    run("dump_load/dump_load_distribute_static_big_table", ROWS, ITERATIONS, BIG_ROWS),
    run("variable/filter_variables_test"),
    run("variable/sok_sgd_test", VOCABULARY, ROWS, STEPS, **ALONE),
    run("variable/assign_and_export_test", ASSIGNED, **ALONE),
    run("variable/assign_and_export_hkv_test", **ALONE),
    run("variable/dynamic_variable_test", VOCABULARY, ROWS, STEPS, LEGACY, **ALONE),
    run("variable/hkv_test", VOCABULARY, ROWS, STEPS, **ALONE),
    run("example/sok_dump_load/dump_load", ROWS, ITERATIONS, CAPACITY, folder=EXAMPLES),
    run("example/sok_incremental_dump/incremental_dump_test", ROWS, CAPACITY, PAUSES, TRACKED, folder=EXAMPLES),
    run("example/sok_train_hps_inference/sok_train", BATCHES, folder=EXAMPLES),
]
