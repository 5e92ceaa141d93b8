# SPDX-License-Identifier: Apache-2.0
"""What `checking` makes of checks that fail on all ranks, on one, and of those in which the others are left waiting."""

import os
import pathlib
import subprocess
import sys

import checking

WORKER = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import checking
rank, names = int(sys.argv[2]), sys.argv[3:]
checking.PATIENCE = 0.5
def good(): pass
def bad_everywhere(): raise ValueError("everybody is wrong")
def bad_on_one():
    if rank == 1: raise ValueError("one is wrong")
def left_waiting():
    if rank == 1: raise ValueError("one has gone")
    print("inside", flush=True)
    time.sleep(600)
recovered = []
passed = checking.run(names, globals().get, rank, 2, lambda: recovered.append(rank))
print("recovered", len(recovered), flush=True)
sys.exit(0 if passed else 1)
"""


def start(folder, rank, names):
    command = [sys.executable, "-c", WORKER, str(pathlib.Path(checking.__file__).parent), str(rank), *names]
    environment = {key: value for key, value in os.environ.items() if key != "TEST_FOLDER"}
    if folder is not None:
        environment["TEST_FOLDER"] = str(folder)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def run(folder, names):
    """(exit statuses, outputs, how the checks ended) of two ranks."""
    ranks = [start(folder, rank, names) for rank in range(2)]
    outputs = []
    for rank in reversed(ranks):  # rank 0 may be waiting for ever
        outputs.insert(0, rank.communicate(timeout=60)[0] if not outputs or "stopped" not in outputs[0] else "")
    for rank in ranks:
        rank.kill()
        rank.communicate()
    return [rank.returncode for rank in ranks], outputs, checking.ended(folder, names)


def test_all_pass(tmp_path):
    statuses, outputs, ends = run(tmp_path, ["good"])
    assert statuses == [0, 0] and ends == {"good": "passed"}
    for rank, output in enumerate(outputs):
        assert f"begins good (rank {rank})" in output and "passed good in " in output


def test_a_failed_check_does_not_end_the_others(tmp_path):
    names = ["bad_everywhere", "bad_on_one", "good"]
    statuses, outputs, ends = run(tmp_path, names)
    assert statuses == [1, 1]
    assert ends == {
        "bad_everywhere": "failed on ranks [0, 1]",
        "bad_on_one": "failed on ranks [1]",
        "good": "passed",
    }
    assert "ValueError: one is wrong" in outputs[1] and "ValueError: one is wrong" not in outputs[0]
    for output in outputs:
        assert "ValueError: everybody is wrong" in output and "passed good in " in output
        assert "recovered 2" in output and "passed bad_on_one" not in output


def test_who_does_not_come_ends_the_job(tmp_path):
    names = ["good", "left_waiting", "bad_on_one"]
    statuses, outputs, ends = run(tmp_path, names)
    assert statuses[1] == 1
    assert "ValueError: one has gone" in outputs[1]
    assert "stopped in left_waiting: it failed, and ranks [0] do not come to its end" in outputs[1]
    assert ends == {
        "good": "passed",
        "left_waiting": "failed on ranks [1], not ended on ranks [0]",
        "bad_on_one": "not reached",
    }


def test_who_is_ended_says_where_it_was():
    rank = start(None, 0, ["left_waiting"])
    while "inside" not in rank.stdout.readline():
        assert rank.poll() is None
    rank.terminate()
    output = rank.communicate(timeout=60)[0]
    assert rank.returncode != 0 and "in left_waiting" in output, output


def test_a_hang_is_named(tmp_path):
    for news in ("0.0.begun", "0.0.passed", "0.1.begun", "0.1.passed", "1.0.begun", "1.1.begun", "1.1.passed"):
        (tmp_path / news).touch()
    ends = checking.ended(tmp_path, ["a", "b", "c"])
    assert ends == {"a": "passed", "b": "not ended on ranks [0]", "c": "not reached"}


def test_without_a_folder_errors_are_raised():
    rank = start(None, 0, ["bad_everywhere", "good"])
    output = rank.communicate(timeout=60)[0]
    assert rank.returncode == 1 and "ValueError: everybody is wrong" in output and "begins good" not in output
