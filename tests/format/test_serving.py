# SPDX-License-Identifier: Apache-2.0
"""export_for_serving: keys and rows for servers, from dumps and from tables, at any number of ranks."""

import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import checkpoint_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.numpy import load_file

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import cli, serving
from sparse_operation_kit.checkpoint.serving import Choice, export_for_serving, quantized


def models(**options):
    """A static, a localized and a dynamic table; each begins with a NaN, -0 and infinity."""
    return [
        cases.model("users:0", 37, 4, **options),
        cases.model("items/new", 9, 3, mode="localized:1", **options),
        cases.model("tags", 11, 2, kind="dynamic", **options),
    ]


def finite(held):
    for model in held:
        model.weights.reshape(-1)[:3] = (0.25, -0.0, 1.5)
    return held


def scored(model, scores):
    """The same with the score of each row."""
    changed = ck.Table(**{**model.table.__dict__, "kept": {"score": "int64"}})
    return cases.Model(changed, model.keys, model.weights, {**model.states, "score": scores})


def export(path, held, size=1, **options):
    """Exports `held` from `size` ranks; what the first returns."""

    def run(group):
        sources = [model.source(group.rank, group.size) for model in held]
        return export_for_serving(path, lambda: sources, Choice(**options), group=group, progress=False)

    return cases.results(cases.on_ranks(size, run))[0]


def rows_of(keys, values):
    return {int(key): value.tobytes() for key, value in zip(keys, values, strict=True)}


def read_hps(path, name, dimension):
    folder = pathlib.Path(path) / name
    assert sorted(os.listdir(folder)) == ["emb_vector", "key"]
    keys = np.fromfile(folder / "key", "<i8")
    assert (folder / "emb_vector").stat().st_size == 4 * dimension * len(keys)
    return rows_of(keys, np.fromfile(folder / "emb_vector", "<f4").reshape(-1, dimension))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_hps(tmp_path, size):
    held = models()
    counts = export(tmp_path / "new" / "m", held, size)
    assert counts == {"users": 37, "items/new": 9, "tags": 11}
    assert sorted(os.listdir(tmp_path / "new")) == ["m"], "nothing temporary is left"
    assert sorted(os.listdir(tmp_path / "new" / "m")) == ["items_new", "tags", "users"]
    for model, name in zip(held, ("users", "items_new", "tags"), strict=True):
        found = read_hps(tmp_path / "new" / "m", name, model.table.dimension)
        assert found == rows_of(model.keys, model.weights), name


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_safetensors(tmp_path, size, dtype):
    held, path = finite(models()), tmp_path / "m.safetensors"
    export(path, held, size, dtype=dtype)
    found = load_file(path)
    assert len(found) == len(held) * (3 if dtype == "int8" else 2)
    for model, name in zip(held, ("users", "items_new", "tags"), strict=True):
        keys, rows = found[f"{name}/key"], found[f"{name}/emb_vector"]
        assert keys.dtype == np.int64 and rows.dtype == np.dtype(dtype)
        assert sorted(keys) == sorted(model.keys)
        wanted = dict(zip(model.keys.tolist(), model.weights, strict=True))
        for place, key in enumerate(keys.tolist()):
            if dtype == "int8":
                scale = found[f"{name}/scale"][place]
                assert np.abs(wanted[key] - rows[place] * scale.astype(np.float64)).max() <= scale / 2
            else:
                assert rows[place].tobytes() == wanted[key].astype(dtype).tobytes()
    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"format": "sok-serving"}


def test_arrays_are_aligned(tmp_path):
    export(tmp_path / "m.safetensors", finite(models()), dtype="int8")
    data = (tmp_path / "m.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            size = {"I64": 8, "F32": 4, "I8": 1}[entry["dtype"]]
            assert (8 + length + entry["data_offsets"][0]) % size == 0, name


@settings(max_examples=200)
@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=9),
        elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
    )
)
def test_the_error_of_int8_is_at_most_half_a_scale(rows):
    values, scales = quantized(rows)
    assert (values.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, rows.shape[:1])
    exact = scales.astype(np.float64)[:, None]
    assert (np.abs(rows.astype(np.float64) - values * exact) <= exact / 2).all()
    assert np.isfinite(scales).all() and np.abs(values.astype(int)).max(initial=0) <= 127


def test_a_row_that_the_dtype_does_not_hold(tmp_path):
    held = finite(models())
    held[2].weights[5, 1] = 1e6
    key = held[2].keys[5]
    with pytest.raises(ck.MismatchError, match=rf"table 'tags': the row of key {key} .* float16"):
        export(tmp_path / "m.safetensors", held, 2, dtype="float16")
    held[2].weights[5, 1] = np.nan
    with pytest.raises(ck.MismatchError, match=rf"the row of key {key} .* int8"):
        export(tmp_path / "m.safetensors", held, dtype="int8")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_a_norm(tmp_path, size):
    held = finite(models())
    norms = [np.linalg.norm(model.weights.astype(np.float64), axis=1) for model in held]
    limit = float(np.sort(norms[0])[10])
    counts = export(tmp_path / "m", held, size, min_norm=limit)
    assert counts["users"] == 27
    for model, norm, name in zip(held, norms, ("users", "items_new", "tags"), strict=True):
        found = read_hps(tmp_path / "m", name, model.table.dimension)
        assert found == rows_of(model.keys[norm >= limit], model.weights[norm >= limit])


def test_a_row_with_a_nan_has_no_norm_and_stays(tmp_path):
    held = models()
    export(tmp_path / "m", held, 2, min_norm=1e30)
    for model, name in zip(held, ("users", "items_new", "tags"), strict=True):
        special = ~np.isfinite(model.weights).all(axis=1)
        assert special.any()
        found = read_hps(tmp_path / "m", name, model.table.dimension)
        assert found == rows_of(model.keys[special], model.weights[special])
    with pytest.raises(ck.MismatchError, match="int8"):
        export(tmp_path / "m.safetensors", held, min_norm=1e30, dtype="int8")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_norm": math.nan}, ValueError, "min_norm must be a number that is not negative, got nan"),
        ({"min_norm": -1.0}, ValueError, "min_norm must be a number that is not negative, got -1.0"),
        ({"min_norm": "a"}, TypeError, "min_norm must be a number, got 'a'"),
        ({"min_norm": True}, TypeError, "min_norm must be a number, got True"),
        ({"min_norm": np.ones(2)}, TypeError, "min_norm must be a number, got array"),
        ({"min_score": -1}, ValueError, "min_score must be an integer that is not negative, got -1"),
        ({"min_score": math.nan}, TypeError, "min_score must be an integer, got nan"),
        ({"min_score": 1.5}, TypeError, "min_score must be an integer, got 1.5"),
        ({"min_score": "1"}, TypeError, "min_score must be an integer, got '1'"),
    ],
)
def test_a_threshold_that_is_no_number(tmp_path, options, error, message):
    held = finite(models())
    held[2] = scored(held[2], np.arange(11) << 32)
    with pytest.raises(error, match=message):
        export(tmp_path / "m", held, **options)
    assert os.listdir(tmp_path) == []


def test_rows_of_a_score(tmp_path):
    held = models()
    ranks = np.arange(11)[::-1] % 4
    held[2] = scored(held[2], (ranks << 32) + np.arange(11))
    counts = export(tmp_path / "m", held, 2, min_score=2)
    assert counts == {"users": 37, "items/new": 9, "tags": int((ranks >= 2).sum())}
    kept = ranks >= 2
    assert read_hps(tmp_path / "m", "tags", 2) == rows_of(held[2].keys[kept], held[2].weights[kept])
    with pytest.raises(ck.MismatchError, match="none of the tables keeps scores"):
        export(tmp_path / "other", held[:2], min_score=2)


@pytest.mark.parametrize("path", ["m", "m.safetensors"])
def test_many_tables(tmp_path, path):
    before = len(os.listdir("/proc/self/fd"))
    held = [cases.model(f"t{i}", 3, 2, optimizer=None) for i in range(150)]
    export(tmp_path / path, held)
    assert len(os.listdir("/proc/self/fd")) == before
    if path == "m":
        assert read_hps(tmp_path / "m", "t149", 2) == rows_of(held[149].keys, held[149].weights)


def test_no_rows(tmp_path):
    held = [cases.model("empty", 0, 2, kind="dynamic"), *finite(models())]
    assert export(tmp_path / "m", held, 2, min_norm=1e30) == {"empty": 0, "users": 0, "items/new": 0, "tags": 0}
    assert read_hps(tmp_path / "m", "users", 4) == {}
    export(tmp_path / "m.safetensors", held, min_norm=1e30, dtype="int8")
    assert load_file(tmp_path / "m.safetensors")["users/emb_vector"].shape == (0, 4)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_rows_of_other_dtypes_become_float32(tmp_path, dtype):
    held = [cases.model("t", 9, 3, value_dtype=dtype, optimizer=None)]
    with np.errstate(over="ignore", invalid="ignore"):
        export(tmp_path / "m", held)
        assert read_hps(tmp_path / "m", "t", 3) == rows_of(held[0].keys, held[0].weights.astype(np.float32))


def test_what_is_there_stays(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m.safetensors").write_text("mine")
    for path in (tmp_path / "m", tmp_path / "m.safetensors"):
        with pytest.raises(ck.StorageError, match="exists already; expected a new path"):
            export(path, models())
    assert (tmp_path / "m.safetensors").read_text() == "mine"


def test_refused(tmp_path):
    with pytest.raises(ck.MismatchError, match=r"HPS reads float32; expected a path that ends in .safetensors"):
        export(tmp_path / "m", models(), dtype="int8")
    with pytest.raises(ValueError, match="dtype is 'int4'"):
        export(tmp_path / "m.safetensors", models(), dtype="int4")
    with pytest.raises(ck.TableNameError):
        export(tmp_path / "m", [cases.model("a.b", 3), cases.model("a_b", 3)])
    with pytest.raises(ck.MismatchError, match="no tables"):
        export(tmp_path / "m", [])
    assert os.listdir(tmp_path) == []


def test_a_rank_that_fails_ends_it_on_all(tmp_path):
    def run(group):
        def describe():
            if group.rank == 1:
                raise KeyError("no such table")
            return [models()[0].source(0, 2)]

        return export_for_serving(tmp_path / "m", describe, Choice(), group=group, progress=False)

    zero, one = cases.on_ranks(2, run)
    assert isinstance(zero, ck.PeerError) and isinstance(one, KeyError)

    def late(group):
        source = models()[0].source(group.rank, 2)

        def chunks(size):
            yield from source.chunks(size)
            if group.rank == 1:
                raise OSError("the disk is gone")

        sources = [ck.Source(source.table, source.rows, chunks)]
        return export_for_serving(tmp_path / "m", lambda: sources, Choice(), group=group, progress=False)

    zero, one = cases.on_ranks(2, late)
    assert isinstance(zero, ck.PeerError) and isinstance(one, OSError)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("writers", [1, 3])
def test_of_a_dump(tmp_path, capsys, writers):
    held = models()
    held[2] = scored(held[2], np.arange(11) << 32)
    cases.results(cases.dump(tmp_path / "d", held, writers, chunk_bytes=64))
    assert cli.main(["export-for-serving", str(tmp_path / "d"), str(tmp_path / "m")]) == 0
    assert "users" in capsys.readouterr().out
    assert read_hps(tmp_path / "m", "users", 4) == rows_of(held[0].keys, held[0].weights)
    assert read_hps(tmp_path / "m", "items_new", 3) == rows_of(held[1].keys, held[1].weights)
    told = ["--tables", "tags", "users:0", "--min-score", "4", "--json"]
    assert cli.main(["export-for-serving", str(tmp_path / "d"), str(tmp_path / "m.safetensors"), *told]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == {
        "tags": {"rows": 7, "of": 11},
        "users": {"rows": 37, "of": 37},
    }
    found = load_file(tmp_path / "m.safetensors")
    assert sorted(found["tags/key"]) == sorted(held[2].keys[4:])


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (["--min-norm", "nan"], "must not be negative, got nan"),
        (["--min-norm", "-1"], "must not be negative, got -1"),
        (["--min-norm", "a"], "must be a number, got 'a'"),
        (["--min-score", "-1"], "must not be negative, got -1"),
        (["--min-score", "1.5"], "must be an integer, got '1.5'"),
    ],
)
def test_a_threshold_of_the_command_that_is_no_number(tmp_path, capsys, told, message):
    cases.results(cases.dump(tmp_path / "d", models()))
    with pytest.raises(SystemExit) as raised:
        cli.main(["export-for-serving", str(tmp_path / "d"), str(tmp_path / "m"), *told])
    assert raised.value.code == 2
    assert f"argument {told[0]}: {message}" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["d"]


def test_of_a_dump_of_sok_2(tmp_path):
    held = cases.model("t:0", 23, 4)
    cases.write_legacy(tmp_path / "d", held)
    assert cli.main(["export-for-serving", str(tmp_path / "d"), str(tmp_path / "m")]) == 0
    assert read_hps(tmp_path / "m", "t_0", 4) == rows_of(held.keys, held.weights)


def test_a_damaged_dump(tmp_path, capsys):
    cases.results(cases.dump(tmp_path / "d", models(), chunk_bytes=64))
    file = tmp_path / "d" / "tags-weight"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cli.main(["export-for-serving", str(tmp_path / "d"), str(tmp_path / "m")]) == 2
    assert "tags-weight: chunk" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["d"]


def test_memory_is_bounded(tmp_path):
    """A table of 256 MiB is exported by a process that takes less than half of that for it."""
    rows, dimension = 1 << 20, 64
    table = ck.Table("t", dimension)

    def chunks(size):
        for first in range(0, rows, size):
            count = min(size, rows - first)
            yield ck.Rows(np.arange(first, first + count), np.full((count, dimension), 0.5, np.float32), {})

    ck.dump(tmp_path / "d", [ck.Source(table, rows, chunks)], progress=False)
    script = (
        "import resource, sys\n"
        "from sparse_operation_kit.checkpoint import cli\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert cli.main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", script, "export-for-serving", str(tmp_path / "d"), str(tmp_path / "m.safetensors")]
    done = subprocess.run([*command, "--dtype", "int8", "--min-norm", "1"], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 1024 * 256 / 2, done.stdout
    assert load_file(tmp_path / "m.safetensors")["t/emb_vector"].shape == (rows, dimension)


# Exports again and again under new names until it is killed.
_KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import checkpoint_cases as cases
from sparse_operation_kit.checkpoint.serving import Choice, export_for_serving

held = cases.model("t", 20000, 8)
number = 0
print("ready", flush=True)
while True:
    path = f"{sys.argv[2]}/{number}" + (".safetensors" if number % 2 else "")
    export_for_serving(path, lambda: [held.source(0, 1)], Choice(), progress=False)
    number += 1
"""


def test_kill(tmp_path):
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng, wanted, seen = random.Random(seed), cases.model("t", 20000, 8), [0, 0]
    here = str(pathlib.Path(__file__).parent)
    for kill in range(6):
        folder = tmp_path / str(kill)
        folder.mkdir()
        child = subprocess.Popen([sys.executable, "-c", _KILLED, here, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.2)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        for name in os.listdir(folder):
            if serving.ENDING in name and ".sok-tmp-" not in name:
                found = load_file(folder / name)
                assert rows_of(found["t/key"], found["t/emb_vector"]) == rows_of(wanted.keys, wanted.weights)
            elif ".sok-tmp-" not in name:
                assert read_hps(folder / name, "t", 8) == rows_of(wanted.keys, wanted.weights)
            seen[".sok-tmp-" in name] += 1
    print(f"{seen[0]} exports were whole, {seen[1]} of 6 were killed within")
    assert seen[0] > 0
