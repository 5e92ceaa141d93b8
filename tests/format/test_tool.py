# SPDX-License-Identifier: Apache-2.0
"""python -m sparse_operation_kit.checkpoint: inspect, verify, diff, convert."""

import builtins
import contextlib
import json
import os
import pty
import subprocess
import sys
import zipfile
from typing import Any

import checkpoint_cases as cases
import numpy as np
import pytest

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit.checkpoint import archives, cli, display

FAMILY = [".npz", ".safetensors"]


@pytest.fixture
def models():
    return [
        cases.model("one:0", 37, 4),
        cases.model("two:0", 9, 3, mode="localized:1", optimizer="Adam"),
        cases.model("three", 11, 2, kind="dynamic", optimizer=None, value_dtype="float16", key_dtype="int32"),
        cases.model("empty", 0, 2, kind="dynamic", optimizer=None),
    ]


@pytest.fixture
def dump(tmp_path, models):
    cases.results(cases.dump(tmp_path / "d", models, 2, chunk_bytes=64))
    return tmp_path / "d"


def run(capsys, *arguments):
    """(exit status, standard output, standard error) of one command."""
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def damage(file, place=-1):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


class TestInspect:
    def test_json(self, capsys, dump):
        status, out, _ = run(capsys, "inspect", dump, "--json")
        found = json.loads(out)
        assert status == 0
        assert [table["name"] for table in found["tables"]] == ["one:0", "two:0", "three", "empty"]
        assert [table["rows"] for table in found["tables"]] == [37, 9, 11, 0]
        one = found["tables"][0]
        assert (one["dimension"], one["kind"], one["mode"], one["parts"]) == (4, "static", "distributed", [19, 18])
        assert [state["slot"] for state in one["states"]] == ["m", "v"]
        assert found["optimizer"]["iterations"] == 17 and found["step"] == 5 and found["world_size"] == 2
        assert found["bytes"] == sum(path.stat().st_size for path in dump.iterdir() if path.suffix != ".json")

    def test_text(self, capsys, dump):
        status, out, _ = run(capsys, "inspect", dump)
        assert status == 0
        for text in ("one:0", "Adam-m, Adam-v", "localized:1", "float16", "57 rows", "step:", "17 iterations"):
            assert text in out

    def test_legacy(self, capsys, tmp_path):
        cases.write_legacy(tmp_path / "d", cases.model())
        status, out, _ = run(capsys, "inspect", tmp_path / "d", "--json")
        found = json.loads(out)
        assert status == 0 and found["format"] == "SOK 2.x" and found["optimizer"] is None
        assert found["tables"][0]["dimension"] == 4 and found["tables"][0]["kind"] is None

    def test_unreadable(self, capsys, dump):
        os.truncate(dump / "one_0-weight", 300)
        status, out, err = run(capsys, "inspect", dump, "--json")
        assert status == 2 and "one_0-weight: is 300 bytes long" in err
        assert json.loads(out)["file"].endswith("one_0-weight")
        assert run(capsys, "inspect", dump / "nowhere")[0] == 2

    def test_reads_no_rows(self, capsys, dump):
        damage(dump / "one_0-weight")
        assert run(capsys, "inspect", dump)[0] == 0


class TestVerify:
    def test_whole(self, capsys, dump):
        status, out, _ = run(capsys, "verify", dump, "--json")
        found = json.loads(out)
        assert status == 0 and found["ok"] and found["has_checksums"] and not found["problems"] + found["notes"]
        payload = sum(path.stat().st_size - 296 for path in dump.iterdir() if path.suffix != ".json")
        assert found["checked_bytes"] == payload
        assert run(capsys, "verify", dump)[1].startswith("whole: ")

    def test_every_problem_is_listed(self, capsys, dump):
        for file in ("one_0-weight", "one_0-Adam-v", "two_0-key"):
            damage(dump / file)
        status, out, _ = run(capsys, "verify", dump, "--json")
        files = [os.path.basename(problem["file"]) for problem in json.loads(out)["problems"]]
        assert status == 1 and files == ["one_0-weight", "one_0-Adam-v", "two_0-key"]
        status, out, _ = run(capsys, "verify", dump)
        assert status == 1 and out.count("damaged: ") == 3 and "NOT whole" in out

    def test_sizes(self, capsys, dump):
        os.truncate(dump / "one_0-key", 300)
        status, out, _ = run(capsys, "verify", dump, "--json")
        assert status == 1 and json.loads(out)["problems"][0]["file"].endswith("one_0-key")

    def test_legacy(self, capsys, tmp_path):
        cases.write_legacy(tmp_path / "d", cases.model())
        status, out, _ = run(capsys, "verify", tmp_path / "d")
        assert status == 0 and "no checksums" in out

    def test_strangers_are_noted(self, capsys, dump):
        (dump / "old-key").write_bytes(b"x")
        (dump / "readme").write_bytes(b"x")
        status, out, _ = run(capsys, "verify", dump, "--json")
        assert status == 0 and json.loads(out)["notes"] == ["old-key is no part of this dump"]


class TestDiff:
    def test_order_and_ranks_do_not_matter(self, capsys, dump, models, tmp_path):
        cases.results(cases.dump(tmp_path / "e", models, 3, shuffle=4))
        assert (dump / "one_0-key").read_bytes() != (tmp_path / "e" / "one_0-key").read_bytes()
        status, out, _ = run(capsys, "diff", dump, tmp_path / "e", "--json")
        assert status == 0 and json.loads(out)["equal"]
        assert run(capsys, "diff", dump, tmp_path / "e")[1].endswith("equal\n")

    def test_with_a_dump_of_sok_2(self, capsys, dump, models, tmp_path):
        for held in models[:2]:
            cases.write_legacy(tmp_path / "e", held, 3)
        cases.results(cases.dump(dump, models[:2], 2))
        assert run(capsys, "diff", dump, tmp_path / "e")[0] == 0

    def test_what_differs(self, capsys, dump, models, tmp_path):
        one, three = models[0], models[2]
        one.weights = one.weights.copy()
        one.weights[[5, 9], 2] += [np.float32(0.25), np.float32(8)]
        one.states = {"m": one.states["m"], "v": one.states["v"].copy()}
        one.states["v"][30, 1] = np.nan
        three.keys = three.keys.copy()
        three.keys[4] = 12345
        cases.results(cases.dump(tmp_path / "e", models[:3], 1, step=6))
        status, out, _ = run(capsys, "diff", dump, tmp_path / "e", "--json")
        found = json.loads(out)
        assert status == 1 and not found["equal"]
        assert found["only_first"] == ["empty"] and found["only_second"] == []
        assert found["metadata"] == [{"member": "step", "first": 5, "second": 6}]
        first = found["tables"][0]["fields"]
        assert first["weight"]["rows_that_differ"] == 2
        assert first["weight"]["largest_difference"] == pytest.approx(8, rel=1e-6)
        assert first["Adam-m"]["rows_that_differ"] == 0
        assert first["Adam-v"]["rows_that_differ"] == 1 and first["Adam-v"]["largest_difference"] == "inf"
        assert (found["tables"][2]["only_first"], found["tables"][2]["only_second"]) == (1, 1)
        status, out, _ = run(capsys, "diff", dump, tmp_path / "e", "--json", "--tolerance", "1")
        assert json.loads(out)["tables"][0]["fields"]["weight"]["rows_that_differ"] == 1
        status, out, _ = run(capsys, "diff", dump, tmp_path / "e")
        assert status == 1 and "step: 5 | 6" in out and "table empty: only in" in out and out.endswith("different\n")

    def test_dimension_and_states(self, capsys, tmp_path):
        cases.results(cases.dump(tmp_path / "d", [cases.model(dimension=4)]))
        cases.results(cases.dump(tmp_path / "e", [cases.model(dimension=5, optimizer=None)]))
        status, out, _ = run(capsys, "diff", tmp_path / "d", tmp_path / "e", "--json")
        table = json.loads(out)["tables"][0]
        assert status == 1 and not table["fields"]["weight"]["comparable"]
        assert table["states_in_one"] == [{"state": "Adam-m", "in": "first"}, {"state": "Adam-v", "in": "first"}]

    def test_damage_is_not_a_difference(self, capsys, dump, tmp_path, models):
        cases.results(cases.dump(tmp_path / "e", models))
        damage(dump / "one_0-key")
        assert run(capsys, "diff", dump, tmp_path / "e")[0] == 2


@pytest.mark.parametrize("ending", FAMILY)
class TestConvert:
    def test_there_and_back(self, capsys, dump, models, tmp_path, ending):
        archive, back = tmp_path / f"x{ending}", tmp_path / "back"
        assert run(capsys, "convert", dump, archive)[0] == 0
        assert run(capsys, "convert", archive, back)[0] == 0
        assert run(capsys, "diff", dump, back)[0] == 0
        for path in dump.iterdir():
            if path.name != "sok_manifest.json":
                assert path.read_bytes() == (back / path.name).read_bytes()
        with ck.open_dump(dump) as one, ck.open_dump(back) as two:
            assert [table.table for table in one.tables.values()] == [table.table for table in two.tables.values()]
            assert (one.step, one.extra, one.optimizer) == (two.step, two.extra, two.optimizer)
        assert sorted(os.listdir(tmp_path)) == sorted(["back", "d", f"x{ending}"])

    def test_common_libraries_read_it(self, capsys, dump, models, tmp_path, ending):
        archive = tmp_path / f"x{ending}"
        assert run(capsys, "convert", dump, archive)[0] == 0
        if ending == ".npz":
            found = np.load(archive, allow_pickle=False)
        else:
            found = pytest.importorskip("safetensors.numpy").load_file(archive)
        keys = found["one_0/key"]
        cases.same_bits(found["one_0/weight"], models[0].weights[keys])
        cases.same_bits(found["one_0/Adam/v"], models[0].states["v"][keys])

    def test_archives_of_common_libraries_are_read(self, capsys, models, tmp_path, ending):
        held = models[0]
        arrays = {
            "t/key": held.keys,
            "t/weight": held.weights,
            "t/Adam/m": held.states["m"],
            "u/key": np.array([5, -3]),
            "u/weight": np.ones((2, 3), np.float64),
        }
        archive = tmp_path / f"x{ending}"
        if ending == ".npz":
            np.savez_compressed(archive, **arrays)
        else:
            pytest.importorskip("safetensors.numpy").save_file(arrays, archive)
        assert run(capsys, "convert", archive, tmp_path / "d")[0] == 0
        with ck.open_dump(tmp_path / "d") as dump:
            one, two = dump.table("t").table, dump.table("u").table
            assert (one.kind, one.dimension, one.optimizer, list(one.states)) == ("static", 4, "Adam", ["m"])
            assert (two.kind, two.dimension, two.value_dtype) == ("dynamic", 3, "float64")
        out = np.zeros_like(held.weights)

        def assign(rows):
            out[rows.keys] = rows.weights

        ck.load(tmp_path / "d", [ck.Target("t", 4, assign, rows=37)])
        cases.same_bits(out, held.weights)

    def test_nothing_is_replaced_unasked(self, capsys, dump, tmp_path, ending):
        archive = tmp_path / f"x{ending}"
        archive.write_bytes(b"mine")
        status, _, err = run(capsys, "convert", dump, archive)
        assert status == 2 and "exists already" in err and archive.read_bytes() == b"mine"
        assert run(capsys, "convert", dump, archive, "--force")[0] == 0
        status, _, err = run(capsys, "convert", archive, dump)
        assert status == 2 and "exists already" in err
        assert run(capsys, "convert", archive, dump, "--force")[0] == 0

    def test_damage_leaves_nothing(self, capsys, dump, tmp_path, ending):
        damage(dump / "one_0-weight")
        archive = tmp_path / f"x{ending}"
        status, _, err = run(capsys, "convert", dump, archive)
        assert status == 2 and "one_0-weight" in err
        assert os.listdir(tmp_path) == ["d"]

    @pytest.mark.parametrize("size", [0, 7, 100, 2000])
    def test_truncated_archive(self, capsys, dump, tmp_path, ending, size):
        archive = tmp_path / f"x{ending}"
        assert run(capsys, "convert", dump, archive)[0] == 0
        os.truncate(archive, size)
        status, _, err = run(capsys, "convert", archive, tmp_path / "e")
        assert status == 2 and str(archive) in err and not (tmp_path / "e").exists()

    def test_legacy(self, capsys, models, tmp_path, ending):
        for held in models[:2]:
            cases.write_legacy(tmp_path / "d", held, 2)
        archive = tmp_path / f"x{ending}"
        assert run(capsys, "convert", tmp_path / "d", archive)[0] == 0
        assert run(capsys, "convert", archive, tmp_path / "e")[0] == 0
        cases.check(cases.load(tmp_path / "e", models[:2], 3), models[:2])


class TestConvertMore:
    def test_legacy_to_a_dump_with_a_manifest(self, capsys, models, tmp_path):
        for held in models[:2]:
            cases.write_legacy(tmp_path / "d", held, 2)
        assert run(capsys, "convert", tmp_path / "d", tmp_path / "e")[0] == 0
        with ck.open_dump(tmp_path / "e") as dump:
            assert dump.manifest is not None and dump.optimizer == ck.Optimizer("Adam")
            assert [table.table.kind for table in dump.tables.values()] == ["static", "static"]
        cases.check(cases.load(tmp_path / "e", models[:2], 3), models[:2])

    def test_legacy_with_two_optimizers(self, capsys, tmp_path):
        cases.write_legacy(tmp_path / "d", cases.model(optimizer="Adam"))
        cases.write_legacy(tmp_path / "d", cases.model(optimizer="Ftrl"))
        status, _, err = run(capsys, "convert", tmp_path / "d", tmp_path / "x.npz")
        assert status == 2 and "states of Adam, Ftrl; expected one of them, named by --optimizer" in err
        assert run(capsys, "convert", tmp_path / "d", tmp_path / "x.npz", "--optimizer", "Ftrl")[0] == 0
        assert "table0_0/Ftrl/linear" in np.load(tmp_path / "x.npz")

    def test_npz_with_a_pickle(self, capsys, tmp_path):
        arrays: dict[str, Any] = {"t/key": np.array([object()]), "t/weight": np.ones((1, 1))}
        np.savez(tmp_path / "x.npz", **arrays)
        status, _, err = run(capsys, "convert", tmp_path / "x.npz", tmp_path / "d")
        assert status == 2 and "t/key is object" in err

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"t/key": np.arange(2)}, "no matrix t/weight"),
            ({"t/key": np.arange(2), "t/weight": np.ones((3, 2))}, r"t/weight is float64 \[3, 2\]"),
            ({"t/key": np.arange(2.0), "t/weight": np.ones((2, 2))}, "t/key is float64"),
            ({"../t/key": np.arange(2), "../t/weight": np.ones((2, 2))}, "without punctuation"),
            ({"x": np.ones(2)}, "holds no tables"),
            ({}, "holds no tables"),
        ],
    )
    def test_npz_of_another_shape(self, capsys, tmp_path, arrays, message):
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(ck.CheckpointError, match=message):
            from sparse_operation_kit.checkpoint.convert import convert

            convert(str(tmp_path / "x.npz"), str(tmp_path / "d"))
        assert os.listdir(tmp_path) == ["x.npz"]

    def test_npz_with_a_wrong_crc(self, capsys, dump, tmp_path):
        assert run(capsys, "convert", dump, tmp_path / "x.npz")[0] == 0
        with zipfile.ZipFile(tmp_path / "x.npz") as archive:
            entry = archive.getinfo("one_0/weight.npy")
        damage(tmp_path / "x.npz", entry.header_offset + entry.file_size)
        status, _, err = run(capsys, "convert", tmp_path / "x.npz", tmp_path / "e")
        assert status == 2 and "x.npz" in err and not (tmp_path / "e").exists()

    @pytest.mark.parametrize(
        "entry",
        [
            {"dtype": "F32", "shape": [1 << 40, 1], "data_offsets": [0, 1 << 42]},
            {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]},
            {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]},
            {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
            {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
            [],
        ],
    )
    def test_safetensors_that_lie(self, tmp_path, entry):
        text = json.dumps({"t/weight": entry}).encode()
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
        with pytest.raises(ck.FormatError, match=r"x\.safetensors"):
            archives.Archive(str(tmp_path / "x.safetensors"))


def test_usage(capsys):
    for arguments in ([], ["other"], ["inspect"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "convert" in capsys.readouterr().out


def test_module_runs(dump):
    command = [sys.executable, "-m", "sparse_operation_kit.checkpoint", "verify", str(dump)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("whole")


def test_names_cannot_reach_the_terminal(capsys, tmp_path):
    held = cases.model("\u202e\u200b[bold]x", optimizer=None)
    cases.results(cases.dump(tmp_path / "d", [held], extra="\x1b[2J"))
    out = run(capsys, "inspect", tmp_path / "d")[1]
    assert "\x1b" not in out and "\u202e" not in out and "[bold]x" in out


def test_terminal_table_without_rich(capsys, monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display.show_table(("name", "rows"), [("a", 1), ("long", 23456)])
    assert capsys.readouterr().out == "name    rows\na          1\nlong  23,456\n"


def test_terminal_table(dump):
    """On a real terminal, with whatever is installed."""
    main, other = pty.openpty()
    command = [sys.executable, "-m", "sparse_operation_kit.checkpoint", "inspect", str(dump)]
    done = subprocess.run(command, stdout=other, timeout=60, env={**os.environ, "COLUMNS": "160"})
    os.close(other)
    parts = []
    with contextlib.suppress(OSError):  # the end of a terminal; what was written comes in pieces
        while part := os.read(main, 1 << 16):
            parts.append(part)
    os.close(main)
    out = b"".join(parts).decode()
    assert done.returncode == 0 and "one:0" in out and "localized:1" in out


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 62, "4096.0 PiB")])
def test_sizes(count, text):
    assert display.size(count) == text


COMMAND = [sys.executable, "-m", "sparse_operation_kit.checkpoint"]


def test_a_name_that_the_output_cannot_show(tmp_path):
    cases.results(cases.dump(tmp_path / "d", [cases.model("größe", 3, 2)], 1))
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "inspect", tmp_path / "d"], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0 and r"gr\xf6\xdfe" in done.stdout, done.stderr


def test_an_output_that_takes_no_more(dump):
    """Status 1 would say that the dump is damaged."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody, open("/dev/full", "wb") as full:
        for output, message in ((nobody, ""), (full, "error: [Errno 28] No space left on device\n")):
            command = [*COMMAND, "verify", dump, "--json"]
            done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (2, message)
