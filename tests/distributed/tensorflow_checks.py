# SPDX-License-Identifier: Apache-2.0
"""The checks of tensorflow_worker.py that test_tensorflow.py runs on the CPU and test_tensorflow_gpu.py on GPUs."""

CHECKS = (
    "lookups",
    "training",
    "initial_rows",
    "row_dtypes",
    "raise_together",
    "raise_together_about_batches",
    "faults_on_each_rank",
    "faults_in_a_function",
    "across_functions",
    "arguments",
    "exchanges",
    "table_io",
    "collectives",
    "graph_session",
    "unlooked",
    "compiled_op_names",
    "tf_keras_fit",
    "keras_fit",
    "keras_scaled_fit",
    "incremental",
    "checkpoints",
    "ranks_that_differ",
    "what_travels",
    "long_and_short_bags",
    "gradients_that_are_used",
    "concat",
    "control_flow",
    "dynamic_training",
    "dynamic_keys",
    "dynamic_policies",
    "dynamic_full",
)
# What pools no bags, or chooses itself where.
_OF_ONE_POOLING = {
    "initial_rows",
    "arguments",
    "table_io",
    "ranks_that_differ",
    "what_travels",
    "long_and_short_bags",
    "gradients_that_are_used",
    "concat",
    "dynamic_keys",
}
LOOKUPS = tuple(check for check in CHECKS if check not in _OF_ONE_POOLING)
