# SPDX-License-Identifier: Apache-2.0
"""The layout of what ranks send each other, against the words of sok/messages.h; and count matrices that cannot be."""

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _arrays, _library

DIMENSIONS, LOOKUP_TABLES = [2, 3], [0, 1, 0]
# Unique keys of 2 tables; keys of 3 lookups; their row splits. Lookup 1 is pooled at the requester, bags may be empty.
COUNTS = [
    [2, 0, 3, 0, 0, 3, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [1, 4, 0, 0, 5, 2, 0, 3],
]


@st.composite
def matrices(draw):
    """(counts, dimensions, table of each lookup)"""
    ranks, tables, lookups = (draw(st.integers(1, 4)) for _ in range(3))
    dimensions = [draw(st.integers(1, 5)) for _ in range(tables)]
    small = st.integers(0, 6)
    counts = []
    for _ in range(ranks):
        splits = [draw(small) for _ in range(lookups)]
        keys = [draw(small) if each else 0 for each in splits]
        counts.append([*(draw(small) for _ in range(tables)), *keys, *splits])
    return counts, dimensions, [draw(st.integers(0, tables - 1)) for _ in range(lookups)]


def expected_parts(counts, dimensions, lookup_tables):
    """(keys and floats of each rank; of each part (table, key, keys, split, splits, element, vectors); split -1: rows).

    From the description alone: [keys, by table | keys of bags, by lookup | row splits, by lookup], [rows | sums].
    """
    tables, lookups = len(dimensions), len(lookup_tables)
    sizes, parts, key, element = [], [], 0, 0
    for row in counts:
        start = key, element
        split = key + sum(row[: tables + lookups])
        for table, count in enumerate(row[:tables]):
            if count:
                parts.append((table, key, count, -1, 0, element, count))
            key, element = key + count, element + count * dimensions[table]
        for table, own, splits in zip(lookup_tables, row[tables:][:lookups], row[tables + lookups :], strict=True):
            if splits:
                parts.append((table, key, own, split, splits, element, splits - 1))
                key, split, element = key + own, split + splits, element + (splits - 1) * dimensions[table]
        key = split
        sizes.append((key - start[0], element - start[1]))
    return sizes, parts


def offset(view, array):
    return (view.data - array.ctypes.data) // array.itemsize


@given(matrices())
def test_layout(matrix):
    """What came is a lookup a part, in the order of the messages, whose views are the part's places; gradients too."""
    counts, dimensions, lookup_tables = matrix
    messages = core.Messages(counts, dimensions, lookup_tables)
    sizes, parts = expected_parts(counts, dimensions, lookup_tables)
    assert list(zip(messages.keys.tolist(), messages.floats.tolist(), strict=True)) == sizes
    assert (messages.num_keys, messages.num_floats) == tuple(np.sum(sizes, axis=0))
    assert messages.num_bag_splits == np.sum(np.array(counts)[:, len(dimensions) + len(lookup_tables) :])
    keys, slots = np.arange(messages.num_keys), np.arange(messages.num_keys)
    floats = np.arange(messages.num_floats, dtype=np.float32)
    lookups = messages.lookups(keys, slots, floats)
    assert len(lookups) == len(parts)
    for lookup, (table, key, num_keys, split, num_splits, element, vectors) in zip(lookups, parts, strict=True):
        assert lookup.struct_size == ctypes.sizeof(_abi.Lookup) and lookup.table == table
        assert lookup.combiner == _abi.SUM and lookup.weights.rank == 0
        for view, array in ((lookup.keys, keys), (lookup.slots, slots)):
            assert (view.rank, view.shape[0], offset(view, array)) == (1, num_keys, key)
        assert lookup.row_splits.rank == (0 if split < 0 else 1)
        if split >= 0:
            assert (lookup.row_splits.shape[0], offset(lookup.row_splits, keys)) == (num_splits, split)
        assert list(lookup.output.shape) == [vectors, dimensions[table]]
        assert offset(lookup.output, floats) == element
    gradients = core.owner_gradients(messages, keys, slots, floats)
    assert len(gradients) == len(dimensions)
    for table, of_table in enumerate(gradients):
        wanted = [part for part in parts if part[0] == table]
        for gradient, (_, key, num_keys, split, num_splits, element, vectors) in zip(of_table, wanted, strict=True):
            assert np.asarray(gradient.slots).tolist() == list(range(key, key + num_keys))
            assert gradient.unique == (split < 0) and (gradient.row_splits is None) == (split < 0)
            assert split < 0 or np.asarray(gradient.row_splits).tolist() == list(range(split, split + num_splits))
            values = np.arange(element, element + vectors * dimensions[table])
            np.testing.assert_array_equal(gradient.values, values.reshape(vectors, dimensions[table]))


def test_counts_may_have_more_columns():
    """As those that were swapped, whose last column says whether a rank failed."""
    wider = [[*row, 7] for row in COUNTS]
    read = [core.Messages(counts, DIMENSIONS, LOOKUP_TABLES) for counts in (wider, COUNTS)]
    assert read[0].keys.tolist() == read[1].keys.tolist() == [9, 0, 15]
    assert read[0].floats.tolist() == read[1].floats.tolist() == [8, 0, 20]


def changed(row, column, value):
    counts = [list(each) for each in COUNTS]
    counts[row][column] = value
    return counts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((changed(1, 0, -1), DIMENSIONS, LOOKUP_TABLES), r"in \[0, 2\^31\), not -1"),
        ((changed(2, 7, 2**31), DIMENSIONS, LOOKUP_TABLES), r"in \[0, 2\^31\), not 2147483648"),
        ((changed(0, 3, 1), DIMENSIONS, LOOKUP_TABLES), "lookup 1 has 1 keys, but no row splits"),
        ((COUNTS, [2, 2**62], LOOKUP_TABLES), "more elements than fit"),
        ((COUNTS, DIMENSIONS, [0, 2, 0]), r"lookup_tables\[1\] is 2, must be in \[0, 2\)"),
        ((COUNTS, DIMENSIONS, [0, -1, 0]), r"lookup_tables\[1\] is -1"),
        (([row[:7] for row in COUNTS], DIMENSIONS, LOOKUP_TABLES), "counts: shape"),
    ],
)
def test_counts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        core.Messages(*arguments)


@pytest.mark.parametrize("name", ["keys", "slots", "floats"])
def test_arrays_of_the_owner_that_do_not_fit(name):
    messages = core.Messages(COUNTS, DIMENSIONS, LOOKUP_TABLES)
    right: dict[str, np.ndarray] = {
        "keys": np.zeros(24, np.int64),
        "slots": np.zeros(24, np.int64),
        "floats": np.zeros(28, np.float32),
    }
    for array in (np.zeros(3, np.int64), np.zeros(3, np.float32), np.zeros((24, 1), np.int64), np.zeros(24, np.int32)):
        wrong = {**right, name: array}
        with pytest.raises(ValueError, match=name):
            messages.lookups(**wrong)
        with pytest.raises(ValueError, match=name):
            core.owner_gradients(messages, **wrong)
    with pytest.raises(ValueError, match="keys must be given"):
        messages.lookups(None, right["slots"], right["floats"])


def test_misuse():
    """A struct that is not what sok_messages_read left, fields out of range and NULL."""
    library = _abi.library()
    bad = [("struct_size", 0), ("struct_size", 8), ("row_stride", 7), ("row_stride", 2**40)]
    bad += list(itertools.product(("num_ranks", "num_tables", "num_lookups"), (-1, 2**21)))
    bad += [(field, None) for field in ("dimensions", "lookup_tables", "counts")]
    read_again = [("num_parts", 0), ("num_keys", 23), ("num_bag_splits", 0), ("num_floats", 2**40)]
    slots, floats, lookups = np.zeros(24, np.int64), np.zeros(28, np.float32), (_abi.Lookup * 6)()
    for field, value in [*bad, *read_again]:
        messages = core.Messages(COUNTS, DIMENSIONS, LOOKUP_TABLES)
        setattr(messages.struct, field, value)
        views = [_arrays.view(array) for array in (slots, slots, floats)]
        calls = [library.sok_owner_lookups(ctypes.byref(messages.struct), *views, lookups)]
        if (field, value) in bad:
            calls.append(library.sok_messages_read(ctypes.byref(messages.struct), None, None))
        assert calls == [_library.INVALID_ARGUMENT] * len(calls), (field, value)
    assert library.sok_messages_read(None, None, None) == _library.INVALID_ARGUMENT
    messages = core.Messages(COUNTS, DIMENSIONS, LOOKUP_TABLES)
    views = [_arrays.view(array) for array in (slots, slots, floats)]
    assert library.sok_owner_lookups(ctypes.byref(messages.struct), *views, None) == _library.INVALID_ARGUMENT
    assert library.sok_owner_gradients(ctypes.byref(messages.struct), *views, None, None) == _library.INVALID_ARGUMENT


@pytest.mark.parametrize("field", ["keys", "bag_keys", "bag_splits"])
def test_keys_that_are_too_few(field):
    tables = [core.Table(None, 10, width, num_ranks=2) for width in DIMENSIONS]
    lookups = [core.Lookup([1, 2, 2], 0, [0, 1, 3]), core.Lookup([4, 5, 5], 1, [0, 3])]
    routing = core.route(tables, lookups, pooled=[True, False])
    assert core.join_keys(tables, routing).tolist() == [4, 2, 2, 0, 0, 2, 5, 1, 0, 1, 1]
    setattr(routing, field, getattr(routing, field)[:1])
    with pytest.raises(ValueError, match=rf"routing.{field} has 1 elements, must have"):
        core.join_keys(tables, routing)
