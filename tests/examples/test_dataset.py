# SPDX-License-Identifier: Apache-2.0
"""Criteo text and Parquet as people have them."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from criteo_bags import bags_of

from examples.dlrm import columns, dataset
from examples.dlrm.errors import DataError
from examples.dlrm.features import CriteoLayout
from examples.dlrm.reader import Reader

TABLE_ROWS = columns.table_rows(100)


def write(file, lines, delimiter="\t", header=False, end="\n"):
    lines = [list(columns.ALL), *lines] if header else lines
    file.write_text("".join(delimiter.join(line) + end for line in lines), newline="")


def read(path, split="train"):
    return list(Reader(getattr(dataset.find(path), split), 16, CriteoLayout(TABLE_ROWS)))


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.global_rows == other.global_rows
        np.testing.assert_array_equal(batch.labels, other.labels)
        np.testing.assert_array_equal(batch.dense, other.dense)
        np.testing.assert_array_equal(batch.ids.values(), other.ids.values())
        np.testing.assert_array_equal(batch.ids.offsets(), other.ids.offsets())


def expected_rows(lines):
    """What the documentation says about each field, by plain Python."""
    dense = [[np.log1p(max(float(text), 0)) if text else 0.0 for text in line[1:14]] for line in lines]
    bags = [
        [[int(text, 16) % size] if text else [] for text, size in zip(line[14:], TABLE_ROWS, strict=True)]
        for line in lines
    ]
    return dense, bags


def test_tab_separated_without_header(tmp_path, criteo_lines):
    lines = criteo_lines(45)
    write(tmp_path / "day_0", lines)
    kept = [line for i, line in enumerate(lines) if i % 10 != 9]
    dense, bags = expected_rows(kept)
    batches = read(tmp_path / "day_0")
    assert [len(batch.labels) for batch in batches] == [16, 16, 9]
    np.testing.assert_allclose(np.concatenate([batch.dense for batch in batches]), dense, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([batch.labels for batch in batches]), [int(line[0]) for line in kept])
    rows = [list(row) for batch in batches for row in zip(*bags_of(batch), strict=True)]
    assert rows == bags
    assert any([] in row for row in rows)


@pytest.mark.parametrize(
    "form",
    [
        {"delimiter": ","},
        {"delimiter": ",", "header": True},
        {"header": True},
        {"end": "\r\n"},
        {"delimiter": ",", "header": True, "end": "\r\n"},
    ],
    ids=str,
)
def test_the_other_forms_of_text_say_the_same(tmp_path, criteo_lines, form):
    lines = criteo_lines(45)
    write(tmp_path / "plain.txt", lines)
    write(tmp_path / "other.txt", lines, **form)
    assert_same(read(tmp_path / "other.txt"), read(tmp_path / "plain.txt"))


def test_compressed_and_divided_text_says_the_same(tmp_path, criteo_lines):
    lines = criteo_lines(45)
    write(tmp_path / "plain.txt", lines)
    parts = tmp_path / "parts"
    parts.mkdir()
    write(parts / "b.txt", lines[20:], delimiter=",")
    write(tmp_path / "a.txt", lines[:20], header=True)
    (parts / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    assert_same(read(parts), read(tmp_path / "plain.txt"))


def test_parquet_of_text_or_of_numbers_says_the_same(tmp_path, criteo_lines):
    lines = criteo_lines(45)
    write(tmp_path / "plain.txt", lines)
    as_text = {name: [line[i] or None for line in lines] for i, name in enumerate(columns.ALL)}
    as_numbers = {
        name: [None if text is None else int(text, 16 if name in columns.CATEGORICAL else 10) for text in texts]
        for name, texts in as_text.items()
    }
    for name, table in (("text", pa.table(as_text)), ("numbers", pa.table({"more": [0] * 45, **as_numbers}))):
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
        assert_same(read(tmp_path / f"{name}.parquet"), read(tmp_path / "plain.txt"))
    (tmp_path / "numbers.parquet").rename(tmp_path / "no_suffix")
    assert_same(read(tmp_path / "no_suffix"), read(tmp_path / "plain.txt"))


def test_header_may_name_columns_in_any_order_and_more(tmp_path, criteo_lines):
    lines = criteo_lines(12)
    write(tmp_path / "plain.txt", lines)
    write(tmp_path / "turned.csv", [["id", *reversed(columns.ALL)], *(["x", *reversed(line)] for line in lines)], ",")
    assert_same(read(tmp_path / "turned.csv"), read(tmp_path / "plain.txt"))


def test_each_tenth_row_is_held_out(tmp_path, criteo_lines):
    lines = criteo_lines(45)
    write(tmp_path / "all.txt", lines)
    (batch,) = read(tmp_path / "all.txt", "valid")
    dense, _ = expected_rows(lines[9::10])
    np.testing.assert_allclose(batch.dense, dense, rtol=1e-6)


def test_train_and_valid_directories(tmp_path, criteo_lines):
    lines = criteo_lines(30)
    for split, part in (("train", lines[:20]), ("valid", lines[20:])):
        (tmp_path / split).mkdir()
        write(tmp_path / split / "part.tsv", part)
    assert sum(len(batch.labels) for batch in read(tmp_path)) == 20
    assert sum(len(batch.labels) for batch in read(tmp_path, "valid")) == 10


def error_of(path):
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("header", [False, True])
def test_a_malformed_field_is_named(tmp_path, criteo_lines, header):
    lines = criteo_lines(30)
    lines[16][14 + 4] = "25c83cg8"
    write(tmp_path / "bad.txt", lines, header=header)
    assert error_of(tmp_path / "bad.txt").startswith(f"{tmp_path}/bad.txt, row 17, column C5: not a hexadecimal")


def test_a_malformed_field_among_the_held_out_rows_is_named(tmp_path, criteo_lines):
    lines = criteo_lines(30)
    lines[19][3] = "1,5"
    write(tmp_path / "bad.txt", lines)
    with pytest.raises(DataError, match=r"row 20, column I3: not a number: '1,5'"):
        read(tmp_path / "bad.txt", "valid")


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("row", [3, 25])
def test_a_row_with_a_field_too_few_is_named(tmp_path, criteo_lines, row, header):
    lines = criteo_lines(30)
    del lines[row - 1][7]
    write(tmp_path / "bad.txt", lines, header=header)
    assert error_of(tmp_path / "bad.txt") == f"{tmp_path}/bad.txt, row {row}: 39 fields where 40 are expected"


def test_a_first_line_of_another_length(tmp_path, criteo_lines):
    write(tmp_path / "bad.txt", [line[1:] for line in criteo_lines(3)])
    assert "bad.txt: 39 fields in the first line; expected 40" in error_of(tmp_path / "bad.txt")


def test_a_header_without_a_column(tmp_path, criteo_lines):
    write(tmp_path / "bad.txt", [list(columns.ALL[:-1]), *(line[:-1] for line in criteo_lines(3))])
    assert error_of(tmp_path / "bad.txt").endswith("columns missing in the header line: C26")


def test_parquet_without_columns(tmp_path):
    pq.write_table(pa.table({name: [0] for name in columns.ALL if name not in ("I2", "C3")}), tmp_path / "bad.parquet")
    assert error_of(tmp_path / "bad.parquet") == f"{tmp_path}/bad.parquet: columns missing: I2, C3"


def test_an_empty_text_file(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt: 1 fields in the first line" in error_of(tmp_path / "empty.txt")


def test_not_text(tmp_path):
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\xff\xfe\n")
    assert error_of(tmp_path / "picture.txt").endswith("picture.txt: not text")


def test_not_parquet(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"0\t1\t2\n")
    assert "bad.parquet: not a readable Parquet file" in error_of(tmp_path / "bad.parquet")


def test_damaged_parquet(generated, tmp_path):
    content = bytearray(sorted((generated[0] / "train").iterdir())[0].read_bytes())
    content[10:4000] = bytes(3990)
    (tmp_path / "bad.parquet").write_bytes(content)
    assert "bad.parquet: damaged in row group 0" in error_of(tmp_path / "bad.parquet")


def test_the_damaged_row_group_among_others_is_named(generated, tmp_path):
    whole = sorted((generated[0] / "train").iterdir())[0]
    metadata = pq.ParquetFile(whole).metadata
    group = metadata.num_row_groups - 2
    assert group >= 1
    first = metadata.row_group(group).column(0).data_page_offset
    content = bytearray(whole.read_bytes())
    content[first : first + 20] = bytes(20)
    (tmp_path / "bad.parquet").write_bytes(content)
    assert f"bad.parquet: damaged in row group {group}" in error_of(tmp_path / "bad.parquet")


def test_nothing_there(tmp_path):
    assert error_of(tmp_path / "nowhere").endswith("nowhere: no such file or directory")
    (tmp_path / "notes.md").write_text("hello")
    assert "holds no data" in error_of(tmp_path)


def test_both_formats_in_a_directory(generated, tmp_path, criteo_lines):
    write(tmp_path / "a.txt", criteo_lines(3))
    (tmp_path / "b.parquet").write_bytes(sorted((generated[0] / "valid").iterdir())[0].read_bytes())
    assert "holds Parquet (b.parquet) and text (a.txt)" in error_of(tmp_path)
