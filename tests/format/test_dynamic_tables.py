# SPDX-License-Identifier: Apache-2.0
"""dump and load of dynamic tables without a framework: over the core's tables, on any number of ranks, from and to
static tables."""

import dataclasses
import functools
import time

import checkpoint_cases as cases
import numpy as np
import pytest

import sparse_operation_kit.checkpoint as ck
from sparse_operation_kit import core
from sparse_operation_kit.checkpoint import serving
from sparse_operation_kit.checkpoint.convert import convert
from sparse_operation_kit.checkpoint.dumping import dump_variables
from sparse_operation_kit.checkpoint.tables import parse_mode
from sparse_operation_kit.checkpoint.variables import StateShard, TableShard, TrainedBy, load_variables
from sparse_operation_kit.held import HeldDynamicTable, HeldTable
from sparse_operation_kit.optimizers import StateSpec
from sparse_operation_kit.placement import ANY_KEY, Placement

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=3)
DIMENSION, ROWS = 3, 41
ADAM = TrainedBy("Adam", 7)


class Column:
    def __init__(self, array):
        self.array = array  # a function

    def read(self, slots):
        return self.array()[slots]

    def write(self, slots, values):
        self.array()[slots] = values


class Scores:
    def __init__(self, table):
        self.table = table

    def read(self, slots):
        return self.table.scores[slots]

    def write(self, slots, values):
        self.table.set_scores(slots, np.ascontiguousarray(values))


class _Untracked:
    def track(self):
        raise NotImplementedError

    def changed(self, stamp):
        raise NotImplementedError

    def overwrite(self, keys, rows):
        raise NotImplementedError


class Dynamic(_Untracked, HeldDynamicTable):
    def __init__(self, group, mode="distributed", capacity=1000, key_type="int64", eviction=None, admission=None):
        policy = {"eviction": eviction, "admission": admission}
        self.table = core.DynamicTable(capacity, DIMENSION, initializer=UNIFORM, **policy, name="t")
        place = Placement(ANY_KEY, DIMENSION, parse_mode(mode), group.size, group.rank)
        super().__init__("t", place, "float32", Column(lambda: self.table.column(0)))
        self.capacity, self.key_type = capacity, key_type
        self.keep(None if eviction is None else Scores(self.table))
        self.most_candidates = admission.max_candidates if admission is not None else 0

    num_entries = property(lambda self: self.table.index.size())
    num_slots = property(lambda self: self.table.index.num_slots)

    def export(self, first_slot, size):
        keys, slots, count = self.table.index.export(first_slot, size)
        return keys[: count[0]], slots[: count[0]]

    def insert(self, keys):
        return core.locate([self.table.table()], np.ascontiguousarray(keys), [[len(keys)]], insert=True)

    def find(self, keys):
        return core.locate([self.table.table()], np.ascontiguousarray(keys), [[len(keys)]])

    def state_columns(self):
        return []

    def erase(self, keys):
        self.table.erase(keys)

    def clear(self):
        self.table.clear()

    def reset_epoch(self):
        self.table.set_epoch(0)

    def candidates(self):
        waiting = self.table.candidates
        keys, slots, count = waiting.index.export()
        return np.stack([keys[: count[0]], waiting.scores[slots[: count[0]]]], axis=1)

    def set_candidates(self, candidates):
        waiting = self.table.candidates
        waiting.clear()
        keys, scores = np.ascontiguousarray(candidates.T)
        slots = core.locate([waiting.table()], keys, [[len(keys)]], insert=True)
        waiting.set_scores(slots, scores)

    def use_times(self):
        return self.table.use_times

    def set_use_times(self, times):
        self.table.use_times = times

    def generations(self, seconds):
        return self.table.generation, self.table.generation_before(seconds)

    def state(self):
        number = self.table.add_column(DIMENSION)
        return Column(lambda: self.table.column(number))

    def content(self, states):
        keys, slots = self.export(0, self.num_slots)
        return {
            key: np.concatenate([column.read(slots[i : i + 1])[0] for column in (self.rows, *states)])
            for i, key in enumerate(keys.tolist())
        }


class Static(_Untracked, HeldTable):
    def __init__(self, group, mode="distributed", rows=ROWS):
        place = Placement(rows, DIMENSION, parse_mode(mode), group.size, group.rank)
        values = core.initialize(
            UNIFORM, place.local_rows, DIMENSION, first_key=place.first_key, key_stride=place.key_stride
        )
        super().__init__("t", place, "float32", Column(lambda: values))

    def state(self):
        values = np.zeros((self.placement.local_rows, DIMENSION), np.float32)
        return Column(lambda: values)

    def content(self, states):
        keys = self.keys(slice(0, self.num_entries)).tolist()
        every = np.concatenate([column.read(slice(None)) for column in (self.rows, *states)], axis=1)
        return dict(zip(keys, every, strict=True))


def shard(held):
    """(the table with Adam's states, their columns)."""
    columns = [held.state() for _ in "mv"]
    states = [StateShard(StateSpec(name), column, held.state) for name, column in zip("mv", columns, strict=True)]
    return TableShard(held, states, restore=lambda iterations, scalars: None), columns


def train(held, columns, keys):
    """Numbers that tell keys and columns apart, at the keys of this rank."""
    mine = keys[held.placement.mine(keys)]
    slots = held.slots(mine)
    for number, column in enumerate((held.rows, *columns)):
        column.write(slots, (mine % 100_003).astype(np.float32)[:, None] + np.arange(DIMENSION) * (number + 0.5))


def dumped(path, size, make, keys):
    """Dumps on `size` ranks what `train` wrote; {key: values} of all."""

    def run(group):
        held = make(group)
        described, columns = shard(held)
        train(held, columns, keys)
        dump_variables(
            path, lambda: ([described], ADAM), group=group, frontend="test", step=None, extra=None, progress=False
        )
        return held.content(columns)

    return joined(cases.results(cases.on_ranks(size, run)))


def loaded(path, size, make, *, before=None):
    def run(group):
        held = make(group)
        described, columns = shard(held)
        if before is not None:
            train(held, columns, before)
        steps = []
        by = dataclasses.replace(ADAM, restore=steps.append)
        load_variables(path, lambda: ([described], by), group=group, verify="before", progress=False)
        assert steps == [7]
        return held.content(columns)

    return joined(cases.results(cases.on_ranks(size, run)))


def joined(parts):
    whole = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole.update(part)
    return whole


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key].tobytes() == values.tobytes(), key


WILD = np.array([-(2**63), 2**63 - 1, -1, 0, 1, -7, 10**12, *range(100, 5000, 37)])


@pytest.mark.parametrize("writers", (1, 2, 4))
@pytest.mark.parametrize("readers", (1, 3))
def test_any_number_of_ranks(writers, readers, tmp_path):
    path = tmp_path / "d"
    wanted = dumped(path, writers, Dynamic, WILD)
    assert set(wanted) == set(WILD.tolist())
    assert_same(loaded(path, readers, Dynamic), wanted)
    # What the table held before is gone, rows and states.
    assert_same(loaded(path, readers, Dynamic, before=np.arange(-50, 50)), wanted)
    with ck.open_dump(path) as dump:
        table = dump.table("t:0").table
        assert (table.kind, table.key_type, table.mode) == ("dynamic", "int64", "distributed")


def test_localized_and_int32(tmp_path):
    keys = np.array([-(2**31), 2**31 - 1, 5, -5])
    make = functools.partial(Dynamic, mode="localized:1", key_type="int32")
    wanted = dumped(tmp_path / "d", 2, make, keys)
    with ck.open_dump(tmp_path / "d") as dump:
        assert dump.table("t:0").table.key_type == "int32"
    assert_same(loaded(tmp_path / "d", 3, Dynamic), wanted)
    dumped(tmp_path / "wide", 1, Dynamic, WILD)
    with pytest.raises(ck.KeysError, match="holds the key"):
        loaded(tmp_path / "wide", 1, lambda group: Dynamic(group, key_type="int32"))


@pytest.mark.parametrize("mode", ("distributed", "localized:0"))
def test_from_static_to_dynamic_and_back(mode, tmp_path):
    make = functools.partial(Static, mode=mode)
    wanted = dumped(tmp_path / "static", 2, make, np.arange(ROWS))
    assert_same(loaded(tmp_path / "static", 3, Dynamic, before=WILD), wanted)
    again = dumped(tmp_path / "dynamic", 2, Dynamic, np.arange(ROWS))
    assert_same(loaded(tmp_path / "dynamic", 3, make), again)


def test_rows_that_a_dynamic_table_never_saw_stay_as_they_are(tmp_path):
    seen = np.array([3, 40, 17])
    wanted = dumped(tmp_path / "d", 2, Dynamic, seen)
    found = loaded(tmp_path / "d", 2, Static)
    initial = core.initialize(UNIFORM, ROWS, DIMENSION)
    for key in range(ROWS):
        values = wanted.get(key, np.concatenate([initial[key], np.zeros(2 * DIMENSION, np.float32)]))
        assert found[key].tobytes() == values.tobytes()


@pytest.mark.parametrize("keys", ([3, ROWS], [-1]), ids=("beyond", "negative"))
def test_a_static_table_takes_row_numbers_alone(keys, tmp_path):
    dumped(tmp_path / "d", 1, Dynamic, np.array(keys))
    with pytest.raises(ck.KeysError, match=rf"holds the key {keys[-1]}.*keys in \[0, {ROWS - 1}\]"):
        loaded(tmp_path / "d", 1, Static)


def test_more_rows_than_the_capacity(tmp_path):
    dumped(tmp_path / "d", 1, Dynamic, np.arange(100))
    tables = []

    def make(group):
        tables.append(Dynamic(group, capacity=60))
        return tables[-1]

    with pytest.raises(ck.MismatchError, match=r"has 100 rows for this rank.*at most 60, the capacity of 't:0'"):
        loaded(tmp_path / "d", 1, make, before=np.arange(5))
    assert set(tables[0].export(0, 100)[0].tolist()) == set(range(5))  # nothing was changed
    wanted = dumped(tmp_path / "d", 1, Dynamic, np.arange(100))
    assert_same(loaded(tmp_path / "d", 2, make), wanted)  # there is room on two


def test_an_empty_table(tmp_path):
    assert dumped(tmp_path / "d", 3, Dynamic, np.zeros(0, np.int64)) == {}
    assert loaded(tmp_path / "d", 2, Dynamic, before=WILD) == {}


def test_the_order_of_eviction_survives(tmp_path):
    """Where a table goes on after a load the same rows go as where it was not interrupted; a dump without scores is a
    table whose rows were all used last when they were loaded."""
    make = functools.partial(Dynamic, capacity=4, eviction="lfu")
    with ck.open_dump(_evicting(tmp_path / "d", make)) as dump:
        assert dump.table("t:0").table.kept == {"score": "int64", "used": "int64"}
        assert "t_0-sok-score" in [file.spec.name for file in dump.table("t:0").files]
    convert(str(tmp_path / "d"), str(tmp_path / "d.npz"))
    convert(str(tmp_path / "d.npz"), str(tmp_path / "again"))
    tables = []

    def loading(group, **options):
        tables.append(make(group, **options))
        return tables[-1]

    loaded(tmp_path / "again", 1, loading)
    loaded(tmp_path / "d", 1, functools.partial(loading, eviction=None))  # which has no use for them
    for held in tables:
        held.table.end_step()
    tables[0].insert(np.array([5]))
    assert set(tables[0].export(0, 4)[0].tolist()) == {1, 3, 4, 5}  # 2 was used least often
    assert tables[1].kept == {}
    wanted = dumped(tmp_path / "plain", 1, Dynamic, np.arange(4))
    assert_same(loaded(tmp_path / "plain", 1, make), wanted)


def _evicting(path, make):
    def run(group):
        held = make(group)
        described, columns = shard(held)
        train(held, columns, np.array([1, 2, 3, 4]))
        for keys in ([1, 3, 4], [4, 3, 1]):
            held.insert(np.array(keys))
        dump_variables(
            path, lambda: ([described], ADAM), group=group, frontend="test", step=None, extra=None, progress=False
        )

    cases.results(cases.on_ranks(1, run))
    return path


@pytest.mark.parametrize(("writers", "readers"), ((1, 1), (2, 3), (3, 1)))
def test_what_waits_and_when_rows_were_used(writers, readers, tmp_path):
    """Go to the ranks of the keys; a dump of several ranks says of each row when it was used, whatever their calls."""
    make = functools.partial(Dynamic, eviction="lru", admission=core.Admission(100, max_candidates=40))
    rows, waiting = np.arange(100, 130), np.arange(60)
    now = time.time_ns()
    used = {key: now - (key % 7) * 10**10 for key in rows.tolist()}

    def write(group):
        held = make(group)
        mine = rows[held.placement.mine(rows)]
        order = sorted(mine.tolist(), key=lambda key: used[key])
        slots = held.insert(np.array(order))
        for number, slot in enumerate(slots.tolist()):  # of each rank other generations
            held.kept["score"].write(np.array([slot]), np.array([(number + 1) * (group.rank + 1)]))
        held.kept["used"].write(slots, np.array([used[key] for key in order]))
        np.testing.assert_array_equal(held.kept["used"].read(slots), [used[key] for key in order])
        keys = waiting[held.placement.mine(waiting)]
        held.set_candidates(np.stack([keys, (keys + 1) << 32 | 1], axis=1)[-held.most_candidates :])
        dump_variables(
            tmp_path / "d",
            lambda: ([TableShard(held)], None),
            group=group,
            frontend="test",
            step=None,
            extra=None,
            progress=False,
        )

    cases.results(cases.on_ranks(writers, write))

    def read(group):
        held = make(group)
        held.set_candidates(np.array([[5000, 1 << 32 | 1]]))
        load_variables(tmp_path / "d", lambda: ([TableShard(held)], None), group=group, verify="before", progress=False)
        keys, slots = held.export(0, held.num_slots)
        return dict(zip(keys.tolist(), held.kept["used"].read(slots).tolist(), strict=True)), held.candidates().tolist()

    found = cases.results(cases.on_ranks(readers, read))
    times = joined([times for times, _ in found])
    assert times.keys() == used.keys()
    # None is older than it was, and none by more younger than where generations of ranks meet.
    assert all(times[key] >= used[key] for key in used)
    if writers == 1:
        assert times == used
    candidates = {key: score >> 32 for _, pairs in found for key, score in pairs}
    most = min(40, -(-60 // readers)) if writers > 1 else None
    assert all(count == key + 1 for key, count in candidates.items())
    assert max(candidates) == 59 and 5000 not in candidates
    assert most is None or len(candidates) == min(60, 40 * readers)
    assert [source.table.name for source in serving.sources_of(ck.open_dump(tmp_path / "d"))] == ["t:0"]


def test_a_dump_without_them(tmp_path):
    """Keys that waited wait no more; rows were used now."""
    dumped(tmp_path / "d", 1, Dynamic, np.arange(4))
    make = functools.partial(Dynamic, eviction="lru", admission=core.Admission(3, max_candidates=10))
    tables = []

    def loading(group):
        tables.append(make(group))
        tables[0].set_candidates(np.array([[5000, 1 << 32 | 1]]))
        return tables[0]

    loaded(tmp_path / "d", 1, loading)
    assert tables[0].candidates().shape == (0, 2)
    assert abs(tables[0].kept["used"].read(np.arange(4)) - time.time_ns()).max() < 3600 * 10**9
