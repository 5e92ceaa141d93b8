# SPDX-License-Identifier: Apache-2.0
"""dump_async: the files are those of dump at the time of the call, and nothing is at the path before wait()."""

import copy
import errno
import functools
import gc
import os
import pathlib
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import checkpoint_cases as cases
import pytest

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import files, writer

LOCALIZED, DYNAMIC = {"mode": "localized:1"}, {"kind": "dynamic", "key_dtype": "int32"}


def models(seed, rows=23):
    """Tables of all kinds."""
    kinds = ({}, {"optimizer": None, "value_dtype": "float16"}, LOCALIZED, DYNAMIC)
    return [cases.model(f"t{number}", rows + number, seed=seed, **kind) for number, kind in enumerate(kinds)]


def content(path):
    return {file.name: file.read_bytes() for file in pathlib.Path(path).iterdir()}


def sources(tables, group=None):
    """Sources of this rank's rows in memory of their own, and what overwrites these."""
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    made, arrays = [], []
    for each in tables:
        source = each.source(rank, size)
        pieces = copy.deepcopy(list(source.chunks(5)))
        arrays += [array for piece in pieces for array in (piece.keys, piece.weights, *piece.states.values())]
        made.append(ck.Source(source.table, source.rows, functools.partial(_given, pieces)))

    def overwrite():
        for array in arrays:
            array[:] = 77

    return made, overwrite


def _given(pieces, size):
    del size
    return pieces


class Gate:
    """Holds what other threads than this one write while it is closed."""

    def __init__(self, monkeypatch):
        self._write, self._main, self._opened = files.write_at, threading.current_thread(), threading.Event()
        self._opened.set()
        self.writes = 0
        monkeypatch.setattr(files, "write_at", self._write_at)

    def _write_at(self, *arguments):
        if threading.current_thread() is not self._main:
            assert self._opened.wait(60)
            self.writes += 1
        self._write(*arguments)

    def close(self):
        self._opened.clear()

    def open(self):
        self._opened.set()


@pytest.fixture
def gate(monkeypatch):
    held = Gate(monkeypatch)
    yield held
    held.open()


OPTIONS: dict[str, Any] = {"optimizer": ck.Optimizer("Adam", 3), "step": 4, "progress": False}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [64, writer.CHUNK_BYTES])
def test_the_bytes_of_a_dump(tmp_path, ranks, chunk_bytes):
    held, options = models(1), {**OPTIONS, "chunk_bytes": chunk_bytes}
    cases.results(cases.dump(tmp_path / "wanted", held, ranks, **options, extra={"a": [1]}))

    def run(group):
        given, overwrite = sources(held, group)
        extra = {"a": [1]}
        pending = ck.dump_async(tmp_path / "d", given, group=group, **options, extra=extra)
        overwrite()
        extra["a"].append(2)
        pending.wait()
        assert pending.done()

    cases.results(cases.on_ranks(ranks, run))
    assert content(tmp_path / "d") == content(tmp_path / "wanted")
    assert sorted(os.listdir(tmp_path)) == ["d", "wanted"]


def test_the_old_dump_stays_until_wait(tmp_path, gate, recwarn):
    path, old, new = tmp_path / "d", models(1), models(2)
    ck.dump(path, sources(old)[0], **OPTIONS)
    before = content(path)
    gate.close()
    pending = ck.dump_async(path, sources(new)[0], **OPTIONS)
    assert pending.path == str(path) and not pending.done() and content(path) == before
    gate.open()
    pending._writer.join(60)
    assert pending.done() and content(path) == before
    cases.check(cases.load(path, old), old)
    pending.wait()
    cases.check(cases.load(path, new), new)
    pending.wait()
    del pending
    gc.collect()
    assert os.listdir(tmp_path) == ["d"] and not recwarn.list


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("write", [ck.dump, ck.dump_async])
def test_one_dump_at_a_time_to_a_path(tmp_path, ranks, write):
    path, link = tmp_path / "d", tmp_path / "link"
    os.symlink(tmp_path, link)

    def run(group):
        def begin(at, write=ck.dump_async):
            return write(at, sources(models(1), group)[0], group=group, **OPTIONS)

        first, other = begin(path), begin(tmp_path / "other")
        with pytest.raises(RuntimeError, match="d is being written; call its wait"):
            begin(link / "d", write)
        other.wait()
        assert sorted(os.listdir(tmp_path))[-2:] == ["link", "other"]
        first.wait()
        again = begin(path, write)
        if again is not None:
            again.wait()

    cases.results(cases.on_ranks(ranks, run))
    assert sorted(os.listdir(tmp_path)) == ["d", "link", "other"]


def test_an_error_of_a_rank_is_raised_by_wait_on_all(tmp_path, monkeypatch):
    path, old = tmp_path / "d", models(1)
    cases.results(cases.dump(path, old, 3, **OPTIONS))
    before, store = content(path), writer._Part._store

    def full(self, index, array, row):
        if self._first:  # the second rank's rows and the third's
            raise OSError(errno.ENOSPC, "full")
        store(self, index, array, row)

    def run(group):
        pending = ck.dump_async(path, sources(models(2), group)[0], group=group, **OPTIONS)
        errors = []
        for _ in range(2):
            with pytest.raises((OSError, ck.PeerError)) as caught:
                pending.wait()
            errors.append(caught.value)
        assert errors[0] is errors[1] and isinstance(errors[0], ck.PeerError if group.rank == 0 else OSError), errors

    monkeypatch.setattr(writer._Part, "_store", full)
    cases.results(cases.on_ranks(3, run))
    assert content(path) == before and os.listdir(tmp_path) == ["d"]
    monkeypatch.undo()
    cases.results(cases.dump(path, models(2), 3, **OPTIONS, write=cases.dump_in_background))
    cases.check(cases.load(path, models(2)), models(2))


def test_what_is_wrong_before_rows_are_written_is_raised_at_once(tmp_path):
    """On all ranks, and leaves nothing; the path is free for another."""
    (tmp_path / "file").write_bytes(b"")

    def failing(size):
        raise ValueError("no rows")

    def run(group):
        given = sources(models(1), group)[0]
        for path, options, match in (
            (tmp_path / "file" / "d", {}, "file"),
            (tmp_path / "d", {"step": "x"}, "step is 'x'"),
            (tmp_path / "d", {"extra": object()}, "object cannot be written"),
        ):
            with pytest.raises(ck.CheckpointError, match=match):
                ck.dump_async(path, given, group=group, **{**OPTIONS, **options})
        wrong = [ck.Source(given[0].table, given[0].rows, failing) if group.rank == 1 else given[0], *given[1:]]
        with pytest.raises((ValueError, ck.PeerError), match="no rows"):
            ck.dump_async(tmp_path / "d", wrong, group=group, **OPTIONS)
        less = [ck.Source(given[0].table, given[0].rows + (group.rank == 1), given[0].chunks), *given[1:]]
        with pytest.raises((ck.MismatchError, ck.PeerError), match="but declared"):
            ck.dump_async(tmp_path / "d", less, group=group, **OPTIONS)
        assert group.allgather(b"") and sorted(os.listdir(tmp_path)) == ["file"]
        ck.dump_async(tmp_path / "d", given, group=group, **OPTIONS).wait()

    cases.results(cases.on_ranks(2, run))
    assert sorted(os.listdir(tmp_path)) == ["d", "file"]


@pytest.mark.parametrize("written", [False, True])
def test_a_dump_that_nobody_waits_for(tmp_path, gate, written):
    path = tmp_path / "d"
    gate.close()
    pending = ck.dump_async(path, sources(models(1))[0], **OPTIONS, chunk_bytes=64)
    threading.Timer(0.0 if written else 0.3, gate.open).start()
    if written:
        pending._writer.join(60)
    with pytest.warns(RuntimeWarning, match="d is given up: nobody called wait"):
        del pending
        gc.collect()
    assert os.listdir(tmp_path) == [] and (gate.writes > 60) == written, gate.writes
    ck.dump(path, sources(models(1))[0], **OPTIONS)


_EXIT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import checkpoint_cases as cases
import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import files

if sys.argv[3] == "writing":
    write = files.write_at
    files.write_at = lambda *arguments: (time.sleep(0.05), write(*arguments))
source = cases.model(rows=2000).source(0, 1)
pending = ck.dump_async(sys.argv[2] + "/d", [source], optimizer=ck.Optimizer("Adam"), chunk_bytes=512)
if sys.argv[3] == "written":
    pending._writer.join(60)
if os.fork() == 0:
    sys.exit()  # the dump is its parent's
os.wait()
assert os.listdir(sys.argv[2])[0].startswith(".d.sok-tmp-")
if sys.argv[3] == "raises":
    raise ValueError("of the training loop")
"""


@pytest.mark.parametrize("when", ["writing", "written", "raises"])
def test_the_process_ends_before_wait(tmp_path, when):
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _EXIT, here, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (when == "raises"), done.stderr
    assert done.stderr.count("RuntimeWarning: the dump to") == 1 and "Exception ignored" not in done.stderr, done.stderr
    assert os.listdir(tmp_path) == []


def test_memory_is_given_back_table_by_table(tmp_path, monkeypatch):
    """As much is taken as the files have, and what was written goes."""
    rows, dimension = 1 << 14, 64
    tables = [cases.model(f"t{number}", rows, dimension, optimizer=None) for number in range(4)]
    given, size = sources(tables)[0], rows * (dimension * 4 + 8)
    begun, taken = writer._Part.__init__, []

    def begin(self, *arguments):
        taken.append(tracemalloc.get_traced_memory()[0] - before)
        begun(self, *arguments)

    monkeypatch.setattr(writer._Part, "__init__", begin)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pending = ck.dump_async(tmp_path / "d", given, progress=False)
        pending.wait()
        taken.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert len(taken) == 5
    for number, measured in enumerate(taken):
        assert (4 - number) * size <= measured < (4 - number) * size + size // 2 or number == 4, taken
    assert taken[4] < size // 2, taken


def test_progress_shows_while_the_caller_waits(tmp_path, gate, capsys):
    pytest.importorskip("tqdm")
    gate.close()
    pending = ck.dump_async(tmp_path / "d", sources(models(1))[0], **{**OPTIONS, "progress": True})
    shown = capsys.readouterr().err
    assert "copy: 100%" in shown and "dump" not in shown
    threading.Timer(0.3, gate.open).start()
    pending.wait()
    shown = capsys.readouterr().err
    assert "dump: 100%" in shown and "copy" not in shown
    pending = ck.dump_async(tmp_path / "d", sources(models(1))[0], **{**OPTIONS, "progress": True})
    capsys.readouterr()
    pending._writer.join(60)
    pending.wait()
    assert not capsys.readouterr().err


def test_wait_runs_where_it_can(tmp_path):
    def check(what):
        raise RuntimeError(f"{what} not here")

    pending = ck.dump_async(tmp_path / "d", sources(models(1))[0], **OPTIONS, check=check)
    with pytest.raises(RuntimeError, match="wait not here"):
        pending.wait()
    pending._check = None
    pending.wait()
    assert os.listdir(tmp_path) == ["d"]
