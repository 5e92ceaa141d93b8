# SPDX-License-Identifier: Apache-2.0
"""Evaluation: gather_combine and weight_gradient of tables whose lookups name rows by key, some of which a table lacks.
The same bits as of rows that were read into memory before, and against the reference."""

import dataclasses
import itertools

import cases
import harness
import numpy as np
import pytest
import reference
import table_kinds

from sparse_operation_kit import core

HELD = np.array([5, -2, 0, 2**31 - 1, -(2**31), 17, 8])
LACKED = np.array([-1, 6, 77, -(2**31) + 1])
DTYPES = (np.float32, np.float16, core.BFLOAT16)
INITIALIZERS = (core.Initializer("uniform", -1, 1, seed=3), core.Initializer("normal", 0, 1, seed=4))


def make(dimension, dtype, held, initializer=INITIALIZERS[0]):
    """A table whose rows are not their initial ones."""
    table = core.DynamicTable(50, dimension, dtype=dtype, initializer=initializer)
    if len(held):
        core.locate([table.table()], held, [[len(held)]], insert=True)
        rows = np.random.default_rng(dimension).uniform(-2, 2, (len(held), dimension)).astype(np.float32)
        table.column(0)[table.index.find(held)] = (
            reference.rounded(rows, np.dtype(dtype)) if dtype != np.float32 else rows
        )
    return table


def by_key(table):
    return dataclasses.replace(table.table(), by_key=True)


def some_lookups(rng, keys_of_table, batch=40, most=9):
    """One of each kind for each table: keys that may occur several times in a bag, empty bags, no bags."""
    kinds = itertools.product(cases.KEY_DTYPES, reference.COMBINERS, (False, True))
    for table, keys in enumerate(keys_of_table):
        yield core.Lookup(rng.choice(keys, batch), table)
        yield core.Lookup(np.zeros(0, np.int64), table, row_splits=np.zeros(4, np.int64))
        for dtype, combiner, weighted in kinds if table == 0 else [(np.int64, "mean", True)]:
            splits = np.concatenate([[0], np.cumsum(rng.integers(0, most, batch))])
            weights = (rng.integers(1, 9, splits[-1]) / 8).astype(np.float32) if weighted else None
            yield core.Lookup(rng.choice(keys, splits[-1]).astype(dtype), table, splits, weights, combiner)


def read_before(tables, lookups):
    """The same lookups of tables in memory that hold a row for each of their keys; and float64 rows of each."""
    rows = [tables[lookup.table].read(np.asarray(lookup.keys)) for lookup in lookups]
    read = [core.Table(each) for each in rows]
    return read, [
        dataclasses.replace(lookup, keys=np.arange(len(each)), table=i)
        for i, (lookup, each) in enumerate(zip(lookups, rows, strict=True))
    ]


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dimension", [1, 7, 64])
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda initializer: initializer.kind)
def test_same_bits_as_rows_that_were_read(dtype, dimension, initializer, pools):
    rng = np.random.default_rng(dimension)
    both = np.append(HELD, LACKED)
    tables = [make(dimension, dtype, held, initializer) for held in (HELD, HELD, HELD, [])]
    lookups = list(some_lookups(rng, [both, HELD, LACKED, both]))
    read, of_read = read_before(tables, lookups)
    before = [(table.column(0).tobytes(), table.counts(), table.generation) for table in tables]
    expected = core.gather_combine(read, of_read)
    for context in (None, *pools):
        found = core.gather_combine(list(map(by_key, tables)), lookups, context=context)
        assert harness.same_bytes(found, expected)
    assert before == [(table.column(0).tobytes(), table.counts(), table.generation) for table in tables]
    for lookup, output in zip(of_read, expected, strict=True):
        rows = reference.widened(read[lookup.table].weight)
        arguments = (rows, lookup.keys, lookup.row_splits, lookup.weights, lookup.combiner)
        reference.assert_close(output, reference.pool(*arguments), magnitude=reference.pool(*arguments, absolute=True))

    incoming = [rng.standard_normal(output.shape).astype(np.float32) for output in expected]
    expected = core.weight_gradient(read, of_read, incoming)
    found = core.weight_gradient(list(map(by_key, tables)), lookups, incoming, context=pools[0])
    assert any(each is not None for each in expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or harness.same_bytes(a, b)


@pytest.mark.parametrize("share", [0, 0.01, 1])
def test_enough_keys_for_several_threads(share, pools):
    table, rng = make(32, np.float32, []), np.random.default_rng(0)
    table = core.DynamicTable(10_000, 32, initializer=INITIALIZERS[0])
    core.locate([table.table()], np.arange(10_000), [[10_000]], insert=True)
    table.column(0)[...] *= 3
    keys = rng.integers(0, 10_000, 50_000)
    keys[rng.random(50_000) < share] -= 20_000
    lookup = core.Lookup(keys, 0, np.arange(0, 50_001, 10), None, "mean")
    expected = core.gather_combine(*read_before([table], [lookup]))
    for context in (None, *pools):
        assert harness.same_bytes(core.gather_combine([by_key(table)], [lookup], context=context), expected)


def test_beside_tables_by_slot():
    """In one call: a static table, a dynamic one whose slots were located, and one by key in `slots`."""
    table, other = make(3, np.float32, HELD), make(5, np.float16, HELD)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    lookups = [
        core.Lookup([3, 1]),
        core.Lookup(None, 1, slots=table.index.find(HELD[:2])),
        core.Lookup(None, 2, slots=np.array([77, 5])),
    ]
    found = core.gather_combine([core.Table(rows), table.table(), by_key(other)], lookups)
    np.testing.assert_array_equal(found[0], rows[[3, 1]])
    np.testing.assert_array_equal(found[1], table.read(HELD[:2]))
    np.testing.assert_array_equal(found[2], other.read([77, 5]).astype(np.float32))


def test_other_indices():
    """They have no initial rows: what they do not hold, and slots that are none, is refused."""
    call = cases.CASES[0]
    tables = harness.tables(call, kind=table_kinds.PERMUTED)
    lookups = harness.lookups(call)
    expected = core.gather_combine(tables, table_kinds.located(tables, lookups))
    found = core.gather_combine([dataclasses.replace(table, by_key=True) for table in tables], lookups)
    assert harness.same_bytes(found, expected)
    for slot in (-1, 4):
        index = core.Index(lambda keys, insert: np.full(len(keys), slot))  # noqa: B023  # is called in this round
        table = core.Table(np.zeros((4, 2), np.float32), name="mine", index=index, by_key=True)
        with pytest.raises(IndexError, match=rf"'mine'.* {slot}"):
            core.gather_combine([table], [core.Lookup([1])])


def test_allocations_that_fail():
    table = make(4, np.float16, HELD)
    lookup = core.Lookup(np.append(HELD, LACKED), 0)
    allocator = harness.CountingAllocator()
    expected = core.gather_combine([by_key(table)], [lookup], context=allocator.context)
    assert allocator.count > 2 and not allocator.live
    for fail_at in range(allocator.count):
        failing = harness.CountingAllocator(fail_at)
        with pytest.raises(MemoryError):
            core.gather_combine([by_key(table)], [lookup], context=failing.context)
        assert not failing.live
    assert harness.same_bytes(core.gather_combine([by_key(table)], [lookup]), expected)


def test_on_the_cpu_alone():
    table = by_key(make(4, np.float32, HELD))
    context = core.Context(device=0, empty=np.empty)
    with pytest.raises(NotImplementedError, match="on the CPU alone"):
        core.gather_combine([table], [core.Lookup(HELD)], context=context)
