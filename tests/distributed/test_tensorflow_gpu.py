# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow frontend over NCCL, a GPU a rank, under horovodrun; see tensorflow_gpu_worker.py for the checks."""

import pathlib
import time

import launching
import pytest
import tensorflow_checks

from sparse_operation_kit import core

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")
pytestmark = pytest.mark.gpu

WORKER = pathlib.Path(__file__).with_name("tensorflow_gpu_worker.py")
CHECKS = (
    *("equals_the_engine", "training", "across_functions", "bad_id", "tiers", "reductions", "collectives"),
    "slow_peer",
)
HYBRID = (
    *("all_groups_and_kinds", "random_models", "own_inputs", "planned", "unequal_columns"),
    *("wrong_ids", "custom_layers", "fit", "without_combiner"),
)


def need(num_ranks):
    launching.need_gpus(num_ranks, core.cuda_device_count())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_checks(num_ranks):
    """One launch for all, here and below: starting TensorFlow takes longer than the checks."""
    need(num_ranks)
    launching.checks(num_ranks, WORKER, CHECKS)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("pooling", ["auto", "owner"])
def test_what_cpus_do(num_ranks, pooling):
    need(num_ranks)
    worker = WORKER.with_name("tensorflow_worker.py")
    checks = tensorflow_checks.CHECKS if pooling == "auto" else tensorflow_checks.LOOKUPS
    launching.checks(num_ranks, worker, checks, SOK_POOLING=pooling, SOK_TEST_DEVICE="gpu")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hybrid(num_ranks):
    need(num_ranks)
    launching.checks(num_ranks, WORKER.with_name("tensorflow_hybrid.py"), HYBRID, SOK_TEST_DEVICE="gpu")


def test_the_workers_of_a_strategy():
    if core.cuda_device_count() < 2:
        pytest.skip("needs 2 GPUs")  # TensorFlow's own collectives take one a worker
    worker, checks = WORKER.with_name("tensorflow_worker.py"), tensorflow_checks.ON_TWO_OF_A_STRATEGY
    environment = {"SOK_TEST_ENGINE": "tensorflow", "SOK_TEST_DEVICE": "gpu"}
    launching.checks(2, worker, checks, start=launching.strategy_run, **environment)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_dead_peer_ends_the_job(num_ranks, tmp_path):
    need(num_ranks)
    start = time.monotonic()
    status, output = launching.horovodrun(num_ranks, [WORKER, "dead_peer"], timeout=180, TEST_FOLDER=tmp_path)
    assert status != 0, output
    assert (tmp_path / "killed").is_file(), f"the job ended before its last rank was killed\n{output}"
    assert "AssertionError" not in output, output
    assert time.monotonic() - start < 120
