# SPDX-License-Identifier: Apache-2.0
"""Dumps of SOK 2.x: the same files, no manifest."""

import checkpoint_cases as cases
import numpy as np
import pytest

import sparse_operation_kit.checkpoint as ck


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_loads_at_any_world_size(tmp_path, writers, readers, kind):
    held = [
        cases.model("a:0", 29, 4, kind=kind),
        cases.model("b:0", 7, 16, kind=kind, optimizer="Adam"),
    ]
    for entry in held:
        cases.write_legacy(tmp_path / "d", entry, writers)
    cases.check(cases.load(tmp_path / "d", held, readers), held)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_localized(tmp_path, readers):
    held = cases.model(mode="localized:1")
    cases.write_legacy(tmp_path / "d", held, 2)
    cases.check(cases.load(tmp_path / "d", [held], readers), [held])
    cases.check(cases.load(tmp_path / "d", [held], readers, owner=-1), [held])


@pytest.mark.parametrize("optimizer", ["Adamax", "AdamW"])
def test_states_under_adams_name(tmp_path, optimizer):
    held = cases.model(optimizer=optimizer)
    cases.write_legacy(tmp_path / "d", held, 2, optimizer_name="Adam")
    cases.check(cases.load(tmp_path / "d", [held], 2), [held])


def test_adams_name_only_without_a_manifest(tmp_path):
    cases.results(cases.dump(tmp_path / "d", [cases.model(optimizer="Adam")]))
    with pytest.raises(ck.MismatchError, match=r"table0_0-Adamax-m.*has no state 'm' of Adamax"):
        cases.results(cases.load(tmp_path / "d", [cases.model(optimizer="Adamax")]))


def test_adam_does_not_read_adamax(tmp_path):
    held = cases.model(optimizer="Adamax")
    cases.write_legacy(tmp_path / "d", held)
    with pytest.raises(ck.MismatchError, match="table0_0-Adam-m"):
        cases.results(cases.load(tmp_path / "d", [cases.model(optimizer="Adam")]))


def test_text_in_the_reserved_bytes(tmp_path):
    held = cases.model()
    cases.write_legacy(tmp_path / "d", held)
    for file in (tmp_path / "d").iterdir():
        with open(file, "r+b") as out:
            out.write(b"table0".rjust(256))
    cases.check(cases.load(tmp_path / "d", [held]), [held])


def test_two_optimizers_in_one_directory(tmp_path):
    adam, ftrl = cases.model(optimizer="Adam"), cases.model(optimizer="Ftrl", seed=0)
    ftrl.weights, ftrl.keys = adam.weights, adam.keys
    cases.write_legacy(tmp_path / "d", adam)
    cases.write_legacy(tmp_path / "d", ftrl)
    cases.check(cases.load(tmp_path / "d", [adam]), [adam])
    cases.check(cases.load(tmp_path / "d", [ftrl]), [ftrl])


def test_other_files_are_left_alone(tmp_path):
    held = cases.model()
    cases.write_legacy(tmp_path / "d", held)
    for name in ("meta_info", "notes.txt", "a-b-c", "a-b"):
        (tmp_path / "d" / name).write_bytes(b"x")
    cases.check(cases.load(tmp_path / "d", [held]), [held])


def _edit(name, change):
    def edit(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(change(data))

    return edit


def _doubled(*names):
    def edit(folder):
        for name in names:
            _edit(f"table0_0-{name}", lambda data: data + data[296:])(folder)

    return edit


def _key(index, value):
    def change(data):
        keys = np.frombuffer(data[296:], np.int64).copy()
        keys[index] = value
        return data[:296] + keys.tobytes()

    return change


_DEFECTS = {
    "no key file": (lambda folder: (folder / "table0_0-key").unlink(), "table0_0-key", "missing"),
    "no weight file": (lambda folder: (folder / "table0_0-weight").unlink(), "table0_0-weight", "missing"),
    "no state file": (lambda folder: (folder / "table0_0-Adam-v").unlink(), "table0_0-Adam-v", "no state 'v' of Adam"),
    "short header": (_edit("table0_0-key", lambda data: data[:200]), "table0_0-key", "expected at least 296 bytes"),
    "half a key": (_edit("table0_0-key", lambda data: data[:-3]), "table0_0-key", "expected a multiple of 8"),
    "key missing": (_edit("table0_0-key", lambda data: data[:-8]), "table0_0-weight", "no whole number of rows"),
    "weight missing": (_edit("table0_0-weight", lambda data: data[:-4]), "table0_0-weight", "expected a multiple of"),
    "row missing": (_edit("table0_0-weight", lambda data: data[:-16]), "table0_0-weight", "expected a multiple of"),
    "no rows": (_edit("table0_0-weight", lambda data: data[:296]), "table0_0-weight", "has no rows"),
    "other dimension": (_doubled("weight", "Adam-m", "Adam-v"), "table0_0-weight", "expected dimension 4"),
    "state of other dimension": (_doubled("Adam-m"), "table0_0-Adam-m", "has 8 elements a row"),
    "no keys": (_edit("table0_0-key", lambda data: data[:296]), "table0_0-weight", "the key file has none"),
    "key file is a weight": (
        _edit("table0_0-key", lambda data: data[:259] + b"\1" + data[260:]),
        "table0_0-key",
        "a header of key",
    ),
    "kind 9": (_edit("table0_0-key", lambda data: data[:259] + b"\x09" + data[260:]), "table0_0-key", "kind is 9"),
    "dtype 9": (
        _edit("table0_0-weight", lambda data: data[:295] + b"\x09" + data[296:]),
        "table0_0-weight",
        "dtype is 9",
    ),
    "keys are floats": (_edit("table0_0-key", lambda data: data[:295] + b"\6" + data[296:]), "table0_0-key", "float64"),
    "other state": (_edit("table0_0-Adam-m", lambda data: data[:291] + b"v" + data[292:]), "table0_0-Adam-m", "'v'"),
    "key too large": (_edit("table0_0-key", _key(3, 23)), "table0_0-key", r"the key 23; expected keys in \[0, 22\]"),
    "key negative": (_edit("table0_0-key", _key(3, -1)), "table0_0-key", "the key -1"),
    "key twice": (_edit("table0_0-key", _key(3, 4)), "table0_0-key", "lacks the key 3"),
}


@pytest.mark.parametrize(("damage", "file", "message"), _DEFECTS.values(), ids=_DEFECTS)
@pytest.mark.parametrize("readers", [1, 2])
def test_what_can_be_checked_is_checked(tmp_path, damage, file, message, readers):
    held = cases.model()
    cases.write_legacy(tmp_path / "d", held)
    damage(tmp_path / "d")
    with pytest.raises(ck.CheckpointError, match=message) as caught:
        cases.results(cases.load(tmp_path / "d", [held], readers))
    assert file in str(caught.value)


def test_repeated_key_on_one_rank_of_two(tmp_path):
    held = cases.model(rows=6)
    cases.write_legacy(tmp_path / "d", held)
    _edit("table0_0-key", lambda data: data[:-8] + data[-24:-16])(tmp_path / "d")  # 0 1 2 3 4 3
    with pytest.raises(ck.KeysError, match="lacks the key 5"):
        cases.results(cases.load(tmp_path / "d", [held], 2))


def test_empty_directory(tmp_path):
    with pytest.raises(ck.MissingFileError, match=r"sok_manifest\.json"):
        ck.open_dump(tmp_path)
    with pytest.raises(ck.MissingFileError, match="nowhere"):
        ck.open_dump(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ck.FormatError, match="is not a directory"):
        ck.open_dump(tmp_path / "file")
