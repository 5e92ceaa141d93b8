# SPDX-License-Identifier: Apache-2.0
"""Batches are the same whatever the number of ranks, the format and the chunks that the rows come in."""

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from criteo_bags import bags_of
from hypothesis import given
from hypothesis import strategies as st

from examples.dlrm import columns, dataset
from examples.dlrm.dataset import Split
from examples.dlrm.features import CriteoLayout
from examples.dlrm.parquet_source import ParquetSource
from examples.dlrm.reader import Reader
from examples.dlrm.sources import Chunk

LAYOUT = CriteoLayout(columns.table_rows(300))
WIDE = CriteoLayout((1000,) * 26)


class CountingSource:
    """Row i has label i % 2, I1 = i, and C1 = i where i % 3, else missing. Chunks of any sizes; drops what it may."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.rows = sum(sizes)
        self.dropped = 0

    def chunks(self, is_wanted):
        first = 0
        for size in self.sizes:
            rows = np.arange(first, first + size)
            arrays = [pa.array(rows % 2), pa.array(rows)] + [pa.array(rows * 0)] * 12
            arrays += [pa.array(rows, mask=rows % 3 == 0)] + [pa.array(rows * 0)] * 25
            batch = pa.record_batch(arrays, names=list(columns.ALL))
            wanted = is_wanted(first, first + size)
            self.dropped += not wanted
            yield Chunk(pathlib.Path("counting"), first, size, batch if wanted else None)
            first += size


def rows_of(batch):
    return np.rint(np.expm1(batch.dense[:, 0])).astype(int).tolist()


@given(
    st.lists(st.integers(0, 30), max_size=12),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([None, False, True]),
)
def test_ranks_divide_the_same_global_batches(sizes, batch_rows, num_ranks, held_out):
    source = CountingSource(sizes)
    split = Split(source, held_out)
    expected = [row for row in range(sum(sizes)) if held_out is None or (row % 10 == 9) == held_out]
    assert split.rows == len(expected)
    ranks = [list(Reader(split, batch_rows, WIDE, rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    for reader in ranks:
        assert len(reader) == -(-len(expected) // batch_rows) == Reader(split, batch_rows, LAYOUT).batches
    for index, parts in enumerate(zip(*ranks, strict=True)):
        rows = expected[index * batch_rows : (index + 1) * batch_rows]
        assert [row for part in parts for row in rows_of(part)] == rows
        for rank, part in enumerate(parts):
            own = rows[rank * batch_rows // num_ranks : (rank + 1) * batch_rows // num_ranks]
            assert rows_of(part) == own
            assert (part.index, part.global_rows) == (index, len(rows))
            assert part.labels.tolist() == [row % 2 for row in own]
            bags = bags_of(part)
            assert len(bags) == 26 and bags[0] == [[row] if row % 3 else [] for row in own]
            assert part.dense.shape == (len(own), 13)
            assert part.ids.values().dtype == part.ids.offsets().dtype == np.int64
            assert part.ids.offset_per_key() == part.ids.offsets()[:: len(own)].tolist() if own else [0] * 27


def test_what_only_other_ranks_need_is_skipped():
    source = CountingSource([50] * 8)
    list(Reader(Split(source), 100, LAYOUT, rank=1, num_ranks=2))
    assert source.dropped == 4


def test_parquet_skips_row_groups(generated, monkeypatch):
    directory, _ = generated
    read = []
    original = pq.ParquetFile.iter_batches

    def iter_batches(self, *arguments, row_groups, **options):
        read.extend(row_groups)
        return original(self, *arguments, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    batches = list(Reader(dataset.find(directory).train, 256, LAYOUT, rank=0, num_ranks=2))
    assert sum(len(batch.labels) for batch in batches) == 20 * 128
    assert len(read) == 20


def test_every_iteration_begins_anew(generated):
    reader = Reader(dataset.find(generated[0]).valid, 300, LAYOUT)
    first, second = list(reader), list(reader)
    assert [len(batch.labels) for batch in first] == [300, 300, 300, 100]
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.dense, other.dense)


def test_a_large_row_group_comes_in_chunks(tmp_path):
    rows = 20_000
    table = pa.table({name: np.arange(rows) % 2 if name == "label" else np.arange(rows) for name in columns.ALL})
    pq.write_table(table, tmp_path / "one.parquet", row_group_size=rows)
    chunks = list(ParquetSource([tmp_path / "one.parquet"]).chunks(lambda first, last: True))
    assert len(chunks) > 1
    assert [chunk.first for chunk in chunks] == np.cumsum([0] + [chunk.length for chunk in chunks[:-1]]).tolist()
    (batch,) = Reader(Split(ParquetSource([tmp_path / "one.parquet"])), rows, CriteoLayout((rows,) * 26))
    assert bags_of(batch)[3] == [[row] for row in range(rows)]


@pytest.mark.parametrize("wanted", [range(12), range(3, 5), (0, 5, 11), ()])
def test_wanted_row_groups_that_follow_each_other_are_read_together(tmp_path, wanted):
    rows, per_group = 115, 10  # the last group has 5
    table = pa.table({name: np.arange(rows) % 2 if name == "label" else np.arange(rows) for name in columns.ALL})
    pq.write_table(table, tmp_path / "some.parquet", row_group_size=per_group)
    source = ParquetSource([tmp_path / "some.parquet"] * 2)
    numbers = {rows * file + per_group * group for file in range(2) for group in wanted}
    chunks = list(source.chunks(lambda first, last: first in numbers))
    assert [chunk.first for chunk in chunks] == [0, *np.cumsum([chunk.length for chunk in chunks])[:-1] % rows]
    assert sum(chunk.length for chunk in chunks) == source.rows == 2 * rows
    read = [chunk for chunk in chunks if chunk.columns is not None]
    for chunk in read:
        np.testing.assert_array_equal(chunk.columns.column("C1"), range(chunk.first, chunk.first + chunk.length))
    expected = [row for row in range(rows) if row // per_group in wanted]
    assert [row for chunk in read for row in range(chunk.first, chunk.first + chunk.length)] == expected * 2
    assert len(read) == 2 * sum(group - 1 not in wanted for group in wanted)


@pytest.mark.parametrize(("rank", "num_ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_rank_is_checked(rank, num_ranks):
    with pytest.raises(ValueError, match="rank"):
        Reader(Split(CountingSource([])), 1, LAYOUT, rank=rank, num_ranks=num_ranks)


def test_batch_size_is_checked():
    with pytest.raises(ValueError, match="at least one row"):
        Reader(Split(CountingSource([])), 0, LAYOUT)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40), st.integers(1, 3), st.integers(0, 9))
def test_from_a_batch_on(sizes, batch_rows, num_ranks, first):
    source = CountingSource(sizes)
    for rank in range(num_ranks):
        place = {"rank": rank, "num_ranks": num_ranks}
        everything = list(Reader(Split(source), batch_rows, WIDE, **place))
        source.dropped = 0
        rest = list(Reader(Split(source), batch_rows, WIDE, **place, first_batch=first))
        assert [batch.index for batch in rest] == [batch.index for batch in everything[first:]]
        for batch, same in zip(rest, everything[first:], strict=True):
            assert rows_of(batch) == rows_of(same) and batch.global_rows == same.global_rows
        before = sum(sum(sizes[: i + 1]) <= first * batch_rows for i in range(len(sizes)))
        assert source.dropped >= before, "chunks before the first batch are not read"
