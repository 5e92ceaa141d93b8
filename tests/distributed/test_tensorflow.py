# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow frontend on 1 to 4 ranks under horovodrun; see tensorflow_worker.py for the checks themselves."""

import pathlib

import launching
import pytest
from tensorflow_checks import CHECKS, LOOKUPS, ON_A_STRATEGY, ON_TWO_OF_A_STRATEGY

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

WORKER = pathlib.Path(__file__).with_name("tensorflow_worker.py")


# One launch for all checks of a world size: starting TensorFlow takes longer than they do.
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
    launching.checks(num_ranks, WORKER, CHECKS if pooling == "auto" else LOOKUPS, SOK_POOLING=pooling)


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_checks_on_the_workers_of_a_strategy(num_ranks):
    checks = ON_TWO_OF_A_STRATEGY if num_ranks == 2 else ON_A_STRATEGY
    launching.checks(num_ranks, WORKER, checks, start=launching.strategy_run, SOK_TEST_ENGINE="tensorflow")


@pytest.mark.parametrize(
    ("engine", "start"), [("horovod", launching.horovodrun), ("tensorflow", launching.strategy_run)]
)
def test_a_rank_that_raises_ends_the_job(engine, start):
    status, output = start(2, [WORKER, "crash"], timeout=180, SOK_TEST_ENGINE=engine)  # a hang is an AssertionError
    assert status != 0
    assert "ValueError: the reader of the last rank found no file" in output


LEAVING = """
import multiprocessing.util, pathlib, sys, time
import tensorflow as tf
import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import communication

strategy = tf.distribute.MultiWorkerMirroredStrategy()
sok.init(comm_tool="tensorflow")
folder = pathlib.Path(sys.argv[1])


def note(what):
    (folder / f"{what}{sok.rank()}").write_text(repr(time.time()))


multiprocessing.util.Finalize(None, note, args=("left",), exitpriority=-1)  # after those that are due
communication.allreduce(tf.constant(1.0))
if sok.rank() == 0:
    time.sleep(3)
note("done")
"""


def test_workers_of_a_strategy_stay_while_others_may_fetch_from_them(tmp_path):
    status, output = launching.strategy_run(2, ["-c", LEAVING, tmp_path], timeout=180)
    assert status == 0, output
    done, left = ([float((tmp_path / f"{what}{rank}").read_text()) for rank in (0, 1)] for what in ("done", "left"))
    assert done[1] < done[0] - 1 and left[1] > done[0], (done, left)
