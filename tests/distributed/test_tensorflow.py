# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow frontend on 1 to 4 ranks under horovodrun; see tensorflow_worker.py for the checks themselves."""

import pathlib

import launching
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

WORKER = pathlib.Path(__file__).with_name("tensorflow_worker.py")
CHECKS = (
    "lookups",
    "training",
    "initial_rows",
    "row_dtypes",
    "raise_together",
    "raise_together_about_batches",
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
)
# Of these what pools bags.
LOOKUPS = (
    "lookups",
    "training",
    "row_dtypes",
    "raise_together",
    "raise_together_about_batches",
    "across_functions",
    "exchanges",
    "collectives",
    "graph_session",
    "unlooked",
    "compiled_op_names",
    "tf_keras_fit",
    "keras_fit",
    "keras_scaled_fit",
    "incremental",
    "checkpoints",
)


def run(num_ranks, *checks, timeout=600, **variables):
    """(exit status, output) of the worker under horovodrun; variables: of the environment."""
    return launching.horovodrun(num_ranks, [WORKER, *checks], timeout, **variables)


# One launch for all checks of a world size: starting TensorFlow takes longer than they do.
@pytest.mark.parametrize(
    ("num_ranks", "pooling"), [(1, "auto"), (2, "auto"), (4, "auto"), (2, "owner"), (3, "owner"), (4, "owner")]
)
def test_checks(num_ranks, pooling):
    checks = CHECKS if pooling == "auto" else LOOKUPS
    status, output = run(num_ranks, *checks, SOK_POOLING=pooling)
    passed = [check for check in checks if f"passed {check} " in output]
    assert passed == list(checks), output
    assert status == 0, output


def test_a_rank_that_raises_ends_the_job():
    status, output = run(2, "crash", timeout=180)  # a hang ends in an AssertionError
    assert status != 0
    assert "ValueError: the reader of the last rank found no file" in output
