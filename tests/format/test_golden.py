# SPDX-License-Identifier: Apache-2.0
"""A dump that was made once, on 2 ranks, and is kept as bytes. Nothing here writes into tests/format/golden."""

import json
import pathlib

import checkpoint_cases as cases
import numpy as np
import pytest

import sparse_operation_kit.checkpoint as ck

GOLDEN = pathlib.Path(__file__).parent / "golden" / "dump"


def _values(rows, columns, first):
    """Numbers that need no random generator: first, first + 1/8, ..."""
    return (first + np.arange(rows * columns, dtype=np.float64) / 8).reshape(rows, columns)


def golden_models():
    adam = {"m": ck.State("float32", 3), "v": ck.State("float32", 3)}
    static = ck.Table("table0:0", 3, seed=7, initializer="uniform", optimizer="Adam", states=adam)
    localized = ck.Table("user/embedding:0", 2, "float16", mode="localized:1")
    dynamic = ck.Table("items", 1, "float64", kind="dynamic", key_dtype="int32")
    return [
        cases.Model(
            static,
            np.arange(7),
            _values(7, 3, -1).astype(np.float32),
            {"m": _values(7, 3, 100).astype(np.float32), "v": _values(7, 3, 200).astype(np.float32)},
        ),
        cases.Model(localized, np.arange(4), _values(4, 2, 0).astype(np.float16), {}),
        cases.Model(dynamic, np.array([-(2**31), -1, 0, 5, 2**31 - 1]), _values(5, 1, 0.5), {}),
    ]


def write_golden(path):
    models = golden_models()
    optimizer = ck.Optimizer("Adam", 12, {"learning_rate": 0.001, "beta_1": 0.9, "amsgrad": False})
    options = {"optimizer": optimizer, "step": 12, "extra": {"epoch": 1, "note": "golden é"}, "chunk_bytes": 24}
    cases.results(cases.on_ranks(2, lambda group: _write(path, models, group, options)))


def _write(path, models, group, options):
    ck.dump(path, [model.source(group.rank, group.size) for model in models], group=group, **options)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_still_loads(readers):
    models = golden_models()
    cases.check(cases.load(GOLDEN, models[:1], readers), models[:1])
    cases.check(cases.load(GOLDEN, models[1:2], readers, optimizer=None), models[1:2])
    loaded = cases.Loaded(models[2], -1)
    ck.load(GOLDEN, [loaded.target(key_dtype="int32")])
    cases.check([[loaded]], models[2:])


def test_metadata():
    with ck.open_dump(GOLDEN) as dump:
        assert (dump.world_size, dump.step, dump.extra) == (2, 12, {"epoch": 1, "note": "golden é"})
        assert dump.optimizer.hyperparameters == {"learning_rate": 0.001, "beta_1": 0.9, "amsgrad": False}
        assert [table.table.name for table in dump.tables.values()] == ["table0:0", "user/embedding:0", "items"]


def test_what_is_written_today_is_the_same(tmp_path):
    write_golden(tmp_path / "d")
    names = sorted(path.name for path in GOLDEN.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "d").iterdir())
    for name in names:
        written, golden = (tmp_path / "d" / name).read_bytes(), (GOLDEN / name).read_bytes()
        if name == "sok_manifest.json":
            written, golden = json.loads(written), json.loads(golden)
            for document in (written, golden):
                # They say which version of the package wrote, and so does the checksum.
                del document["writer"]["version"], document["manifest_xxh3_128"]
        assert written == golden, name


def test_the_specifications_reader_reads_it():
    """docs/FORMAT.md ends with a reader; it is run as it stands there."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
    scope = {}
    exec(text.rsplit("```python", 1)[1].split("```")[0], scope)
    for index, model in enumerate(golden_models()):
        keys, weights = scope["read_table"](GOLDEN, index)
        places = {key: row for row, key in enumerate(model.keys.tolist())}
        cases.same_bits(weights, model.weights[[places[key] for key in keys.tolist()]])


def test_bytes_by_hand():
    """One file without this package's code: 256 spaces, kind 2, "m" in 32 bytes, float32, and rank 0's rows first."""
    data = (GOLDEN / "table0_0-Adam-m").read_bytes()
    assert data[:296] == b" " * 256 + b"\0\0\0\2" + b"m".rjust(32) + b"\0\0\0\5"
    rows = np.frombuffer(data[296:], "<f4").reshape(7, 3)
    keys = np.frombuffer((GOLDEN / "table0_0-key").read_bytes()[296:], "<i8")
    assert keys.tolist() == [0, 2, 4, 6, 1, 3, 5]
    assert (rows == (100 + (keys[:, None] * 3 + np.arange(3)) / 8)).all()
    assert (GOLDEN / "user_embedding_0-key").read_bytes()[292:] == b"\0\0\0\3" + np.arange(4, dtype="<u8").tobytes()
