# SPDX-License-Identifier: Apache-2.0
import pathlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.dlrm import columns
from examples.dlrm.errors import DataError
from examples.dlrm.features import extract
from examples.dlrm.layout import Rows

FILE = pathlib.Path("some.file")
TABLE_ROWS = tuple(range(10, 36))


def rows_with(count, first=1, **special):
    """Rows whose columns are the `special` ones, and otherwise plain."""
    arrays = []
    for name in columns.ALL:
        array = special.get(name)
        if array is None:
            array = pa.array([0] * count)
        arrays.append(array)
    return Rows(FILE, np.arange(first, first + count), pa.record_batch(arrays, names=list(columns.ALL)))


@pytest.mark.parametrize(
    "array",
    [
        pa.array([7, None, 0, -3]),
        pa.array([7.0, float("nan"), 0.0, -3.0]),
        pa.array(["7", "", "0", "-3"]),
        pa.array(["7.0", None, "0e5", "-3"], pa.large_string()),
        pa.array([7, None, 0, -3], pa.int16()),
    ],
)
def test_counts_become_logarithms_and_missing_ones_0(array):
    dense = extract(rows_with(4, I3=array), TABLE_ROWS).dense
    assert dense.dtype == np.float32
    np.testing.assert_allclose(dense[:, 2], [np.log(8), 0, 0, 0], rtol=1e-6)
    assert not dense[:, [0, 1, *range(3, 13)]].any()


@given(st.lists(st.none() | st.integers(0, 2**64 - 1), min_size=1, max_size=30), st.data())
def test_hexadecimal_text_is_its_value_modulo_the_rows(values, data):
    texts = []
    for value in values:
        form = data.draw(st.sampled_from(["{:x}", "{:08x}", "{:X}", "{:016X}"]))
        texts.append(data.draw(st.sampled_from([None, ""])) if value is None else form.format(value))
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        # A slice: the text does not start at the beginning of its buffer.
        array = pa.array(["abc", *texts], kind)
        features = extract(rows_with(len(values), C5=array.slice(1)), TABLE_ROWS)
        np.testing.assert_array_equal(features.present[4], [value is not None for value in values])
        np.testing.assert_array_equal(features.rows[4], [v % TABLE_ROWS[4] for v in values if v is not None])
        assert features.rows[4].dtype == np.int64


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint64()])
def test_integers_are_taken_modulo_the_rows(kind):
    values = [5, None, 127, 0] if kind != pa.int64() else [-1, None, 2**62, -(2**63)]
    features = extract(rows_with(4, C26=pa.array(values, kind)), TABLE_ROWS)
    np.testing.assert_array_equal(features.present[25], [True, False, True, True])
    np.testing.assert_array_equal(features.rows[25], [v % 35 for v in values if v is not None])


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_ids_of_dynamic_tables_are_keys_as_they_are(values):
    keys = np.array(values, np.uint64).view(np.int64)
    for array in (pa.array([f"{value:x}" for value in values], pa.string()), pa.array(values, pa.uint64())):
        features = extract(rows_with(len(values), C2=array), (None,) * 26)
        np.testing.assert_array_equal(features.rows[1], keys)
        assert features.rows[1].dtype == np.int64
    signed = extract(rows_with(3, C2=pa.array([-(2**63), None, 5])), (None,) * 26)
    assert signed.rows[1].tolist() == [-(2**63), 5]


def test_a_column_without_any_value_is_all_missing():
    features = extract(rows_with(3, C1=pa.nulls(3), I1=pa.nulls(3)), TABLE_ROWS)
    assert not features.present[0].any()
    assert features.rows[0].size == 0
    assert not features.dense[:, 0].any()


def test_no_rows():
    features = extract(rows_with(0, C1=pa.array([], pa.string())), TABLE_ROWS)
    assert features.labels.shape == (0,)
    assert features.dense.shape == (0, 13)


@pytest.mark.parametrize(
    ("column", "array", "row", "problem"),
    [
        ("label", pa.array([0, 1, 2]), 12, "a label is 0 or 1, not 2"),
        ("label", pa.array([0, None, 1]), 11, "a label is 0 or 1, not missing"),
        ("label", pa.array(["0", "1", "x"]), 12, "not a number: 'x'"),
        ("I4", pa.array(["1", "two", "3"]), 11, "not a number: 'two'"),
        ("I13", pa.array([1.0, 2.0, float("inf")]), 12, "finite"),
        ("I2", pa.array([[1], [2], [3]]), None, "numbers expected, not list"),
        ("C7", pa.array(["ab", "0g", "1"]), 11, "not a hexadecimal number of at most 16 digits: '0g'"),
        ("C7", pa.array(["ab", "", "12345678123456781"]), 12, "at most 16 digits"),
        ("C7", pa.array(["ab", "é", "1"]), 11, "hexadecimal"),
        ("C8", pa.array([1.0, 2.0, 3.0]), None, "integers or hexadecimal text expected, not double"),
    ],
)
def test_an_error_names_file_row_and_column(column, array, row, problem):
    with pytest.raises(DataError) as caught:
        extract(rows_with(3, first=10, **{column: array}), TABLE_ROWS)
    assert problem in str(caught.value)
    place = "some.file" + ("" if row is None else f", row {row}") + f", column {column}: "
    assert str(caught.value).startswith(place)
    assert (caught.value.file, caught.value.row, caught.value.column) == (FILE, row, column)
