# SPDX-License-Identifier: Apache-2.0
"""The tests of tests/core that ask what stages compute and refuse, run again with the stages on a GPU.

Left out: what is the CPU's own (instruction sets, thread pools, the host allocator), and argument checks, which come
before any device is asked (test_misuse).
"""

import pathlib

import gpu_suite
import pytest

MODULES = (
    "test_admission",
    "test_apply",
    "test_assign",
    "test_coordinates",
    "test_dynamic_table",
    "test_eviction",
    "test_expiry",
    "test_gather_combine",
    "test_hash_index",
    "test_initialize",
    "test_locate_gather",
    "test_multi_rank",
    "test_owner_pooling",
    "test_placement",
    "test_reduce",
    "test_route",
    "test_row_dtypes",
    "test_row_strides",
    "test_shrink",
    "test_stack",
    "test_stamps",
    "test_weight_gradient",
)

SKIPPED = {
    "test_the_first_bad_key_is_named_whatever_the_workers": "of several wrong keys a device names any (test_device.py)",
    "test_the_caller_is_not_asked_where_the_cpu_finds_wrong_contents": "a device finds them later (test_device.py)",
    "test_bad_row_splits_are_named_by_the_number_of_their_lookup": "a device names the table and the bag",
    "test_infinities_stay": "a step makes NaN of an infinite weight on a device (docs/ROADMAP.md)",
    "test_where_there_is_no_memory_nothing_changes": "the memory is the device's (test_table_memory.py)",
    "test_tables_that_share_memory": "each array gets device memory of its own here",
}

pytestmark = pytest.mark.usefixtures("on_device")


for _module in MODULES:
    gpu_suite.adopt(globals(), pathlib.Path(__file__).parents[1] / "core" / f"{_module}.py", SKIPPED)
