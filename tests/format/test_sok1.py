# SPDX-License-Identifier: Apache-2.0
"""The files of SOK 1.x's Saver: convert reads and writes them."""

import numpy as np
import pytest

from sparse_operation_kit.checkpoint import CheckpointError, open_dump, sok1
from sparse_operation_kit.checkpoint.cli import main


def write(folder, name, keys, rows):
    folder.mkdir(exist_ok=True)
    keys.tofile(folder / f"{name}_keys.file")
    rows.astype(np.float32).tofile(folder / f"{name}_values.file")


def of(folder, name, dimension):
    with_rows = sok1.Files(str(folder), name, dimension)
    return {int(k): row.tolist() for keys, rows in with_rows.pieces(3) for k, row in zip(keys, rows, strict=True)}


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_there_and_back(dtype, tmp_path):
    rng = np.random.default_rng(1)
    some = rng.choice(2**31, 101, replace=False).astype(dtype)
    write(tmp_path / "old", "users", some, rng.normal(size=(101, 4)))
    write(tmp_path / "old", "items", rng.permutation(50).astype(dtype), rng.normal(size=(50, 4)))
    arguments = ["convert", str(tmp_path / "old"), str(tmp_path / "new"), "--dimension", "4"]
    assert main(arguments) == 0
    with open_dump(str(tmp_path / "new")) as dump:
        described = {
            name: (t.table.kind, t.rows, t.table.dimension, t.table.key_dtype) for name, t in dump.tables.items()
        }
    key_dtype = np.dtype(dtype).name
    assert described == {"items_0": ("static", 50, 4, key_dtype), "users_0": ("dynamic", 101, 4, key_dtype)}
    assert main(["convert", str(tmp_path / "new"), str(tmp_path / "again"), "--sok1"]) == 0
    for name in ("users", "items"):
        assert of(tmp_path / "again", name, 4) == of(tmp_path / "old", name, 4)
        assert sok1.Files(str(tmp_path / "again"), name, 4).key_dtype == key_dtype
    assert main(arguments) == 2, "exists already"


def test_sizes_that_allow_two_dimensions(tmp_path, capsys):
    write(tmp_path / "old", "users", np.array([2**40 + 7, -5]), np.ones((2, 4)))  # or four uint32 keys of 2 elements
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert "a dimension, 2 or 4" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new"), "--dimension", "4"]) == 0
    write(tmp_path / "small", "users", np.arange(4), np.ones((4, 3)))  # two words that are 0: no uint32 keys
    found = sok1.Files(str(tmp_path / "small"), "users")
    assert (found.key_dtype, found.dimension, found.rows) == ("int64", 3, 4)
    write(tmp_path / "odd", "users", np.arange(3, dtype=np.uint32), np.ones((3, 3)))
    assert sok1.Files(str(tmp_path / "odd"), "users").key_dtype == "uint32"


def test_what_is_not_committed_is_gone(tmp_path):
    with sok1.Writer(str(tmp_path), "users", "int64") as writer:
        writer.append(np.arange(2), np.ones((2, 3)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="without slashes"):
        sok1.Writer(str(tmp_path), "../users", "int64")
