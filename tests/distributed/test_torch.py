# SPDX-License-Identifier: Apache-2.0
"""The PyTorch frontend on 1 to 4 ranks under torchrun; see torch_worker.py for the checks themselves."""

import pathlib

import launching
import pytest

pytest.importorskip("torch")

WORKER = pathlib.Path(__file__).with_name("torch_worker.py")
POOLED = (
    "lookups",
    "training",
    "accumulation",
    "gradient_mean",
    "row_dtypes",
    "raise_together",
    "ddp",
    "distributed_optimizer",
    "incremental",
    "distributed_checkpoint",
    "side_by_side",
    "unequal_batches",
    "wrong_kinds",
    "grad_scaler",
    "refilled_buffers",
    "faults_on_each_rank",
    "dynamic_tables",
    "dynamic_table_io",
    "full_tables",
    "dynamic_models",
    "dynamic_dump",
    "dynamic_store",
    "stacks",
    "wrong_keys_of_members",
    "wrong_inputs_of_a_collection",
    "features_of_other_batches",
)
# What pools no bags, or chooses itself where.
OTHERS = (
    "initial_rows",
    "placement_of_rows",
    "table_io",
    "collectives",
    "compiled",
    "compiled_calls",
    "other_ranks",
    "dump_while_training",
    "exchanges",
    "ranks_that_differ",
    "what_travels",
    "long_and_short_bags",
    "gradients_that_are_used",
    "a_key_twice_in_one_bag",
    "single_ids_of_several_tables",
    "clipping",
    "clipping_of_uneven_ranks",
    "fully_sharded",
    "hybrid_models",
    "hybrid_at_random",
    "hybrid_compiled",
    "hybrid_own_inputs",
    "hybrid_planned",
    "hybrid_rows",
    "hybrid_wrong_inputs",
    "hybrid_changes",
    "hybrid_files",
)


def run(num_ranks, *checks, timeout=600, **variables):
    """(exit status, output) of the worker under torchrun, on a port of its own; variables: of the environment."""
    return launching.torchrun(num_ranks, [WORKER, *checks], timeout, **variables)


# One launch for all checks of a world size: starting the processes takes longer than most of them.
@pytest.mark.parametrize(
    ("num_ranks", "pooling"),
    [
        (1, "auto"),
        (2, "auto"),
        pytest.param(4, "auto", marks=pytest.mark.slow),
        pytest.param(3, "owner", marks=pytest.mark.slow),
    ],
)
def test_checks(num_ranks, pooling):
    checks = POOLED + OTHERS if pooling == "auto" else POOLED
    status, output = run(num_ranks, *checks, SOK_POOLING=pooling)
    passed = [check for check in checks if f"passed {check} " in output]
    assert passed == list(checks), output
    assert all(f"ended rank {rank}" in output for rank in range(num_ranks)), output
    assert status == 0, output


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("crash", "ValueError: the reader of the last rank found no file"),
        ("crash_in_backward", "ValueError: the loss of the last rank is not finite"),
        ("bad_key", "IndexError: table 'items': key 77 is outside [0, 10)"),
    ],
)
def test_a_rank_that_raises_ends_the_job(check, message):
    status, output = run(2, check, timeout=180)  # a hang ends in an AssertionError
    assert status != 0
    assert message in output
    if check == "bad_key":
        assert "PeerError: the lookup or the optimizer's step failed on rank 0" in output
