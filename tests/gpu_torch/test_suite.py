# SPDX-License-Identifier: Apache-2.0
"""The tests of tests/torch again, with tables, ids and gradients on a GPU.

Left out: what is the CPU's own (its threads and allocator), and what needs several processes (tests/distributed).
"""

import contextlib
import pathlib

import gpu_suite
import pytest
import torch

MODULES = (
    "test_checkpoint",
    "test_compile",
    "test_concat",
    "test_dynamic_calls",
    "test_dynamic_checkpoint",
    "test_dynamic_model",
    "test_dynamic_policies",
    "test_dynamic_saving",
    "test_dynamic_variable",
    "test_embedding",
    "test_gradient",
    "test_hybrid",
    "test_incremental",
    "test_lookup",
    "test_ops",
    "test_optimizer",
    "test_own_optimizers",
    "test_row_dtypes",
    "test_saving",
    "test_stages",
    "test_table_io",
    "test_table_states",
    "test_variable",
    "test_wrapped_calls",
)

LATER = "on a GPU errors are raised later: test_device.py"
CPU = "about the CPU and its memory, or about the sources"
SKIPPED = {
    "test_errors_pass_through": LATER,
    "test_grad_scaler_of_narrow_rows": "PyTorch's GradScaler does not know bfloat16 on a GPU",
    "test_message_is_the_core_s": LATER,
    "test_lookup_in_another_thread": "the mirror's default device is that of one thread",
    "test_statuses_are_exhaustive": CPU,
    "test_threads_are_torch_s": CPU,
    "test_every_op_is_checked": CPU,
    "test_counts_are_swapped_on_a_gpu": CPU,
    "test_failed_ranks": CPU,
    "test_an_id_outside_an_embedding": "PyTorch asserts it on the device, which is of no use from then on",
    "test_on_a_cpu_there_are_no_deferred_errors": CPU,
    "test_a_dense_gradient_that_a_user_sets": "it has more rows than the table shows once its host has heard",
    "test_prefetching_on_a_cpu": CPU,
    "test_threads": CPU,
    "test_rows_of_other_keys_beside_a_thread": CPU,
    "test_a_table_that_is_gone_leaves_no_memory_behind": CPU,
    "test_keys_of_other_ranks": "it shuts down, and ranks with GPUs are in tests/distributed",
}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    SKIPPED["test_compiled_autograd"] = "before 2.13 PyTorch's fails of lookups in a graph (docs/ROADMAP.md)"

pytestmark = pytest.mark.usefixtures("mirrored")


def _adopt(module_name):
    import torch_mirror

    # What a module makes when it is imported is made as the tests make it.
    with torch_mirror.installed() if torch.cuda.is_available() else contextlib.nullcontext():
        path = pathlib.Path(__file__).parents[1] / "torch" / f"{module_name}.py"
        module = gpu_suite.adopt(globals(), path, SKIPPED)
    for name, value in vars(module).items():
        if hasattr(value, "_fixture_function") or hasattr(value, "_pytestfixturefunction"):
            globals()[name] = value


for _module in MODULES:
    _adopt(_module)
