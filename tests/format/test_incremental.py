# SPDX-License-Identifier: Apache-2.0
"""Changed rows from ranks to ranks, without a framework: what is collected, saved, applied and refused."""

import datetime
import os
from typing import Any

import checkpoint_cases as cases
import numpy as np
import pytest

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit import incremental
from sparse_operation_kit.checkpoint import group as checkpoint_group
from sparse_operation_kit.checkpoint.dumping import dump_variables
from sparse_operation_kit.checkpoint.variables import TableShard
from sparse_operation_kit.held import HeldTable
from sparse_operation_kit.increment_series import Increments
from sparse_operation_kit.placement import Placement

UTC = datetime.timezone.utc
WHEN = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
STAMP = incremental.to_stamp(WHEN)


class Table(HeldTable):
    """A table of one rank over arrays: its rows, and stamps that a test sets."""

    def __init__(self, name, placement, whole):
        super().__init__(name, placement, whole.dtype.name, cases.ArrayColumn(whole[placement.rows].copy()))
        self.stamps = np.full(placement.local_rows, STAMP - 1)
        self.tracked = False

    def track(self):
        self.tracked = True

    def changed(self, stamp):
        assert self.tracked
        return np.flatnonzero(self.stamps >= stamp)

    def overwrite(self, keys, rows):
        assert (self.placement.owner_of(keys) == self.placement.rank).all()
        self.rows.write(self.slots(keys), rows)


def held(group, specs, fill):
    """The tables of one rank."""
    places = [
        (name, Placement(rows, dimension, owner if owner < group.size else 0, group.size, group.rank))
        for name, rows, dimension, owner in specs
    ]
    return [Table(name, place, fill(name, place.num_rows, place.dimension)) for name, place in places]


SPECS = [("a", 23, 3, -1), ("b", 7, 1, 1), ("c", 2, 5, -1)]
CHANGED = {"a": [0, 5, 6, 22], "b": [6], "c": []}


def numbered(name, num_rows, dimension):
    return (np.arange(num_rows * dimension, dtype=np.float32) + ord(name)).reshape(num_rows, dimension)


def zeros(name, num_rows, dimension):
    return np.zeros((num_rows, dimension), np.float32)


def collected(ranks):
    """What every rank returns after CHANGED rows changed."""

    def run(group):
        tables = held(group, SPECS, numbered)
        for table in tables:
            keys = np.array(CHANGED[table.name], np.int64)
            mine = keys[table.placement.owner_of(keys) == group.rank]
            table.stamps[table.slots(mine)] = STAMP
        return incremental.collect(lambda: tables, WHEN, group)

    return cases.results(cases.on_ranks(ranks, run))


def test_stamps_of_datetimes():
    assert STAMP == 1767323045678901000
    east = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    assert incremental.to_stamp(WHEN.astimezone(east)) == STAMP
    assert incremental.to_stamp(datetime.datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)) == -1_000_000_000
    assert incremental.to_stamp(datetime.datetime.min.replace(tzinfo=UTC)) == -(2**63)
    assert incremental.to_stamp(datetime.datetime.max.replace(tzinfo=UTC)) == 2**63 - 1
    with pytest.raises(ValueError, match="no time zone"):
        incremental.to_stamp(WHEN.replace(tzinfo=None))
    with pytest.raises(TypeError, match=r"a datetime\.datetime"):
        incremental.to_stamp(WHEN.timestamp())  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [None, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collect(ranks, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(checkpoint_group, "_PIECE_BYTES", pieces)
    for keys, values in collected(ranks):
        for (name, *shape), own_keys, rows in zip([spec[:3] for spec in SPECS], keys, values, strict=True):
            assert own_keys.dtype == np.int64 and own_keys.tolist() == CHANGED[name]
            np.testing.assert_array_equal(rows, numbered(name, *shape)[CHANGED[name]])


def test_the_earliest_threshold_counts():
    def run(group):
        tables = held(group, [("a", 8, 2, -1)], numbered)
        later = WHEN + datetime.timedelta(days=group.rank - 1)
        return incremental.collect(lambda: tables, later, group)[0][0].tolist()

    assert cases.results(cases.on_ranks(2, run)) == [list(range(8))] * 2


@pytest.mark.parametrize("way", ["arrays", "file"])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3), (3, 2), (1, 4)])
def test_apply(tmp_path, writers, readers, way):
    keys, values = collected(writers)[0]
    source = (keys, values)
    if way == "file":
        source = tmp_path / "delta"
        incremental.save(
            source,
            held(ck.SingleProcess(), SPECS, zeros),
            keys,
            values,
            step=3,
            extra={"since": WHEN.isoformat()},
            frontend="tests",
        )
        with ck.open_dump(source) as dump:
            assert (dump.step, dump.extra) == (3, {"since": WHEN.isoformat()})

    def run(group):
        tables = held(group, SPECS, zeros)
        incremental.apply(source, lambda: tables, group)
        return tables

    for tables in cases.results(cases.on_ranks(readers, run)):
        for table in tables:
            name, place = table.name, table.placement
            expected = zeros(name, place.num_rows, place.dimension)
            whole = numbered(name, place.num_rows, place.dimension)
            expected[CHANGED[name]] = whole[CHANGED[name]]
            np.testing.assert_array_equal(table.rows.array, expected[place.rows])


def rows_of(keys, dimension=3):
    return np.ones((len(keys), dimension), np.float32)


BAD = {
    "outside": ([0, 23], rows_of([0, 1]), r"table 'a': key 23 is outside \[0, 23\)"),
    "negative": ([-1, 2], rows_of([0, 1]), "key -1"),
    "twice": ([4, 3, 4], rows_of([0, 1, 2]), "key 4 occurs twice"),
    "float keys": (np.array([1.0]), rows_of([0]), "keys must be"),
    "wide rows": ([1], rows_of([0], 4), r"values must be float32 \[1, 3\]"),
    "other dtype": ([1], rows_of([0]).astype(np.float64), "values must be float32"),
    "other number": ([1, 2], rows_of([0]), r"values must be float32 \[2, 3\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_change_nothing_on_any_rank(case):
    keys, rows, message = BAD[case]

    def run(group):
        tables = held(group, SPECS[:1], zeros)
        # One rank alone has the bad arrays.
        source = ([np.asarray(keys)], [rows]) if group.rank == 1 else ([np.arange(23)], [rows_of(range(23))])
        try:
            incremental.apply(source, lambda: tables, group)
        except ck.PeerError as error:
            assert group.rank != 1 and "rank 1 failed" in str(error)
        except ValueError as error:
            assert group.rank == 1
            with pytest.raises(ValueError, match=message):
                raise error
        else:
            raise AssertionError("nothing was raised")
        return tables

    for tables in cases.results(cases.on_ranks(3, run)):
        assert not tables[0].rows.array.any()


@pytest.mark.parametrize("case", ["outside", "negative", "twice"])
def test_bad_keys_of_a_file_change_nothing(tmp_path, case):
    """The file is sound; it was made for another table."""
    keys, rows, _ = BAD[case]
    table = ck.Table("a:0", 3, kind="dynamic")
    ck.dump(tmp_path / "delta", [ck.from_arrays(table, np.asarray(keys, np.int64), rows)])

    def run(group):
        tables = held(group, SPECS[:1], zeros)
        try:
            incremental.apply(tmp_path / "delta", lambda: tables, group)
        except ck.CheckpointError:
            return tables
        raise AssertionError("nothing was raised")

    for tables in cases.results(cases.on_ranks(2, run)):
        assert not tables[0].rows.array.any()


def test_a_damaged_file_changes_nothing(tmp_path):
    path = tmp_path / "delta"
    tables = held(ck.SingleProcess(), SPECS[:1], zeros)
    incremental.save(path, tables, [[1, 2]], [rows_of([0, 1])], step=None, extra=None, frontend="t")
    weights = path / "a_0-weight"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    os.chmod(weights, 0o644)
    weights.write_bytes(data)
    with pytest.raises(ck.ChecksumError, match="a_0-weight"):
        incremental.apply(path, lambda: tables, ck.SingleProcess())
    assert not tables[0].rows.array.any()


def test_what_save_refuses(tmp_path):
    tables = held(ck.SingleProcess(), SPECS[:1], zeros)
    options: dict[str, Any] = {"step": None, "extra": None, "frontend": "t"}
    with pytest.raises(ck.KeysError, match="key 23 is outside"):
        incremental.save(tmp_path / "delta", tables, [[23]], [rows_of([0])], **options)
    with pytest.raises(ValueError, match="1 tables, but keys of 2"):
        incremental.save(tmp_path / "delta", tables, [[1], [2]], [rows_of([0])], **options)
    with pytest.raises(ValueError, match=r"values must be float32 \[1, 3\]"):
        incremental.save(tmp_path / "delta", tables, [[1]], [rows_of([0]).astype(np.float64)], **options)
    assert not (tmp_path / "delta").exists()


def test_sources_that_are_none():
    tables = held(ck.SingleProcess(), SPECS[:1], zeros)
    with pytest.raises(TypeError, match="path or the pair"):
        incremental.apply(3, lambda: tables, ck.SingleProcess())
    with pytest.raises(ck.MissingFileError):
        incremental.apply("/nowhere/delta", lambda: tables, ck.SingleProcess())


def increments(group, number=0, series=None):
    tables = held(group, SPECS[:1], zeros)
    return Increments(lambda what: (group, tables), "t", number, series)


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"number": 1.5}, TypeError, "number must be an integer, got 1.5"),
        ({"number": "1"}, TypeError, "number must be an integer, got '1'"),
        ({"number": True}, TypeError, "number must be an integer, got True"),
        ({"number": -1}, ValueError, "number must not be negative, got -1"),
        ({"number": 2, "series": 5}, TypeError, "series must be a string, got 5"),
        ({"number": 2, "series": ""}, ValueError, "series must not be empty"),
    ],
)
def test_where_increments_begin_is_checked_on_all_ranks(told, error, message):
    right, wrong = cases.on_ranks(2, lambda group: increments(group, **(told if group.rank == 1 else {})))
    assert isinstance(right, ck.PeerError) and message in str(right)
    assert type(wrong) is error and message in str(wrong)


def test_ranks_that_begin_elsewhere():
    for outcome in cases.on_ranks(2, lambda group: increments(group, group.rank, "s")):
        assert isinstance(outcome, ck.MismatchError) and "number and series [[0, 's'], [1, 's']]" in str(outcome)
    begun = increments(ck.SingleProcess(), np.int64(3), "s")
    assert type(begun.number) is int and (begun.number, begun.series) == (3, "s")


def test_a_path_that_is_none_on_one_rank(tmp_path):
    def run(group):
        return increments(group).save(5 if group.rank == 1 else tmp_path / "1")

    def dump(group):
        shards = [TableShard(table) for table in held(group, SPECS[:1], zeros)]
        path: Any = 5 if group.rank == 1 else tmp_path / "1"
        options: dict[str, Any] = {"frontend": "t", "step": None, "extra": None, "progress": False}
        dump_variables(path, lambda: (shards, None), group=group, **options)

    for call in (run, dump):
        right, wrong = cases.on_ranks(2, call)
        assert isinstance(right, ck.PeerError) and isinstance(wrong, TypeError)
        assert os.listdir(tmp_path) == []


def test_ranks_with_other_tables():
    def run(group):
        tables = held(group, SPECS[group.rank :], zeros)
        return incremental.collect(lambda: tables, WHEN, group)

    for outcome in cases.on_ranks(2, run):
        assert isinstance(outcome, ck.MismatchError) and "same tables" in str(outcome)
