# SPDX-License-Identifier: Apache-2.0
"""What a dump refuses, and that it then leaves everything as it was."""

import os
import resource
import subprocess
import sys
import tracemalloc

import checkpoint_cases as cases
import numpy as np
import pytest

import sparse_operation_kit.checkpoint as ck


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder, sources, error, message, size=1, **options):
    before = tree(folder)
    optimizer = options.pop("optimizer", ck.Optimizer("Adam"))

    def run(group):
        ck.dump(folder / "d", sources(group), group=group, optimizer=optimizer, **options)

    outcomes = cases.on_ranks(size, run)
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    with pytest.raises(error, match=message):
        cases.results(outcomes)
    assert tree(folder) == before and set(os.listdir(folder)) <= {"d"}


@pytest.fixture(params=[False, True], ids=["new", "replacing"])
def folder(tmp_path, request):
    if request.param:
        cases.results(cases.dump(tmp_path / "d", [cases.model(seed=3)]))
    return tmp_path


def test_names_that_collide(folder):
    def sources(group):
        return [cases.model(name).source(group.rank, group.size) for name in ("a/b", "a.b")]

    refused(folder, sources, ck.TableNameError, "a_b-key")


def test_ranks_with_different_tables(folder):
    def sources(group):
        return [cases.model("a", dimension=4 + group.rank).source(group.rank, group.size)]

    refused(
        folder, sources, ck.MismatchError, "ranks 0 and 1 dump different tables: 'a' and 'a' differ in dimension", 2
    )


def test_ranks_with_different_numbers_of_tables(folder):
    def sources(group):
        return [cases.model("a").source(group.rank, group.size)] * (1 - group.rank)

    refused(folder, sources, ck.MismatchError, "1 and 0 tables", 2)


def _source(chunks, rows=4, **changes):
    return lambda _: [ck.Source(ck.Table(**{"name": "t", "dimension": 2, **changes}), rows, chunks)]


def _rows(n, keys=None):
    return ck.Rows(np.arange(n) if keys is None else np.array(keys), np.zeros((n, 2), np.float32), {})


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (lambda _: [_rows(3)], "yields 3 rows, but declared 4"),
        (lambda _: [_rows(4), _rows(1)], "yields more than the 4 rows"),
        (lambda _: [ck.Rows(np.arange(4), np.zeros((4, 3), np.float32), {})], r"float32 \[4, 3\] for t-weight, not"),
        (lambda _: [ck.Rows(np.arange(4), np.zeros((4, 2)), {})], "yields float64"),
        (lambda _: [ck.Rows(np.arange(4, dtype=np.int32), np.zeros((4, 2), np.float32), {})], "yields int32"),
        (lambda _: [_rows(4, [0, 1, 2, 4])], r"key outside \[0, 4\)"),
        (lambda _: [_rows(4, [-1, 1, 2, 3])], r"key outside \[0, 4\)"),
        (lambda _: [1 / 0], "division by zero"),
    ],
)
def test_wrong_sources(folder, chunks, message):
    refused(folder, _source(chunks), (ck.MismatchError, ZeroDivisionError), message)


def test_missing_state(folder):
    states = {"m": ck.State("float32", 2)}
    source = _source(lambda _: [_rows(4)], optimizer="Adam", states=states)
    refused(folder, source, ck.MismatchError, "yields no state 'm'")


def test_one_rank_fails(folder):
    def sources(group):
        count = 1 if group.rank == 0 else 2
        return [ck.Source(ck.Table("t", 2), 1, lambda _: [_rows(count, list(range(count)))])]

    refused(folder, sources, ck.MismatchError, "yields more than", 3)


def test_one_rank_describes_what_is_not_json(folder):
    def sources(group):
        table = ck.Table("t", 2, initializer=object() if group.rank else None)
        return [ck.Source(table, 0, lambda _: [])]

    refused(folder, sources, ValueError, "object cannot be written as JSON", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimension": 0}, "dimension"),
        ({"value_dtype": "bfloat16"}, "cannot hold bfloat16"),
        ({"key_dtype": "float32"}, "cannot hold float32"),
        ({"mode": "localized"}, "mode"),
        ({"kind": "other"}, "kind"),
        ({"seed": 2**64}, "seed"),
        ({"optimizer": "Adagrad"}, "the dump's optimizer is Adam"),
        ({"states": {"m": ck.State("float32", 2)}}, "states need"),
        ({"optimizer": "Adam", "states": {"m": ck.State("float32", 3)}}, "3 columns"),
        ({"optimizer": "Adam", "states": {"a/b": ck.State("float32", 2)}}, "state name"),
    ],
)
def test_wrong_tables(folder, changes, message):
    refused(folder, _source(lambda _: [_rows(4)], **changes), ValueError, message)


def test_wrong_arguments(folder):
    source = _source(lambda _: [_rows(4)])
    refused(folder, source, ValueError, "chunk_bytes", chunk_bytes=0)
    refused(folder, source, ValueError, "chunk_bytes", chunk_bytes=1 << 30)
    refused(folder, source, ck.TableNameError, "optimizer name", optimizer=ck.Optimizer("a-b"))
    refused(folder, source, ck.ManifestError, "cannot be written", extra=object())


def test_large_dumps_get_larger_chunks(tmp_path, monkeypatch):
    from sparse_operation_kit.checkpoint import writer

    monkeypatch.setattr(writer, "_MAX_DIGESTS", 50)
    held = cases.model(rows=1000, optimizer=None)
    cases.results(cases.dump(tmp_path / "d", [held], 2, chunk_bytes=16))
    with ck.open_dump(tmp_path / "d") as dump:
        assert 25 >= len(dump.table("table0:0").bounds) > 12
    cases.check(cases.load(tmp_path / "d", [held], 3), [held])


def test_more_files_than_may_be_open(tmp_path):
    """1,200 files under a soft limit of 256 open ones; the reader raises the limit, as it keeps its files open."""
    models = [cases.model(f"t{number}", rows=3, dimension=1) for number in range(300)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        cases.results(cases.dump(tmp_path / "d", models))
        cases.check(cases.load(tmp_path / "d", models), models)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_memory_is_bounded(tmp_path):
    """64 MiB of rows pass through a few chunks of 256 KiB, on writing and on reading."""
    rows, dimension = 1 << 17, 64

    def chunks(size):
        for first in range(0, rows, size):
            keys = np.arange(first, min(first + size, rows))
            weights = np.repeat(keys.astype(np.float32)[:, None], dimension, axis=1)
            yield ck.Rows(keys, weights, {"m": weights, "v": weights})

    table = ck.Table(
        "t", dimension, optimizer="Adam", states={slot: ck.State("float32", dimension) for slot in ("m", "v")}
    )
    seen = []

    def assign(held):
        assert (held.weights == held.keys[:, None]).all() and (held.states["v"] == held.weights).all()
        seen.append(len(held.keys))

    tracemalloc.start()
    try:
        ck.dump(tmp_path / "d", [ck.Source(table, rows, chunks)], optimizer=ck.Optimizer("Adam"), chunk_bytes=1 << 18)
        target = ck.Target("t", dimension, assign, rows=rows, states=table.states)
        ck.load(tmp_path / "d", [target], optimizer="Adam")
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    assert sum(seen) == rows


def test_importing_loads_no_framework():
    script = (
        "import sys, sparse_operation_kit.checkpoint.cli\n"
        "loaded = {'torch', 'tensorflow', 'horovod', 'safetensors', 'rich', 'tqdm', 'pickle5'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_progress_bar_is_for_rank_0_of_a_terminal(tmp_path, capsys):
    pytest.importorskip("tqdm")
    held = cases.model()
    cases.results(cases.dump(tmp_path / "d", [held], 2, progress=None))
    assert capsys.readouterr().err == ""
    ck.dump(tmp_path / "d", [held.source(0, 1)], optimizer=ck.Optimizer("Adam"), progress=True)
    assert "dump" in capsys.readouterr().err
