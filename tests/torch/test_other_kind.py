# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder again, with a kind of table that is the tests' own wherever they make a `sok.Variable`.

Left out: what takes slots for keys. A table's own tensor, its `.grad` as a tensor and torch.distributed.checkpoint's
entries are by slot, and only a static table's slots are its keys.
"""

import pathlib

import gpu_suite
import pytest
import torch_permuted

EVERY = None
MODULES = {
    "test_checkpoint": (
        "test_training_goes_on",
        "test_rows_of_16_bits",
        "test_before_the_first_step",
        "test_a_table_without_a_step_among_others",
        "test_one_table_and_rows_alone",
        "test_momentum_of_keras",
    ),
    "test_gradient": EVERY,
    "test_incremental": EVERY,
    "test_lookup": EVERY,
    "test_optimizer": (  # of the products of options one
        "test_touches_only_the_rows_of_the_step",
        "test_each_row_takes_its_own_steps",
        "test_sparse_adam_equals_torch",
        "test_plain_optimizers_take_tables",
        "test_state_dict_round_trip",
        "test_apply_gradients",
        "test_all_tables_go_to_one_apply",
    ),
    "test_own_optimizers": EVERY,
    "test_saving": EVERY,
    "test_table_io": EVERY,
    "test_table_states": EVERY,
}

SLOTS = "adds, sets, scales or reads a gradient as a tensor whose rows are keys"
COPIES = "slots of a table with an index are copies of its ids, whose memory may be used again"
PARTS = "torch.distributed.checkpoint's parts of a whole table are a static table's slots"
SKIPPED = {
    **dict.fromkeys(
        (
            "test_face_of_a_sparse_tensor",
            "test_autograd_grad",
            "test_dense_use_of_the_table_beside_a_lookup",
            "test_arithmetic",
            "test_scaling_a_copy_leaves_the_original",
            "test_clip_grad_norm",
            "test_hooks_see_and_change_it",
            "test_changes_in_place_are_kept",
            "test_data_of_a_gradient",
            "test_entries_of_different_scales",
            "test_grad_scaler_of_narrow_rows",
            "test_grad_scaler",
        ),
        SLOTS,
    ),
    "test_memory_reused_after_backward_is_noticed": COPIES,
    "test_ids_changed_between_forward_and_backward_are_noticed": COPIES,
    **dict.fromkeys(
        (
            "test_distributed_checkpoint",
            "test_a_shard_is_a_tensor",
            "test_sizes_of_what_is_saved",
            "test_tables_themselves_in_a_distributed_checkpoint",
            "test_states_are_the_same_whichever_way_a_step_took",
        ),
        PARTS,
    ),
}


@pytest.fixture(autouse=True)
def permuted():
    with torch_permuted.installed():
        yield


def _adopt(name, kept):
    tests = {}
    module = gpu_suite.adopt(tests, pathlib.Path(__file__).parent / f"{name}.py", SKIPPED)
    short = name.removeprefix("test_")
    for test, value in tests.items():
        if kept is EVERY or test.replace(f"test_{short}_", "test_") in kept:
            globals()[test] = value
    for fixture, value in vars(module).items():
        if hasattr(value, "_fixture_function") or hasattr(value, "_pytestfixturefunction"):
            globals()[fixture] = value


for _name, _kept in MODULES.items():
    _adopt(_name, _kept)
