# SPDX-License-Identifier: Apache-2.0
"""The communicator without a GPU: the core's own code over a fake device and a fake NCCL; communicator_worker.py holds
the checks of several ranks. tests/distributed runs it over NCCL itself."""

import ctypes
import os
import pathlib
import subprocess
import sys
import time

import pytest

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _library

WORKER = pathlib.Path(__file__).with_name("communicator_worker.py")
WORKERS = {
    name: WORKER.with_name(f"communicator_{name}s.py") for name in ("swap", "reduction")
}  # by their checks' names


def environment(libraries, folder, **more):
    fake_core, nccl = libraries
    names = {"SOK_CORE_LIBRARY": fake_core, "SOK_NCCL_LIBRARY": nccl, "FAKE_NCCL_FOLDER": folder}
    return {**os.environ, **{name: str(path) for name, path in names.items()}, "TEST_FOLDER": str(folder), **more}


def run(libraries, folder, check, num_ranks=2, timeout=120, **more):
    """[(status, output)] of each rank."""
    worker = next((path for name, path in WORKERS.items() if name in check), WORKER)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), check, str(rank), str(num_ranks)],
            env=environment(libraries, folder, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        return [(rank.wait(timeout), rank.stdout.read()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.stdout.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "check", ["exchanges", "raw_exchange", "many_threads", "swap_counts", "swap_errors", "reductions"]
)
def test_exchanges(libraries, tmp_path, check, num_ranks):
    for status, output in run(libraries, tmp_path, check, num_ranks):
        assert status == 0 and "passed" in output, output


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_nothing_to_send(libraries, tmp_path, num_ranks):
    for status, output in run(libraries, tmp_path, "nothing_to_send", num_ranks):
        assert status == 0 and "passed" in output, output


@pytest.mark.parametrize(
    "check",
    [
        "large_parts",
        "wrong_arguments",
        "wrong_reductions",
        "wrong_swaps",
        "swap_of_a_failed_rank",
        "failing_call",
        "broken_device",
        "fork",
        "late_peer",
    ],
)
def test_two_ranks(libraries, tmp_path, check):
    for status, output in run(libraries, tmp_path, check):
        assert status == 0 and "passed" in output, output


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("check", ["dead_peer", "swap_of_a_dead_peer"])
def test_a_dead_peer_is_named(libraries, tmp_path, check, num_ranks):
    results = run(libraries, tmp_path, check, num_ranks)
    assert results[-1][0] == -9
    for status, output in results[:-1]:
        assert status == 0 and "passed" in output, output


@pytest.mark.parametrize(
    ("check", "more"),
    [
        ("time_limit", {"SOK_NCCL_TIMEOUT": "5"}),
        ("swap_behind_what_never_ends", {"SOK_NCCL_TIMEOUT": "5"}),
        ("async_error", {}),
        ("call_that_hangs", {}),
        ("first_call_that_hangs", {}),
    ],
)
def test_the_second_rank_gets_an_error(libraries, tmp_path, check, more):
    (first, _), (status, output) = run(libraries, tmp_path, check, **more)
    assert first == 0
    assert status == 0 and "passed" in output, output


def test_abort(libraries, tmp_path):
    for status, output in run(libraries, tmp_path, "abort"):
        assert status == 0 and "passed" in output, output


def test_a_process_ends_without_close(libraries, tmp_path):
    results = run(libraries, tmp_path, "exit_without_close")
    assert [status for status, _ in results] == [7, 7], results


PROGRAM = "from sparse_operation_kit import core; print(core.nccl_properties(), core.Communicator.make_id()[:4])"


def run_program(libraries, folder, program=PROGRAM, **more):
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(libraries, folder, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_properties(libraries, tmp_path):
    status, output = run_program(libraries, tmp_path)
    assert status == 0, output
    assert "version=22803" in output and str(libraries[1]) in output


def test_a_library_that_is_not_there(libraries, tmp_path):
    status, output = run_program(libraries, tmp_path, SOK_NCCL_LIBRARY=str(tmp_path / "none.so"))
    assert status != 0
    assert "OSError: SOK_NCCL_LIBRARY names no library" in output and "none.so" in output


def test_no_nccl_anywhere(libraries, tmp_path):
    """The dynamic linker finds none, nor do NVIDIA's packages bring one."""
    program = (
        "from sparse_operation_kit.core import communicator\ncommunicator.packaged_nccl = lambda: None\n" + PROGRAM
    )
    status, output = run_program(libraries, tmp_path, program, SOK_NCCL_LIBRARY="")
    if status == 0:
        pytest.skip("this system has an NCCL")
    assert "OSError: NCCL was not found" in output
    assert "pip install nvidia-nccl" in output and "SOK_NCCL_LIBRARY" in output


def test_a_loaded_nccl_is_shared(libraries, tmp_path):
    """What the process has loaded is taken, from wherever it came."""
    program = f"import ctypes; ctypes.CDLL({str(libraries[1])!r})\n" + PROGRAM
    status, output = run_program(libraries, tmp_path, program, SOK_NCCL_LIBRARY="")
    assert status == 0, output
    assert str(libraries[1]) in output


def test_a_packaged_nccl_is_found(libraries, tmp_path):
    """NVIDIA's Python packages keep theirs where the dynamic linker does not look."""
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").symlink_to(libraries[1])
    program = "import ctypes\ntry:\n    ctypes.CDLL('libnccl.so.2')\nexcept OSError:\n    print('none')\n" + PROGRAM
    status, output = run_program(libraries, tmp_path, program, SOK_NCCL_LIBRARY="", PYTHONPATH=str(tmp_path))
    assert status == 0, output
    if "none" in output:
        assert "nvidia/nccl/lib/libnccl.so.2" in output


def test_an_old_nccl(libraries, tmp_path):
    for version, text in (("21602", "2.16.2"), ("2708", "2.7.8")):
        status, output = run_program(libraries, tmp_path, FAKE_NCCL_VERSION=version)
        assert status != 0
        assert f"is NCCL {text}, 2.17.0 or newer is needed" in output


def test_a_library_that_is_another(libraries, tmp_path):
    status, output = run_program(libraries, tmp_path, SOK_NCCL_LIBRARY=str(libraries[0]))
    assert status != 0
    assert "has no ncclGetVersion" in output


JOIN = """
from sparse_operation_kit import core
core.Communicator(0, core.Communicator.make_id(), 2, 0, timeout=1.0)
"""


def test_ranks_that_do_not_come(libraries, tmp_path):
    start = time.monotonic()
    status, output = run_program(libraries, tmp_path, JOIN, FAKE_NCCL_INIT="hang")
    assert status == 1, output
    assert "OSError: rank 0: not all of the 2 ranks joined the NCCL communicator within 1 s" in output
    assert time.monotonic() - start < 60


def test_nccl_refuses(libraries, tmp_path):
    status, output = run_program(libraries, tmp_path, JOIN, FAKE_NCCL_INIT="refuse")
    assert status == 1
    assert "cannot join the NCCL communicator of 2 ranks: invalid usage (5): the fake says so" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("id[:-1]", "id has 135 bytes"),
        ("bytes(136)", "not one that sok_communicator_id_create made"),
        ("id[:4] + (22500).to_bytes(4, 'little') + id[8:]", "has NCCL 2.28.3"),
    ],
)
def test_bad_ids(libraries, tmp_path, change, message):
    program = (
        f"from sparse_operation_kit import core\nid = core.Communicator.make_id()\ncore.Communicator(0, {change}, 2, 0)"
    )
    status, output = run_program(libraries, tmp_path, program)
    assert status == 1
    assert f"ValueError: {message}" in output or message in output, output


def test_a_bad_time_limit(libraries, tmp_path):
    status, output = run_program(libraries, tmp_path, JOIN, SOK_NCCL_TIMEOUT="soon")
    assert status == 1
    assert "SOK_NCCL_TIMEOUT is 'soon'" in output


def test_null_and_wrong_handles():
    """Of the library that ships, where no communicator can be made."""
    library = _abi.library()
    device, nothing = _abi.Device(_abi.CUDA, 0), _abi.Tensor(None, _abi.INT64, 1)
    assert library.sok_communicator_destroy(None) == _library.OK
    for status in (
        library.sok_communicator_check(None),
        library.sok_communicator_abort(None),
        library.sok_communicator_id_create(None),
        library.sok_device_get_uuid(device, None),
        library.sok_device_get_uuid(_abi.Device(_abi.CPU, 0), b" " * 64),
        library.sok_nccl_get_properties(None),
        library.sok_nccl_get_properties(_abi.NcclProperties(struct_size=8)),
        library.sok_all_to_all(core.Context().struct, None, nothing, None, nothing, None),
        library.sok_swap_counts(core.Context().struct, None, nothing, None, None),
        library.sok_communicator_create(device, None, 1, 0, 0.0, None),
        library.sok_communicator_create(device, _abi.CommunicatorId(), 1, 1, 0.0, ctypes.c_void_p()),
        library.sok_communicator_create(device, _abi.CommunicatorId(), 0, 0, 0.0, ctypes.c_void_p()),
        library.sok_communicator_create(device, _abi.CommunicatorId(), 1, 0, -1.0, ctypes.c_void_p()),
    ):
        assert status == _library.INVALID_ARGUMENT
        assert library.sok_last_error_message()
