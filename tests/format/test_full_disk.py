# SPDX-License-Identifier: Apache-2.0
"""No space left: an error that says so, nothing left behind, the old dump intact."""

import pathlib
import shutil
import subprocess
import sys

import pytest

_SCRIPT = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import checkpoint_cases as cases
import sparse_operation_kit.checkpoint as ck

folder, ranks, limit = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
path, write = os.path.join(folder, "d"), {"dump": ck.dump, "dump_async": cases.dump_in_background}[sys.argv[6]]
small, large = cases.model(seed=1, rows=500), cases.model(seed=2, rows=40000)
cases.results(cases.dump(path, [small], ranks))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for _ in range(2):
    outcomes = cases.dump(path, [large], ranks, write=write)
    assert all(isinstance(outcome, ck.CheckpointError) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, ck.NoSpaceError) for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert sys.argv[5] in str(outcome), outcome
        assert "table0_0-" in str(outcome), outcome
    print(outcomes[0])
    assert os.listdir(folder) == ["d"], os.listdir(folder)
    cases.check(cases.load(path, [small], 2), [small])
"""


def _run(folder, ranks, write, limit, message, prefix=()):
    here = str(pathlib.Path(__file__).parent)
    script = [sys.executable, "-c", _SCRIPT, here, str(folder), str(ranks), str(limit), message, write]
    done = subprocess.run([*prefix, *script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def _namespace():
    """A command prefix that gives a mount namespace of its own, or None."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return None
    for flags in ("-m", "-rm"):
        test = ["unshare", flags, "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
        if subprocess.run(test, capture_output=True, timeout=60).returncode == 0:
            return flags
    return None


BOTH = pytest.mark.parametrize("write", ["dump", "dump_async"])


@BOTH
@pytest.mark.parametrize("ranks", [1, 3])
def test_full_disk(tmp_path, ranks, write):
    flags = _namespace()
    if flags is None:
        pytest.skip("mounting a tmpfs is not permitted here; test_file_size_limit covers the error path")
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    _run(tmp_path, ranks, write, 0, "No space left on device", ["unshare", flags, "sh", "-c", mount, str(tmp_path)])


@BOTH
@pytest.mark.parametrize("ranks", [1, 3])
def test_file_size_limit(tmp_path, ranks, write):
    _run(tmp_path, ranks, write, 100_000, "File too large")
