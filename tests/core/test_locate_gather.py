# SPDX-License-Identifier: Apache-2.0
"""locate and gather: what an owner does with the keys that arrive."""

import harness
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_operation_kit import core


def table(num_rows, dimension, owner, num_ranks, rank, name="table"):
    held = core.local_rows(num_rows, owner, num_ranks, rank)
    weight = np.random.default_rng((num_rows, rank)).random((held, dimension), np.float32)
    return core.Table(weight, num_rows, dimension, name, owner, num_ranks, rank)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 2**16),
)
def test_slots_and_rows(shapes, num_ranks, seed):
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(num_ranks))
    tables = [
        table(num_rows, dimension, rank if localized else -1, num_ranks, rank)
        for num_rows, dimension, localized in shapes
    ]
    counts = rng.integers(0, 6, (num_ranks, len(tables)))
    for t, x in enumerate(tables):
        if len(x.weight) == 0:
            counts[:, t] = 0
    slots = [
        rng.integers(0, max(1, len(x.weight)), counts[s, t]) for s in range(num_ranks) for t, x in enumerate(tables)
    ]
    owners = [x for _ in range(num_ranks) for x in tables]
    keys = [s if x.owner >= 0 else s * num_ranks + rank for s, x in zip(slots, owners, strict=True)]
    keys, flat = np.concatenate(keys), np.concatenate(slots)
    located = core.locate(tables, keys, counts)
    assert np.array_equal(located, flat)
    assert np.array_equal(core.locate(tables, keys.astype(np.int32), counts), flat)
    rows = core.gather(tables, located, counts)
    expected = np.concatenate([x.weight[s].ravel() for s, x in zip(slots, owners, strict=True)])
    assert harness.same_bytes(rows, expected)


@pytest.mark.every_isa
def test_workers_do_not_change_a_bit(pools):
    tables = [table(5000, 33, -1, 2, 1), table(3000, 64, 1, 2, 1)]
    rng = np.random.default_rng(1)
    counts = np.array([[4000, 0], [1000, 6000]])
    keys = np.r_[rng.integers(0, 2500, 5000) * 2 + 1, rng.integers(0, 3000, 6000)]
    alone = core.locate(tables, keys, counts)
    rows = core.gather(tables, alone, counts)
    for context in pools:
        assert harness.same_bytes(core.locate(tables, keys, counts, context=context), alone)
        assert harness.same_bytes(core.gather(tables, alone, counts, context=context), rows)


def test_no_keys():
    tables = [table(5, 3, -1, 2, 0)]
    empty = np.zeros(0, np.int64)
    assert core.locate(tables, empty, np.zeros((2, 1))).size == 0
    assert core.gather(tables, empty, np.zeros((2, 1))).size == 0


@pytest.mark.parametrize(
    ("key", "owner", "rank", "words"),
    [
        (-1, -1, 1, "[0, 11)"),
        (11, -1, 1, "[0, 11)"),
        (2**62, -1, 1, "[0, 11)"),
        (4, -1, 1, "rank"),  # belongs to rank 0
        (4, 0, 1, "rank"),
    ],
)
def test_a_key_that_does_not_belong_here(key, owner, rank, words):
    tables = [table(100, 2, -1, 2, rank, "other"), table(11, 2, owner, 2, rank, "clicks")]
    with pytest.raises(IndexError) as error:
        core.locate(tables, np.array([1, 3, key]), [[1, 0], [1, 1]])
    assert "clicks" in str(error.value)
    assert str(key) in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("slot", [-2, -1, 6, 2**40])
def test_slot_out_of_range(slot, pools):
    tables = [table(11, 2, -1, 2, 0, "clicks")]
    for context in [None, *pools]:
        with pytest.raises(IndexError) as error:
            core.gather(tables, np.array([0, slot, 2]), [[1], [2]], context=context)
        assert "clicks" in str(error.value)
        assert str(slot) in str(error.value)


@pytest.mark.parametrize("counts", [[[2], [2]], [[1], [1]], [[-1], [4]], [[2**62], [2**62]]])
def test_counts_that_do_not_fit(counts):
    tables = [table(11, 2, -1, 2, 0)]
    keys = np.array([0, 2, 4])
    with pytest.raises((ValueError, MemoryError)):
        core.locate(tables, keys, counts)
    if max(max(row) for row in counts) < 100:
        with pytest.raises(ValueError, match=r"keys|slots|rows|counts"):
            core.gather(tables, np.array([0, 1, 2]), counts)


def test_wrong_dtypes():
    tables = [table(11, 2, -1, 1, 0)]
    with pytest.raises(ValueError, match=r"keys.*float32"):
        core.locate(tables, np.zeros(3, np.float32), [[3]])
    with pytest.raises(ValueError, match=r"slots.*float32"):
        core.gather(tables, np.zeros(3, np.float32), [[3]])


def test_local_rows():
    for num_rows in (1, 2, 10, 11, 2**40 + 3):
        for num_ranks in (1, 2, 3, 7):
            each = [core.local_rows(num_rows, -1, num_ranks, rank) for rank in range(num_ranks)]
            assert sum(each) == num_rows
            if num_rows < 100:
                assert each == [len(range(rank, num_rows, num_ranks)) for rank in range(num_ranks)]
            for owner in range(num_ranks):
                held = [core.local_rows(num_rows, owner, num_ranks, rank) for rank in range(num_ranks)]
                assert held == [num_rows if rank == owner else 0 for rank in range(num_ranks)]
    for bad in [
        (-1, -1, 1, 0),
        (5, -2, 1, 0),
        (5, 2, 2, 0),
        (5, -1, 0, 0),
        (5, -1, 2, 2),
        (5, -1, 2, -1),
    ]:
        with pytest.raises(ValueError, match="no placement"):
            core.local_rows(*bad)


class Calls:
    """Indices that note how they were asked: all tables of a call at once."""

    def __init__(self, find):
        self.asked = []
        self.find = find

    def index(self, name):
        def find(keys, insert):
            self.asked.append((name, keys.dtype, keys.tolist(), insert))
            return self.find(keys)

        return core.Index(find)


def test_an_index_is_asked_for_its_tables_alone():
    calls = Calls(lambda keys: keys * 0 + 7)
    tables = [
        core.Table(None, core.ANY_KEY, 2, "a", -1, 2, 1, calls.index("a")),
        core.Table(None, 100, 2, "b", -1, 2, 1),
        core.Table(None, 100, 2, "c", -1, 2, 1, calls.index("c")),
    ]
    keys = np.array([-5, 3, 9, 1, 99, 7, 11], np.int32)
    slots = core.locate(tables, keys, [[1, 2, 1], [0, 0, 1], [2, 0, 0]], insert=True)
    assert slots.tolist() == [7, 1, 4, 7, 7, 7, 7]
    asked = [("a", [-5]), ("c", [1]), ("c", [99]), ("a", [7, 11])]
    assert calls.asked == [(name, np.dtype(np.int32), some, True) for name, some in asked]


def test_row_splits_are_looked_at_before_an_index_inserts():
    """Those of parts that an owner pools, too: they come after the keys."""
    calls = Calls(lambda keys: keys * 0)
    tables = [core.Table(np.ones((3, 4), np.float32), core.ANY_KEY, name="items", index=calls.index("items"))]
    messages = core.Messages([[0, 3, 3]], [4], [0])
    for splits in ([0, 2, 1], [1, 2, 3], [0, 4, 3], [0, -1, 3], [0, 1, 4]):
        with pytest.raises(ValueError, match=r"row_splits|row splits"):
            core.locate(tables, np.array([7, 8, 9, *splits]), messages, insert=True)
    assert calls.asked == []
    core.locate(tables, np.array([7, 8, 9, 0, 1, 3]), messages, insert=True)
    assert len(calls.asked) == 1


def test_what_an_index_may_answer():
    """-1 for a key that is not there, which cannot be read yet; or an error of its own, which is the call's."""
    weight = np.ones((4, 2), np.float32)
    absent = core.Table(weight, core.ANY_KEY, name="items", index=core.Index(lambda keys, insert: keys * 0 - 1))
    slots = core.locate([absent], np.array([2**62, 5]), [[2]])
    assert slots.tolist() == [-1, -1]
    with pytest.raises(IndexError, match="table 'items': slot -1"):
        core.gather_combine([absent], [core.Lookup(slots=slots)])

    def full(keys, insert):
        raise MemoryError

    with pytest.raises(MemoryError, match="table 'items': its index"):
        core.locate([core.Table(weight, name="items", index=core.Index(full))], [1, 2], [[2]])
