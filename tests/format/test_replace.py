# SPDX-License-Identifier: Apache-2.0
"""A dump takes the place of another in one step, cleans up after the dead, and leaves what is not its own."""

import fcntl
import os
import threading

import checkpoint_cases as cases
import numpy as np
import pytest

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import loader, replace

OLD, NEW = cases.model(seed=1), cases.model(seed=2)


@pytest.fixture(params=["exchange", "two steps"])
def path(tmp_path, request, monkeypatch):
    if request.param == "two steps":
        monkeypatch.setattr(replace, "exchange", lambda *_: False)
    return tmp_path / "d"


def write(path, held, size=1):
    cases.results(cases.dump(path, [held], size))


def holds(path, held):
    cases.check(cases.load(path, [held]), [held])


def test_new_directory(path):
    write(path, OLD)
    holds(path, OLD)
    assert os.listdir(path.parent) == ["d"]


def test_parents_are_made(tmp_path):
    write(tmp_path / "a" / "b" / "c", OLD)
    holds(tmp_path / "a" / "b" / "c", OLD)


@pytest.mark.parametrize("name", ["a b", "größe", "-x", "a\nb", os.fsdecode(b"\xff\xfe")], ids=ascii)
def test_unusual_names(path, name):
    write(path.with_name(name), OLD, 2)
    write(path.with_name(name), NEW)
    holds(path.with_name(name), NEW)
    assert os.listdir(path.parent) == [name]


def test_replaces_a_dump(path):
    write(path, OLD)
    write(path, NEW, 3)
    holds(path, NEW)
    assert os.listdir(path.parent) == ["d"]


def test_replaces_an_empty_directory(path):
    path.mkdir()
    write(path, NEW)
    holds(path, NEW)
    assert os.listdir(path.parent) == ["d"]


def test_replaces_a_dump_of_sok_2(path):
    cases.write_legacy(path, cases.model("gone:0"))
    write(path, NEW)
    holds(path, NEW)
    assert sorted(os.listdir(path))[0] == "sok_manifest.json" and not (path / "gone_0-key").exists()


def test_other_files_stay(path):
    write(path, OLD)
    (path / "dense.h5").write_bytes(b"dense")
    (path / "ssh-key").write_bytes(b"not a dump's, in spite of its name")
    (path / "logs").mkdir()
    (path / "logs" / "a").write_bytes(b"log")
    os.symlink("dense.h5", path / "link")
    write(path, NEW)
    holds(path, NEW)
    assert (path / "dense.h5").read_bytes() == b"dense" and (path / "logs" / "a").read_bytes() == b"log"
    assert (path / "ssh-key").read_bytes().startswith(b"not") and os.readlink(path / "link") == "dense.h5"
    assert os.listdir(path.parent) == ["d"]


def test_other_files_are_there_at_every_moment(tmp_path, monkeypatch):
    write(tmp_path / "d", OLD)
    (tmp_path / "d" / "dense.h5").write_bytes(b"dense")
    original = replace.retire

    def checked(parent, entry, heir):
        assert (tmp_path / "d" / "dense.h5").read_bytes() == b"dense"
        original(parent, entry, heir)

    monkeypatch.setattr(replace, "retire", checked)
    write(tmp_path / "d", NEW)
    assert (tmp_path / "d" / "dense.h5").read_bytes() == b"dense"


def test_permissions_stay(path):
    write(path, OLD)
    os.chmod(path, 0o2750)
    write(path, NEW)
    assert os.stat(path).st_mode & 0o7777 == 0o2750


def test_a_file_that_vanishes_meanwhile(path, monkeypatch):
    """As when a host whose locks do not reach this one cleans up: no incomplete dump takes the place of a whole one."""
    write(path, OLD)

    def chunks(_):
        (left,) = path.parent.glob(".d.sok-tmp-*")
        (left / "t-weight").unlink()
        yield ck.Rows(np.arange(1), np.zeros((1, 2), np.float32), {})

    with pytest.raises(ck.StorageError, match="t-weight: was removed while the dump was being written"):
        ck.dump(path, [ck.Source(ck.Table("t", 2), 1, chunks)])
    holds(path, OLD)
    assert os.listdir(path.parent) == ["d"]


def test_symbolic_link_to_a_directory(path):
    write(path.parent / "real", OLD)
    os.symlink("real", path)
    write(path, NEW)
    assert path.is_symlink()
    holds(path.parent / "real", NEW)


@pytest.mark.parametrize("name", ["", "/", "relative/"])
def test_ways_to_write_a_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write("relative" + name if name != "relative/" else name, OLD)
    holds("relative", OLD)


def test_a_file_is_not_replaced(path):
    path.write_bytes(b"mine")
    with pytest.raises(ck.StorageError, match="is a file; expected a directory"):
        write(path, NEW)
    assert path.read_bytes() == b"mine" and os.listdir(path.parent) == ["d"]


def test_the_working_directory_is_not_replaced(path, monkeypatch):
    path.mkdir()
    (path / "below").mkdir()
    for here in (path, path / "below"):
        monkeypatch.chdir(here)
        with pytest.raises(ck.StorageError, match="working directory"):
            write(path, NEW)
    write(path / "sub", NEW)
    holds(path / "sub", NEW)


def test_missing_permissions(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    write(tmp_path / "d", OLD)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ck.StorageError, match="Permission denied") as caught:
        write(tmp_path / "d", NEW)
    assert caught.value.errno == 13
    holds(tmp_path / "d", OLD)


def test_leftovers_are_removed(path):
    write(path, OLD)
    left = path.parent / ".d.sok-tmp-0123456789abcdef"
    write(left, cases.model(seed=5))
    (path.parent / ".d.sok-tmp-empty").mkdir()
    (path.parent / ".other.sok-tmp-0").mkdir()
    write(path, NEW)
    assert sorted(os.listdir(path.parent)) == [".other.sok-tmp-0", "d"]


def test_a_living_dumps_directory_is_left_alone(path):
    left = path.parent / ".d.sok-tmp-0123456789abcdef"
    write(left, OLD)
    fd = os.open(left, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        write(path, NEW)
        holds(left, OLD)
    finally:
        os.close(fd)


def test_strangers_in_a_leftover_come_back(path):
    """A crash between exchange and removal leaves the old directory, with what was in it, under the other name."""
    write(path, NEW)
    left = path.parent / ".d.sok-tmp-0123456789abcdef"
    write(left, OLD)
    (left / "logs").mkdir()
    (left / "logs" / "a").write_bytes(b"log")
    write(path, OLD)
    assert (path / "logs" / "a").read_bytes() == b"log"
    assert os.listdir(path.parent) == ["d"]


def test_an_interrupted_two_step_replacement(tmp_path):
    """The old dump is readable at once, and the next dump puts everything in order."""
    write(tmp_path / ".d.sok-old-0123456789abcdef", OLD)
    write(tmp_path / ".d.sok-tmp-0123456789abcdef", NEW)
    holds(tmp_path / "d", OLD)
    with pytest.raises(ZeroDivisionError):
        _fail(tmp_path / "d")
    holds(tmp_path / "d", OLD)
    assert os.listdir(tmp_path) == ["d"]
    write(tmp_path / ".d.sok-old-0123456789abcdef", OLD)
    write(tmp_path / "d", NEW)
    holds(tmp_path / "d", NEW)
    assert os.listdir(tmp_path) == ["d"]


def _fail(path):
    def chunks(_):
        raise ZeroDivisionError

    ck.dump(path, [ck.Source(ck.Table("t", 2), 1, chunks)])


def test_a_deleted_dump_stays_deleted(tmp_path):
    """A leftover of a dump that never finished is not taken for the dump."""
    write(tmp_path / ".d.sok-tmp-0123456789abcdef", NEW)
    with pytest.raises(ck.MissingFileError):
        ck.open_dump(tmp_path / "d")


def test_whether_there_is_a_dump(tmp_path, monkeypatch):
    """What `open_dump` would find counts, and nothing else."""
    path = tmp_path / "d"
    for make in (lambda: None, path.mkdir, (path / "notes.txt").touch):
        make()
        assert not ck.has_dump(path)
    (tmp_path / "file").touch()
    assert not ck.has_dump(tmp_path / "file")
    write(tmp_path / ".e.sok-tmp-0123456789abcdef", NEW)
    assert not ck.has_dump(tmp_path / "e")
    write(tmp_path / ".e.sok-old-0123456789abcdef", OLD)
    assert ck.has_dump(tmp_path / "e") and not (tmp_path / "e").exists()
    write(path, OLD)
    cases.write_legacy(tmp_path / "sok2", OLD, 1)
    assert ck.has_dump(path) and ck.has_dump(str(tmp_path / "sok2"))
    (path / "sok_manifest.json").write_text("damaged")
    assert ck.has_dump(path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ck.StorageError, match="Permission denied"):
        ck.has_dump(path)


@pytest.mark.parametrize("count", [2, 4])
def test_concurrent_dumps(path, count):
    """Each dump is of one seed; whoever wins, the result is one of them, whole."""
    models = [cases.model(seed=seed) for seed in range(count)]
    for _ in range(5):
        barrier = threading.Barrier(count)
        errors = []

        def run(held, barrier=barrier, errors=errors):
            barrier.wait()
            try:
                write(path, held, 2)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(held,)) for held in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        winners = 0
        for held in models:
            try:
                holds(path, held)
                winners += 1
            except AssertionError:
                pass
        assert winners == 1
        assert os.listdir(path.parent) == ["d"]


def test_loading_while_dumps_replace_each_other(path):
    models = [cases.model(seed=seed, rows=200) for seed in (1, 2)]
    write(path, models[0])
    stop = threading.Event()
    errors = []

    def writing():
        try:
            while not stop.is_set():
                for held in models:
                    write(path, held)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=writing)
    thread.start()
    try:
        for _ in range(30):
            loaded = cases.results(cases.load(path, [models[0]], 2))
            wins = 0
            for held in models:
                try:
                    cases.check(loaded, [held])
                    wins += 1
                except AssertionError:
                    pass
            assert wins == 1
    finally:
        stop.set()
        thread.join()
    assert not errors


@pytest.mark.parametrize("found", [["gone"], ["empty", "gone"], ["gone", "gone", "empty", "gone", "gone"]], ids=str)
def test_a_dump_renamed_after_it_was_found(tmp_path, monkeypatch, found):
    """As between the two steps of a replacement, before or while the dump is opened: whoever reads looks again."""
    write(tmp_path / "d", OLD)
    (tmp_path / "empty").mkdir()  # like an old dump whose files have been removed
    original, left = replace.find, [tmp_path / name for name in found]
    monkeypatch.setattr(replace, "find", lambda path: left.pop(0) if left else original(path))
    ck.open_dump(tmp_path / "d").close()
    assert not left
    holds(tmp_path / "d", OLD)


def test_ranks_that_see_different_dumps_try_again(tmp_path, monkeypatch):
    """Rank 1 opens the dump that was there a moment ago."""
    write(tmp_path / "old", OLD)
    write(tmp_path / "d", NEW)
    original, first = ck.open_dump, []

    def late(path):
        if not first:
            first.append(path)
            return original(tmp_path / "old")
        return original(path)

    monkeypatch.setattr(loader, "open_dump", late)
    cases.check(cases.load(tmp_path / "d", [NEW], 2), [NEW])
    assert first
    turn = iter(range(1000))
    monkeypatch.setattr(loader, "open_dump", lambda path: original(tmp_path / ("old" if next(turn) % 2 else "d")))
    outcomes = cases.load(tmp_path / "d", [NEW], 2)
    assert all("see different dumps" in str(outcome) for outcome in outcomes)


def test_everything_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    """Files, then manifest, then their directory, then the rename, then the parent directory."""
    events = []
    sync, rename, exchange = os.fsync, os.rename, replace.exchange

    def record_sync(fd):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        sync(fd)

    def record_rename(*args, **options):
        rename(*args, **options)
        events.append(("rename", None))

    def record_exchange(*args):
        events.append(("rename", None))
        return exchange(*args)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(replace, "exchange", record_exchange)
    for _ in range(2):
        events.clear()
        write(tmp_path / "d", OLD, 2)
        synced = [name for event, name in events]
        rename_at = events.index(("rename", None))
        manifest = synced.index("sok_manifest.json")
        for file in ("table0_0-key", "table0_0-weight", "table0_0-Adam-m", "table0_0-Adam-v"):
            assert synced[:manifest].count(file) == 2  # by both ranks
        assert ".d.sok-tmp-" in synced[rename_at - 1] and manifest < rename_at - 1
        assert events[rename_at + 1] == ("sync", tmp_path.name)
