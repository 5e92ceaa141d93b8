# SPDX-License-Identifier: Apache-2.0
"""Rows on a local disk (sok.DiskStore) by themselves: against a dict, across processes, and what goes wrong."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from sparse_operation_kit.checkpoint import NoSpaceError, StorageError
from sparse_operation_kit.disk_store import DiskStore

EDGES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]


def content(store, size=7):
    """{key: record}, and that no piece is too large."""
    found = {}
    for keys in store.keys(size):
        assert 0 < len(keys) <= size and keys.dtype == np.int64
        is_there, records = store.read(keys)
        assert is_there.all()
        found.update(zip(keys.tolist(), map(bytes, records), strict=True))
    return found


def test_like_a_dict(tmp_path):
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    store, model = DiskStore(tmp_path / "a" / "b"), {}
    pool = np.unique(np.concatenate([EDGES, rng.integers(-(2**63), 2**63 - 1, 60)]))
    for step in range(60):
        keys = rng.permutation(pool)[: rng.integers(0, 40)]
        if step % 3 == 1:
            store.erase(keys)
            model = {key: record for key, record in model.items() if key not in keys}
        else:
            records = rng.integers(0, 256, (len(keys), 24), np.uint8)
            store.write(keys, records)
            model.update(zip(keys.tolist(), map(bytes, records), strict=True))
            records[:] = 0  # the caller's again
        asked = rng.permutation(pool)[:30]
        is_there, records = store.read(asked)
        assert is_there.tolist() == [key in model for key in asked.tolist()]
        assert [bytes(r) for r in records] == [model[key] for key in asked[is_there].tolist()]
        assert store.size() == len(model) and content(store) == model
    store.flush()
    store.close()
    with DiskStore(tmp_path / "a" / "b", existing="keep") as again:
        assert content(again, 1000) == model


KILLED = """
import os, signal, sys
import numpy as np
from sparse_operation_kit.disk_store import DiskStore
store = DiskStore(sys.argv[1])
for step in range(10**6):
    keys = np.arange(500) + step % 7 * 400
    store.write(keys, np.full((500, 64), step % 251, np.uint8))
    if step == 3:
        print("on", flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_transactions(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "s"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "on\n"
        with pytest.raises(BlockingIOError, match="each table and each rank has its own"):
            DiskStore(tmp_path / "s", existing="clear")
        process.send_signal(signal.SIGKILL)
    with pytest.raises(FileExistsError, match=r"an earlier run.*existing=\"clear\""):
        DiskStore(tmp_path / "s")
    with DiskStore(tmp_path / "s", existing="keep") as store:
        _, records = store.read(np.sort(np.concatenate(list(store.keys(10_000)))))
        assert len(records) == store.size() >= 500 and (records == records[:, :1]).all()
        # What one transaction wrote last is there as a whole: neighbours differ at most at the 13 ends of ranges.
        assert (np.diff(records[:, 0].astype(int)) != 0).sum() <= 14
    with DiskStore(tmp_path / "s", existing="clear") as store:
        assert store.size() == 0 and content(store) == {}


def test_what_does_not_work_changes_nothing(tmp_path):
    with DiskStore(tmp_path / "s", max_bytes=1 << 18) as store:
        store.write(np.arange(100), np.ones((100, 100), np.uint8))
        before = content(store)
        with pytest.raises(NoSpaceError, match="cannot write"):
            store.write(np.arange(50, 9000), np.zeros((8950, 100), np.uint8))
        assert content(store) == before
        store.write(np.array([7]), np.zeros((1, 100), np.uint8))
    for call in (store.size, store.flush, lambda: store.read(np.array([1])), lambda: store.erase(np.array([1]))):
        with pytest.raises(ValueError, match="is closed"):
            call()
    store.close()
    with pytest.raises(ValueError, match="existing is 'maybe'"):
        DiskStore(tmp_path / "t", existing="maybe")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make the directory"):
        DiskStore(tmp_path / "file")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "data.mdb").write_bytes(b"no store" * 2000)
    with pytest.raises(StorageError, match="cannot open"):
        DiskStore(tmp_path / "damaged", existing="keep")


def test_without_lmdb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sparse-operation-kit\[store\]'"):
        DiskStore(tmp_path / "s")
    assert not (tmp_path / "s").exists()
