# SPDX-License-Identifier: Apache-2.0
"""The PyTorch frontend over NCCL, a GPU a rank; see torch_gpu_worker.py for the checks themselves."""

import os
import pathlib
import subprocess
import sys
import time

import launching
import many_rows
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

WORKER = pathlib.Path(__file__).with_name("torch_gpu_worker.py")
CHECKS = (
    "equals_the_engine",
    "swap_counts",
    "training",
    "pooling",
    "bad_id",
    "faults_on_each_rank",
    "hybrid",
    "dynamic_tables",
    "tiers",
    "beside_ddp",
    "slow_peer",
    "shared_gpu",
    "restarts",
    "core_binding",
    "exit_at_once",
)


def run(check, num_ranks, folder, timeout=300, **variables):
    """[(exit status, output)] of each rank; variables: of the environment."""
    launching.need_gpus(num_ranks, torch.cuda.device_count())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **variables}
    ranks = []
    for rank in range(num_ranks):
        output = (folder / f"rank{rank}.log").open("w+")
        command = [sys.executable, str(WORKER), check, str(rank), str(num_ranks), str(folder)]
        ranks.append((subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment), output))
    deadline = time.monotonic() + timeout
    results = []
    for process, output in ranks:
        try:
            status = process.wait(max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = "hung"
        output.seek(0)
        results.append((status, output.read()))
        output.close()
    return results


def all_passed(check, results):
    """What the ranks that failed say comes first: the others were told by them."""
    failed = [status != 0 or f"passed {check} " not in output for status, output in results]
    by_cause = sorted(range(len(results)), key=lambda rank: (not failed[rank], "PeerError" in results[rank][1]))
    told = [f"rank {rank}, exit status {results[rank][0]}:\n{results[rank][1]}" for rank in by_cause]
    assert not any(failed), "\n".join(told)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_checks(check, num_ranks, tmp_path):
    all_passed(check, run(check, num_ranks, tmp_path))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_many_rows(num_ranks, tmp_path):
    devices = range(torch.cuda.device_count())
    ranks_a_gpu = -(-num_ranks // max(1, len(devices)))
    needed = ranks_a_gpu * many_rows.MEMORY
    if any(torch.cuda.get_device_properties(device).total_memory < needed for device in devices):
        pytest.skip(f"needs GPUs with {needed >> 30} GiB")
    all_passed("many_rows", run("many_rows", num_ranks, tmp_path))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("check", ["training", "bad_id", "faults_on_each_rank", "beside_ddp", "dead_peer_in_backward"])
def test_pooled_at_the_owner(check, num_ranks, tmp_path):
    results = run(check, num_ranks, tmp_path, SOK_POOLING="owner")
    if check == "dead_peer_in_backward":
        assert results.pop()[0] == -9
    all_passed(check, results)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("check", ["dead_peer", "dead_peer_in_backward"])
def test_a_dead_peer_is_an_error(check, num_ranks, tmp_path):
    results = run(check, num_ranks, tmp_path)
    assert results[-1][0] == -9, results[-1][1]
    all_passed(check, results[:-1])
