# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.dlrm import columns
from examples.dlrm.generate import Recipe
from examples.dlrm.power_law import BoundedPowerLaw, scatter
from examples.dlrm.writing import SUMMARY, generate

SMALL = Recipe(rows=700, valid_rows=100, max_cardinality=50, files=2, rows_per_group=64)


def read(directory):
    return ds.dataset(directory, format="parquet").to_table()


def test_has_criteos_columns_and_missing_values(generated):
    directory, summary = generated
    table = read(directory / "train")
    assert table.column_names == list(columns.ALL)
    assert table.num_rows == summary["train"]["rows"] == 5000
    assert table["label"].null_count == 0
    missing = [table[name].null_count / 5000 for name in (*columns.DENSE, *columns.CATEGORICAL)]
    np.testing.assert_allclose(missing, columns.DENSE_MISSING + columns.CATEGORICAL_MISSING, atol=0.03)
    for name, rows in zip(columns.CATEGORICAL, columns.table_rows(300), strict=True):
        values = table[name].drop_null().to_numpy()
        assert values.min() >= 0
        assert values.max() < rows


def test_files_and_row_groups(generated):
    directory, _ = generated
    files = sorted((directory / "train").iterdir())
    assert len(files) == 3
    groups = [
        pq.ParquetFile(file).metadata.row_group(i).num_rows
        for file in files
        for i in range(pq.ParquetFile(file).num_row_groups)
    ]
    assert groups == [128] * 39 + [8]


def test_ids_follow_a_power_law(generated):
    directory, _ = generated
    counts = np.sort(np.bincount(read(directory / "train")["C2"].to_numpy(), minlength=300))[::-1]
    weights = np.arange(1, 301) ** -1.05
    np.testing.assert_allclose(counts[:3] / 5000, (weights / weights.sum())[:3], rtol=0.2)


def test_labels_can_be_predicted_and_not_perfectly(generated):
    _, summary = generated
    for split in ("train", "valid"):
        assert 0.8 < summary[split]["achievable_auc"] < 0.9
        assert 0.15 < summary[split]["click_rate"] < 0.35


def test_rows_depend_on_the_seed_and_not_on_the_files(tmp_path):
    generate(tmp_path / "a", SMALL)
    generate(tmp_path / "b", dataclasses.replace(SMALL, files=5))
    generate(tmp_path / "c", dataclasses.replace(SMALL, seed=1))
    assert read(tmp_path / "a" / "train").equals(read(tmp_path / "b" / "train"))
    assert read(tmp_path / "a" / "valid").equals(read(tmp_path / "b" / "valid"))
    assert read(tmp_path / "a" / "valid").num_rows == 100
    assert not read(tmp_path / "a" / "train").equals(read(tmp_path / "c" / "train"))


def test_the_splits_differ(tmp_path):
    generate(tmp_path, SMALL)
    train, valid = (read(tmp_path / split) for split in ("train", "valid"))
    assert not train.slice(0, 64).equals(valid.slice(0, 64))


def test_is_made_once(tmp_path):
    summary = generate(tmp_path, SMALL)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert generate(tmp_path, SMALL) == summary
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == files


def test_another_recipe_replaces_it(tmp_path):
    generate(tmp_path, SMALL)
    generate(tmp_path, dataclasses.replace(SMALL, rows=65, files=1))
    assert read(tmp_path / "train").num_rows == 65


def test_what_was_interrupted_is_made_again(tmp_path):
    generate(tmp_path, SMALL)
    summary = json.loads((tmp_path / SUMMARY).read_text())
    (tmp_path / SUMMARY).write_text(json.dumps({**summary, "complete": False}))
    (tmp_path / "train" / "part-0000.parquet").write_bytes(b"half")
    assert generate(tmp_path, SMALL) == summary
    assert read(tmp_path / "train").num_rows == 700


def test_somebody_elses_directory_is_left_alone(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "precious").write_text("data")
    with pytest.raises(FileExistsError, match="choose another directory"):
        generate(tmp_path, SMALL)
    assert (tmp_path / "train" / "precious").read_text() == "data"


@pytest.mark.parametrize("field", ["rows", "valid_rows", "max_cardinality", "files", "rows_per_group"])
def test_sizes_are_checked(field):
    with pytest.raises(ValueError, match=field.replace("_", "-")):
        Recipe(**{field: 0})


@given(st.integers(1, 500), st.integers(0, 9))
def test_scatter_is_one_to_one(count, seed):
    ids = scatter(np.arange(count), count, seed)
    assert sorted(ids) == list(range(count))


def test_power_law_stays_in_bounds():
    ranks = BoundedPowerLaw(3, 1.05).sample(np.random.default_rng(0), 10_000)
    assert set(ranks) == {0, 1, 2}
    with pytest.raises(ValueError, match="count"):
        BoundedPowerLaw(0, 1.05)
