# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow frontend on 1 to 4 ranks under horovodrun; see tensorflow_worker.py for the checks themselves."""

import pathlib

import launching
import pytest
from tensorflow_checks import CHECKS, LOOKUPS

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

WORKER = pathlib.Path(__file__).with_name("tensorflow_worker.py")


# One launch for all checks of a world size: starting TensorFlow takes longer than they do.
@pytest.mark.parametrize(
    ("num_ranks", "pooling"), [(1, "auto"), (2, "auto"), (4, "auto"), (2, "owner"), (3, "owner"), (4, "owner")]
)
def test_checks(num_ranks, pooling):
    checks = CHECKS if pooling == "auto" else LOOKUPS
    launching.horovod_checks(num_ranks, WORKER, checks, SOK_POOLING=pooling)


def test_a_rank_that_raises_ends_the_job():
    status, output = launching.horovodrun(2, [WORKER, "crash"], timeout=180)  # a hang ends in an AssertionError
    assert status != 0
    assert "ValueError: the reader of the last rank found no file" in output
