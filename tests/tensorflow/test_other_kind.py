# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder again, with a kind of table that is the tests' own wherever they make a `sok.Variable`.

Left out: what takes slots for keys. A table's own tensor, its gradient as `tf.IndexedSlices` and what tf.Variable's
methods write are by slot, and only a static table's slots are its keys. That kind of table is on CPUs alone.
"""

import pathlib

import gpu_suite
import pytest
import tensorflow as tf
import tensorflow_permuted

EVERY = None
MODULES = {
    "test_checkpoint": (
        "test_training_goes_on",
        "test_before_the_first_step",
        "test_into_a_function_that_was_traced",
        "test_keras_variables_around_tables",
        "test_step_extra_and_what_the_optimizer_keeps",
        "test_one_table_and_rows_alone",
        "test_damage_changes_nothing",
    ),
    "test_concat": EVERY,
    "test_control_flow": EVERY,
    "test_gradient": EVERY,
    "test_incremental": (
        "test_the_first_call_gives_every_row",
        "test_steps",
        "test_a_traced_step_captures_one_resource_for_stamps",
        "test_stamps_go_with_their_table",
        "test_only_tracked_tables_are_asked",
        "test_a_copy_follows",
        "test_errors",
    ),
    "test_lookup": EVERY,
    "test_optimizer": (
        "test_fused_equal_their_own",
        "test_others_run_on_rows",
        "test_dense_variables_that_come_later",
        "test_what_cannot_be_done_is_said",
    ),
    "test_row_dtypes": ("test_initial_rows_are_those_of_float32_rounded", "test_assign_and_export"),
    "test_saving": EVERY,
    "test_table_io": EVERY,
}

SLOTS = "reads the table, its gradient or a state as a tensor whose rows are keys"
GRAPHS = "makes tables in a graph of tf.compat.v1"
SKIPPED = {
    **dict.fromkeys(
        (
            "test_tape_gives_pending_gradients",
            "test_gradients_that_are_read",
            "test_as_in_eager_mode",
            "test_a_bare_table",
            "test_a_whole_table_is_taken",
            "test_keras_weights_of_other_ranks",
            "test_a_saved_model_is_whole",
            "test_scaled_gradients_cost_nothing_until_they_are_read",
            "test_what_the_update_waits_for_its_inputs_do_not",
        ),
        SLOTS,
    ),
    **dict.fromkeys(("test_in_a_graph_of_tf1", "test_in_a_graph"), GRAPHS),
}


@pytest.fixture(autouse=True, params=["cpu"])
def device(request):
    with tf.device("cpu:0"):
        yield request.param


@pytest.fixture(autouse=True)
def permuted(device):
    with tensorflow_permuted.installed():
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
