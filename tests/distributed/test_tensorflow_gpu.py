# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow frontend over NCCL, a GPU a rank, under horovodrun; see tensorflow_gpu_worker.py for the checks."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from sparse_operation_kit import core

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")
pytestmark = pytest.mark.gpu

WORKER = pathlib.Path(__file__).with_name("tensorflow_gpu_worker.py")
CHECKS = ("equals_the_engine", "training", "across_functions", "bad_id", "collectives", "slow_peer")


# The checks of tensorflow_worker.py, which run on CPUs too.
COMMON = (
    "lookups",
    "training",
    "initial_rows",
    "raise_together",
    "raise_together_about_batches",
    "across_functions",
    "table_io",
    "collectives",
    "graph_session",
    "unlooked",
    "compiled_op_names",
    "tf_keras_fit",
    "keras_fit",
    "keras_scaled_fit",
    "ranks_that_differ",
    "what_travels",
    "long_and_short_bags",
    "gradients_that_are_used",
)


def run(num_ranks, *checks, timeout=600, worker=WORKER, **variables):
    """(exit status, output) of the worker under horovodrun; variables: of the environment."""
    if core.cuda_device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    launcher = shutil.which("horovodrun", path=path)
    start = [launcher] if launcher else ["-m", "horovod.runner.launch"]
    command = [sys.executable, *start, "-np", str(num_ranks), sys.executable, str(worker), *checks]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "SOK_TEST_DEVICE": "gpu", **variables},
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_checks(check, num_ranks):
    status, output = run(num_ranks, check)
    assert status == 0 and f"passed {check} " in output, output


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("pooling", ["auto", "owner"])
def test_what_cpus_do(num_ranks, pooling):
    """One launch: starting TensorFlow takes longer than the checks."""
    worker = WORKER.with_name("tensorflow_worker.py")
    status, output = run(num_ranks, *COMMON, worker=worker, SOK_POOLING=pooling)
    assert [check for check in COMMON if f"passed {check} " in output] == list(COMMON), output
    assert status == 0, output


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_dead_peer_ends_the_job(num_ranks):
    start = time.monotonic()
    status, output = run(num_ranks, "dead_peer", timeout=180)
    assert status != 0, output
    assert "AssertionError" not in output, output
    assert time.monotonic() - start < 120
