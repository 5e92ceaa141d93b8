# SPDX-License-Identifier: Apache-2.0
"""The layout of what ranks send each other, against the words of sok/messages.h; joining, taking apart, and misuse."""

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


def expected_layout(counts, dimensions, lookup_tables):
    """(sizes, parts) from the description alone."""
    tables, lookups = len(dimensions), len(lookup_tables)
    sizes, parts, floats = [], [], 0
    for rank, row in enumerate(counts):
        rows, keys, splits = row[:tables], row[tables : tables + lookups], row[tables + lookups :]
        before = np.sum(sizes, axis=0, dtype=np.int64) if sizes else np.zeros(5, np.int64)
        own = np.zeros(5, np.int64)
        for table, count in enumerate(rows):
            if count:
                at = before + own
                parts.append((rank, table, -1, count, count, at[0], -1, floats))
            own += [count, 0, 0, count * dimensions[table], 0]
            floats += count * dimensions[table]
        for lookup, (key_count, split_count, table) in enumerate(zip(keys, splits, lookup_tables, strict=True)):
            if split_count:
                at, bags = before + own, split_count - 1
                parts.append((rank, table, lookup, key_count, bags, at[1], at[2], floats))
                own += [0, key_count, split_count, 0, bags * dimensions[table]]
                floats += bags * dimensions[table]
        sizes.append(own)
    return np.array(sizes).T, [tuple(map(int, part)) for part in parts]


@given(matrices())
def test_layout(matrix):
    counts, dimensions, lookup_tables = matrix
    layout = core.MessageLayout.read(counts, dimensions, lookup_tables)
    sizes, parts = expected_layout(counts, dimensions, lookup_tables)
    np.testing.assert_array_equal(layout.sizes, sizes)
    np.testing.assert_array_equal(layout.row_counts, np.array(counts)[:, : len(dimensions)])
    assert layout.parts.tolist() == parts


def test_rows_of_counts_may_lie_apart():
    """As in the counts that were swapped, whose last column says whether a rank failed."""
    wider = [[*row, 7] for row in COUNTS]
    layouts = [core.MessageLayout.read(counts, DIMENSIONS, LOOKUP_TABLES) for counts in (wider, COUNTS)]
    np.testing.assert_array_equal(layouts[0].parts, layouts[1].parts)


@given(matrices(), st.sampled_from([np.int64, np.float32]))
def test_messages_are_their_sections_by_rank(matrix, dtype):
    layout = core.MessageLayout.read(*matrix)
    sizes = layout.sizes[:3] if dtype == np.int64 else layout.sizes[3:]
    # A section may be longer than what travels of it, and absent where nothing does.
    sections = [np.arange(own.sum() + 2, dtype=dtype) + 100 * i for i, own in enumerate(sizes)]
    given_sections = [section if own.sum() else None for section, own in zip(sections, sizes, strict=True)]
    messages = core.join_messages(sizes, given_sections)
    assert messages.dtype == (dtype if sizes.sum() else np.int64)
    ends = np.cumsum(sizes, axis=1)
    pieces = [
        section[end[rank] - own[rank] : end[rank]]
        for rank in range(sizes.shape[1])
        for section, own, end in zip(sections, sizes, ends, strict=True)
    ]
    np.testing.assert_array_equal(messages, np.concatenate(pieces))
    for section, own, again in zip(sections, sizes, core.split_messages(sizes, messages), strict=True):
        np.testing.assert_array_equal(again, section[: own.sum()])


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
        ((COUNTS, [2, 2**62], LOOKUP_TABLES), "do not fit|more elements than fit"),
        ((COUNTS, DIMENSIONS, [0, 2, 0]), r"lookup_tables\[1\] is 2, must be in \[0, 2\)"),
        ((COUNTS, DIMENSIONS, [0, -1, 0]), r"lookup_tables\[1\] is -1"),
        (([row[:7] for row in COUNTS], DIMENSIONS, LOOKUP_TABLES), "counts: shape"),
    ],
)
def test_counts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        core.MessageLayout.read(*arguments)


@pytest.mark.parametrize(
    ("sizes", "sections", "message"),
    [
        (
            [[2, 1], [1, 0]],
            [np.zeros(2, np.int64), np.zeros(1, np.int64)],
            r"sections\[0\] has 2 elements, must have 3",
        ),
        ([[2, 1], [1, 0]], [np.zeros(3, np.int64), None], r"sections\[1\]"),
        ([[2, 1], [1, 0]], [np.zeros(3, np.int64), np.zeros(1, np.float32)], r"sections\[1\]"),
        ([[2], [1]], [np.zeros(3, np.int32), np.zeros(1, np.int32)], "messages"),
        ([[2, 2], [2, -1]], [np.zeros(4, np.int64), np.zeros(4, np.int64)], r"sizes\[1\]\[1\] is -1"),
    ],
)
def test_sections_that_do_not_fit(sizes, sections, message):
    with pytest.raises(ValueError, match=message):
        core.join_messages(sizes, sections)


def test_messages_of_another_size():
    with pytest.raises(ValueError, match="messages has 4 elements, must have 3"):
        core.split_messages([[2, 1]], np.zeros(4, np.int64))


def layout_struct():
    """A right sok_message_layout over COUNTS that was not read yet, and its arrays."""
    arrays = [np.array(values, np.int64) for values in (DIMENSIONS, LOOKUP_TABLES, COUNTS)]
    arrays += [np.zeros((3, 2), np.int64), np.zeros((5, 3), np.int64)]
    struct = _abi.MessageLayout(ctypes.sizeof(_abi.MessageLayout), 3, 2, 3)
    for field, array in zip(("dimensions", "lookup_tables", "counts", "row_counts", "sizes"), arrays, strict=True):
        setattr(struct, field, array.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
    parts = (_abi.MessagePart * 15)()
    struct.parts = ctypes.cast(parts, ctypes.POINTER(_abi.MessagePart))
    struct.row_stride = 8
    return struct, (arrays, parts)


def owner_lookups(changes=None):
    """(status, lookups, arrays) of sok_message_lookups over COUNTS."""
    struct, alive = layout_struct()
    assert _abi.library().sok_message_layout_read(ctypes.byref(struct)) == 0
    arrays = {
        "keys": np.arange(15, dtype=np.int64),  # 7 of rows, 8 of bags
        "slots": np.arange(15, dtype=np.int64),
        "splits": np.arange(9, dtype=np.int64),
        "floats": np.arange(28, dtype=np.float32),
        **(changes or {}),
    }
    lookups = (_abi.Lookup * 15)()
    views = [_arrays.view(array) for array in arrays.values()]
    status = _abi.library().sok_message_lookups(ctypes.byref(struct), *views, lookups)
    return status, lookups[: struct.num_parts], arrays, alive


def offset(view, array):
    return (view.data - array.ctypes.data) // array.itemsize


def test_lookups_of_the_owner():
    """A lookup a part, in the order of the answers; its views are the part's places in the arrays."""
    status, lookups, arrays, _ = owner_lookups()
    assert status == 0
    parts = core.MessageLayout.read(COUNTS, DIMENSIONS, LOOKUP_TABLES).parts
    first_float = 0
    for lookup, part in zip(lookups, parts, strict=True):
        first_key = part["first_key"] + (7 if part["lookup"] >= 0 else 0)
        assert lookup.struct_size == ctypes.sizeof(_abi.Lookup) and lookup.table == part["table"]
        assert lookup.combiner == _abi.SUM and lookup.weights.rank == 0
        for field in ("keys", "slots"):
            view = getattr(lookup, field)
            assert (view.shape[0], offset(view, arrays[field])) == (part["num_keys"], first_key)
        assert lookup.row_splits.rank == (1 if part["lookup"] >= 0 else 0)
        if part["lookup"] >= 0:
            assert offset(lookup.row_splits, arrays["splits"]) == part["first_split"]
            assert lookup.row_splits.shape[0] == part["num_values"] + 1
        width = DIMENSIONS[part["table"]]
        assert list(lookup.output.shape) == [part["num_values"], width]
        assert offset(lookup.output, arrays["floats"]) == first_float
        first_float += part["num_values"] * width
    assert first_float == 28


@pytest.mark.parametrize("name", ["keys", "slots", "splits", "floats"])
def test_arrays_of_the_owner_that_do_not_fit(name):
    assert owner_lookups({name: None})[0] == 0
    for array in (np.zeros(3, np.int64), np.zeros(3, np.float32), np.zeros((3, 1), np.int64), np.zeros(40, np.int32)):
        assert owner_lookups({name: array})[0] == _library.INVALID_ARGUMENT
        assert name in _abi.library().sok_last_error_message().decode()


def test_misuse_of_layouts():
    read = _abi.library().sok_message_layout_read
    struct, alive = layout_struct()
    assert read(ctypes.byref(struct)) == 0 and struct.num_parts == 7, alive
    bad = [("struct_size", 0), ("struct_size", 8), ("row_stride", 7)]
    bad += list(itertools.product(("num_ranks", "num_tables", "num_lookups"), (-1, 2**21)))
    bad += [(field, None) for field in ("dimensions", "lookup_tables", "counts", "row_counts", "sizes", "parts")]
    for field, value in bad:
        struct, alive = layout_struct()
        setattr(struct, field, value)
        assert read(ctypes.byref(struct)) == _library.INVALID_ARGUMENT, (field, value)
        assert _abi.library().sok_last_error_message()
    assert read(None) == _library.INVALID_ARGUMENT
