# SPDX-License-Identifier: Apache-2.0
"""Columns of nested lists: read as they were written, in any batches, on any number of ranks; or refused by name."""

import pathlib
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.dlrm import dataset
from examples.dlrm.arrays import ArrayColumn, ArrayLayout, Ragged, column_of
from examples.dlrm.errors import DataError
from examples.dlrm.parquet_source import ParquetSource
from examples.dlrm.reader import Reader

KINDS = (
    lambda kind, length: pa.list_(kind),
    lambda kind, length: pa.large_list(kind),
    lambda kind, length: pa.list_(kind, length),
)


@st.composite
def nestings(draw):
    """(shape, dtype, type of Arrow, rows): up to three depths, each of one length or (None) of any."""
    shape = draw(st.lists(st.none() | st.integers(0, 3), max_size=3).map(tuple))
    dtype = draw(st.sampled_from(["int64", "float32"]))
    integers = st.integers(-(2**63), 2**63 - 1) if dtype == "int64" else st.integers(-(2**20), 2**20)
    rows: st.SearchStrategy = integers
    kind = pa.int64() if dtype == "int64" else draw(st.sampled_from([pa.float64(), pa.int32()]))
    for length in reversed(shape):
        bounds = (0, 3) if length is None else (length, length)
        rows = st.lists(rows, min_size=bounds[0], max_size=bounds[1])
        kind = draw(st.sampled_from(KINDS[: 3 if length else 2]))(kind, length)
    return shape, dtype, kind, draw(st.lists(rows, max_size=25))


def unnested(array, row):
    """Row `row` of an array or a Ragged, as lists."""
    if not isinstance(array, Ragged):
        return array[row].tolist()

    def part(depth, first, last):
        if depth == len(array.splits):
            return array.values[first:last].tolist()
        splits = array.splits[depth]
        return [part(depth + 1, splits[i], splits[i + 1]) for i in range(first, last)]

    return part(0, row, row + 1)[0]


def lengths_of(array):
    return len(array.splits[0]) - 1 if isinstance(array, Ragged) else len(array)


@given(nestings(), st.integers(1, 9), st.integers(1, 3), st.integers(1, 6), st.integers(0, 25))
def test_any_nesting_is_read_as_it_was_written(nesting, batch_rows, num_ranks, group_rows, cut):
    shape, dtype, kind, rows = nesting
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("a.parquet", "b.parquet")]
        for file, part in zip(files, (rows[:cut], rows[cut:]), strict=True):
            table = pa.table({"label": [i % 2 for i in range(len(part))], "keys": pa.array(part, kind), "more": part})
            pq.write_table(table, file, row_group_size=group_rows)
        layout = ArrayLayout([ArrayColumn("keys", shape, dtype)], has_label=True)
        split = dataset.find(pathlib.Path(folder), layout.names).train.source
        readers = [
            Reader(dataset.Split(split), batch_rows, layout, rank=r, num_ranks=num_ranks) for r in range(num_ranks)
        ]
        found, labels = [], []
        for parts in zip(*map(list, readers), strict=True):
            for part in parts:
                keys = part.arrays["keys"]
                values = keys.values if isinstance(keys, Ragged) else keys
                assert values.dtype == dtype and isinstance(keys, Ragged) == (None in shape)
                assert isinstance(keys, Ragged) or keys.shape[1:] == shape
                assert lengths_of(keys) == len(part.labels)
                found += [unnested(keys, row) for row in range(lengths_of(keys))]
                labels += part.labels.tolist()
    assert found == rows
    assert labels == [i % 2 for i in [*range(min(cut, len(rows))), *range(len(rows) - cut)]]


def error_of(folder, rows, kind=None, column=None):
    file = folder / "x.parquet"
    pq.write_table(pa.table({"keys": pa.array(rows, kind)}), file, row_group_size=2)
    layout = ArrayLayout([column or ArrayColumn("keys", (2, 3))])
    with pytest.raises(DataError) as caught:
        list(Reader(dataset.Split(ParquetSource([file], layout.names)), 5, layout))
    text = str(caught.value)
    assert text.startswith(str(file)) and "column keys: " in text
    return text.removeprefix(str(file)).removeprefix(", ")


def test_an_error_names_file_row_and_column(tmp_path):
    good = [[1, 2, 3], [4, 5, 6]]
    cases = [
        ([good, good, good, [[1, 2, 3], [4, 5]]], "row 4", "lists of 3 expected at depth 2 of 2, not of 2"),
        ([good, [[1, 2, 3]], good], "row 2", "lists of 2 expected at depth 1 of 2, not of 1"),
        ([good, good, []], "row 3", "lists of 2 expected at depth 1 of 2, not of 0"),
        ([good, None, good], "row 2", "a list is missing"),
        ([good, good, [[1, 2, 3], None]], "row 3", "a list is missing"),
        ([good, good, [[1, 2, 3], [4, None, 6]]], "row 3", "a number is missing"),
        ([[1, 2], [3, 4]], None, "lists of lists of integers expected, not list<element: int64>"),
        ([1, 2], None, "lists of lists of integers expected, not int64"),
        ([[[["deep"]]], [[["er"]]]], None, "lists of lists of integers expected, not list<"),
        ([[[1.5, 2, 3], [4, 5, 6]]], None, "lists of lists of integers expected, not list<"),
        ([[["a", "b", "c"], ["d", "e", "f"]]], None, "lists of lists of integers expected"),
        ([[good, good]], None, "lists of lists of integers expected, not list<"),
    ]
    for rows, row, problem in cases:
        text = error_of(tmp_path, rows)
        assert problem in text and text.startswith(f"{row}, column keys" if row else "column keys"), text
    text = error_of(tmp_path, [3, None], column=ArrayColumn("keys"))
    assert text == "row 2, column keys: a number is missing"
    text = error_of(tmp_path, [["x"]], column=ArrayColumn("keys", (None,), "float32"))
    assert "lists of numbers expected, not list<" in text


def test_labels_are_checked(tmp_path):
    pq.write_table(pa.table({"keys": [[1], [2]], "label": [0, 2]}), tmp_path / "x.parquet")
    layout = ArrayLayout([ArrayColumn("keys", (1,))], has_label=True)
    with pytest.raises(DataError, match=r"x.parquet, row 2, column label: a label is 0 or 1, not 2"):
        list(Reader(dataset.find(tmp_path, layout.names).train, 2, layout))


def test_text_has_no_such_columns(tmp_path, criteo_lines):
    (tmp_path / "x.txt").write_text("".join("\t".join(line) + "\n" for line in criteo_lines(3)))
    with pytest.raises(DataError, match=r"text has Criteo's columns, and keys, label are wanted: name Parquet files"):
        dataset.find(tmp_path, ("keys", "label"))
    pq.write_table(pa.table({"keys": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet: columns missing: label"):
        dataset.find(tmp_path / "x.parquet", ("keys", "label"))


def test_columns_are_checked():
    with pytest.raises(ValueError, match="dtype must be int64 or float32, not int32"):
        ArrayColumn("keys", (), "int32")
    with pytest.raises(ValueError, match="named twice: keys, keys"):
        ArrayLayout([ArrayColumn("keys"), ArrayColumn("keys")])
    assert column_of("x", pa.list_(pa.large_list(pa.float64()))) == ArrayColumn("x", (None, None), "float32")
    assert column_of("x", pa.int8()) == ArrayColumn("x", (), "int64")


def test_rows_of_long_lists_come_in_small_chunks(tmp_path):
    rows, length = 100, 1 << 15
    keys = pa.FixedSizeListArray.from_arrays(np.arange(rows * length) % 5, length)
    pq.write_table(pa.table({"keys": keys, "other": keys}), tmp_path / "x.parquet")
    source = ParquetSource([tmp_path / "x.parquet"], ["keys"])
    sizes = [chunk.length for chunk in source.chunks(lambda first, last: True)]
    assert sum(sizes) == rows and max(sizes) * length <= 1 << 20
    layout = ArrayLayout([ArrayColumn("keys", (length,))])
    (batch,) = Reader(dataset.Split(source), rows, layout)
    np.testing.assert_array_equal(np.asarray(batch.arrays["keys"]).ravel(), np.arange(rows * length) % 5)
