# SPDX-License-Identifier: Apache-2.0
"""A layer's tables dumped from one placement and loaded into another, by ranks that are threads, with NumPy's arrays as
variables: rows, states, states with a number a row, and states that no step has made yet. And rows that changed.
"""

import datetime
import importlib.util
import pathlib
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_operation_kit import incremental
from sparse_operation_kit.checkpoint.dumping import dump_variables
from sparse_operation_kit.checkpoint.errors import PeerError
from sparse_operation_kit.checkpoint.variables import StateShard, TableShard, TrainedBy, load_variables
from sparse_operation_kit.held import Compared, HeldTable
from sparse_operation_kit.hybrid import STRATEGIES, DistEmbeddingStrategy
from sparse_operation_kit.hybrid.dumping import LayerTables, layer_shards
from sparse_operation_kit.hybrid.layout import layout_of
from sparse_operation_kit.hybrid.transfer import Transfer
from sparse_operation_kit.increment_series import Increments
from sparse_operation_kit.optimizers import StateSpec
from sparse_operation_kit.placement import Placement

_spec = importlib.util.spec_from_file_location(
    "checkpoint_cases", pathlib.Path(__file__).parents[1] / "format" / "checkpoint_cases.py"
)
ranks = sys.modules.setdefault("checkpoint_cases", importlib.util.module_from_spec(_spec))
if not hasattr(ranks, "on_ranks"):
    _spec.loader.exec_module(ranks)

STATES = (StateSpec("m"), StateSpec("v", initial=0.5), StateSpec("accumulator", rowwise=True, initial=0.25))


class ArrayTable(HeldTable):
    """slots: of its keys on this rank; stamps: when rows changed."""

    def __init__(self, name, place, array, slots, stamps):
        super().__init__(name, place, array.dtype.name, ranks.ArrayColumn(array))
        self._slots, self._stamps = slots, stamps

    def track(self):
        return

    def changed(self, stamp):
        return np.flatnonzero(self._stamps >= stamp)

    def overwrite(self, keys, rows):
        assert rows.dtype.name == self.row_dtype and len(set(keys)) == len(keys)
        self.rows.write(self._slots(keys), rows)


class Layer:
    """This rank's variables of a layer, and their states; `made`: those that some step has made."""

    def __init__(self, strategy, rank, made, dtype="float32"):
        self.strategy, self.rank, self.made, self.dtype = strategy, rank, made, dtype
        self.layout = layout_of(strategy)
        self.columns = {"rows": self.arrays(), **{spec.name: self.arrays(spec) for spec in STATES if made}}
        self.stamps = {key: np.zeros(len(array), np.int64) for key, array in self.columns["rows"].items()}

    def arrays(self, spec=None):
        """For each own variable, and each replicated table, an array."""
        ranks = self.strategy.world_size
        shapes = {
            ("variable", i): self.layout.variables[i].placement(ranks, self.rank).local_shape
            for i in self.layout.of_rank(self.rank)
        }
        configs = self.strategy.global_configs
        shapes |= {
            ("table", t): (configs[t]["input_dim"], configs[t]["output_dim"]) for t in self.strategy.table_groups[0]
        }
        fill = np.nan if spec is None else spec.initial
        return {
            key: np.full(shape[:1] if spec and spec.rowwise else shape, fill, np.float32 if spec else self.dtype)
            for key, shape in shapes.items()
        }

    def set(self, name, whole):
        """Of tables [rows, width]; of a state with a number a row, each of its elements in a row is equal."""
        arrays = self.columns[name]
        for number, first, rows in Transfer(self.strategy, self.layout, self.rank).writes(whole, 10):
            target = arrays["variable", number]
            target[first : first + len(rows)] = rows[:, 0] if target.ndim == 1 else rows
        for table in self.strategy.table_groups[0]:
            target = arrays["table", table]
            target[:] = whole[table][:, 0] if target.ndim == 1 else whole[table]

    def mark(self, table, keys, stamp):
        """Rows of a table changed."""
        if ("table", table) in self.stamps:
            self.stamps["table", table][keys] = stamp
        for (kind, number), stamps in self.stamps.items():
            if kind == "variable":
                place = self.layout.variables[number].placement(self.strategy.world_size, self.rank)
                for member in self.layout.variables[number].members:
                    if member.table == table:
                        stamps[place.key_map(keys[place.mine(keys)]) + member.first_row] = stamp

    def tables(self):
        return [shard.held for shard in self.describe()[0]]

    def describe(self):
        ranks = self.strategy.world_size
        keys = list(self.columns["rows"])
        shards = [self.shard(key) for key in keys]
        layer = LayerTables(
            "layer",
            self.layout,
            self.strategy.global_configs,
            [self.dtype] * len(self.strategy.global_configs),
            {number: None for kind, number in keys if kind == "variable"},
            {number: None for kind, number in keys if kind == "table"},
        )
        place = Placement(0, 0, num_ranks=ranks, rank=self.rank)
        return layer_shards(layer, place, iter(shards)), TrainedBy("Own", 3)

    def shard(self, key):
        rows, (kind, number) = self.columns["rows"][key], key
        place = Placement(rows.shape[0], rows.shape[1], num_ranks=self.strategy.world_size, rank=self.rank)
        if kind == "variable":
            place = self.layout.variables[number].placement(self.strategy.world_size, self.rank)
        slots = place.key_map if kind == "variable" else np.asarray

        def state(spec):
            def make():
                self.columns.setdefault(spec.name, {}).setdefault(key, self.arrays(spec)[key])
                return ranks.ArrayColumn(self.columns[spec.name][key])

            return StateShard(spec, ranks.ArrayColumn(self.columns[spec.name][key]) if self.made else None, make)

        table = ArrayTable(str(key), place, rows, slots, self.stamps[key])
        return TableShard(table, [state(spec) for spec in STATES])


@st.composite
def _placements(draw, tables):
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    limits = [draw(st.one_of(st.none(), st.integers(1, 60))) for _ in range(3)]
    return DistEmbeddingStrategy(tables, ranks, draw(st.sampled_from(STRATEGIES)), None, *limits)


@st.composite
def _pairs(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 7)), min_size=1, max_size=4))
    tables = [{"input_dim": rows, "output_dim": width, "combiner": "sum"} for rows, width in shapes]
    dtype = draw(st.sampled_from(["float32", "float16"]))
    return draw(_placements(tables)), draw(_placements(tables)), dtype, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=12)
@given(_pairs(), st.booleans())
def test_any_placement_to_any_other(tmp_path_factory, pair, made):
    writing, reading, dtype, seed = pair
    path = tmp_path_factory.mktemp("dump") / "dump"
    rng = np.random.default_rng(seed)
    shapes = [(config["input_dim"], config["output_dim"]) for config in writing.global_configs]
    whole = {"rows": [rng.normal(size=shape).astype(dtype) for shape in shapes]}
    for spec in STATES:
        each = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        whole[spec.name] = [np.broadcast_to(array[:, :1], array.shape) if spec.rowwise else array for array in each]
        if not made:
            whole[spec.name] = [np.full(shape, spec.initial, np.float32) for shape in shapes]

    def write(group):
        layer = Layer(writing, group.rank, made, dtype)
        for name in layer.columns:
            layer.set(name, whole[name])
        dump_variables(path, layer.describe, group=group, frontend="numpy", step=1, extra=None, progress=False)

    def read(group):
        layer, wanted = Layer(reading, group.rank, False, dtype), Layer(reading, group.rank, True, dtype)
        load_variables(path, layer.describe, group=group, verify="before", progress=False)
        for name in wanted.columns:
            wanted.set(name, whole[name])
            for key, array in wanted.columns[name].items():
                np.testing.assert_allclose(layer.columns[name][key], array, rtol=1e-6, err_msg=f"{name} {key}")

    ranks.results(ranks.on_ranks(writing.world_size, write))
    ranks.results(ranks.on_ranks(reading.world_size, read))


@settings(max_examples=12)
@given(_pairs())
def test_changed_rows_reach_any_other_placement(tmp_path_factory, pair):
    """Whole rows of whole tables, as arrays, through a directory and as increments; also where pieces of columns know
    of other rows.
    """
    writing, reading, dtype, seed = pair
    folder = tmp_path_factory.mktemp("changes")
    rng = np.random.default_rng(seed)
    shapes = [(config["input_dim"], config["output_dim"]) for config in writing.global_configs]
    before, after = ([rng.normal(size=shape).astype(dtype) for shape in shapes] for _ in range(2))
    changed = [np.flatnonzero(rng.random(rows) < 0.5) for rows, _ in shapes]
    for old, new, keys in zip(before, after, changed, strict=True):
        kept = np.setdiff1d(np.arange(len(old)), keys)
        new[kept] = old[kept]
    moment = datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc)
    stamp = incremental.to_stamp(moment)
    knows = rng.random((writing.world_size, max(rows for rows, _ in shapes))) < 0.5
    pieces = {}  # of a table: the ranks that have columns of it
    for variable in layout_of(writing).variables:
        for member in variable.members:
            pieces.setdefault(member.table, []).append(variable.owner)

    def write(group):
        layer = Layer(writing, group.rank, False, dtype)
        layer.set("rows", after)
        series = Increments(lambda what: (group, layer.tables()), "numpy", 0, None)
        for table, keys in enumerate(changed):
            owners = np.array(pieces.get(table, []))
            if len(owners) > 1:  # one of them at least knows of a row
                first = owners[keys % len(owners)] == group.rank
                keys = keys[first | knows[group.rank, keys]]
            layer.mark(table, keys, stamp)
        delta = incremental.collect(layer.tables, moment, group)
        for keys, rows, wanted, table in zip(*delta, changed, after, strict=True):
            np.testing.assert_array_equal(keys, wanted)
            np.testing.assert_array_equal(rows, table[wanted])
            assert rows.dtype == dtype
        if group.rank == 0:
            incremental.save(folder / "delta", layer.tables(), *delta, step=None, extra=None, frontend="numpy")
        series._since = stamp
        assert series.save(folder / "increment") == 1
        return delta

    delta = ranks.results(ranks.on_ranks(writing.world_size, write))[0]

    def read(group):
        wanted = Layer(reading, group.rank, False, dtype)
        wanted.set("rows", after)
        for source in (delta, folder / "delta", folder / "increment"):
            layer = Layer(reading, group.rank, False, dtype)
            layer.set("rows", before)
            if source == folder / "increment":
                assert Increments(lambda what: (group, layer.tables()), "numpy", 0, None).load(source)  # noqa: B023
            else:
                incremental.apply(source, layer.tables, group)
            for key, array in wanted.columns["rows"].items():
                np.testing.assert_array_equal(layer.columns["rows"][key], array, err_msg=f"{source} {key}")

    ranks.results(ranks.on_ranks(reading.world_size, read))


def test_rows_that_are_compared():
    rows = np.array([[1.0, 2.0], [np.nan, 0.0], [3.0, 4.0]], np.float32)
    start = time.time_ns()
    compared = Compared(rows)
    assert compared.changed(rows, start).tolist() == [0, 1, 2]
    later = time.time_ns()
    assert compared.changed(rows, later).tolist() == []
    rows[1, 1] = 5
    assert compared.changed(rows, later).tolist() == compared.changed(rows, later).tolist() == [1]
    later = time.time_ns()
    assert compared.changed(rows, later).tolist() == []
    assert compared.changed(rows.astype(np.float16), later).tolist() == [0, 1, 2]


def test_other_tables_on_a_rank_are_an_error_everywhere(tmp_path):
    tables = [{"input_dim": 4, "output_dim": 4, "combiner": "sum"}]

    def write(group):
        layer = Layer(DistEmbeddingStrategy(tables * (1 + group.rank), 2), group.rank, True)
        layer.set("rows", [np.zeros((4, 4))] * 2)
        dump_variables(
            tmp_path / "dump", layer.describe, group=group, frontend="numpy", step=None, extra=None, progress=False
        )

    outcomes = ranks.on_ranks(2, write)
    assert all(isinstance(each, (ValueError, PeerError)) for each in outcomes), outcomes
    assert not (tmp_path / "dump").exists()
    with pytest.raises(ValueError, match="names the tables"):
        raise outcomes[0]
