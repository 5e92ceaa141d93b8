# SPDX-License-Identifier: Apache-2.0
"""A layer's tables dumped from one placement and loaded into another, by ranks that are threads, with NumPy's arrays as
variables: rows, states, states with a number a row, and states that no step has made yet.
"""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_operation_kit.checkpoint.errors import PeerError
from sparse_operation_kit.checkpoint.variables import (
    StateShard,
    TableShard,
    TrainedBy,
    dump_variables,
    load_variables,
)
from sparse_operation_kit.held import HeldTable
from sparse_operation_kit.hybrid import STRATEGIES, DistEmbeddingStrategy
from sparse_operation_kit.hybrid.dumping import LayerTables, layer_shards
from sparse_operation_kit.hybrid.layout import layout_of
from sparse_operation_kit.hybrid.transfer import Transfer
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
    def __init__(self, name, place, array):
        super().__init__(name, place, "float32", ranks.ArrayColumn(array))

    def track(self):
        raise NotImplementedError

    changed = overwrite = track


class Layer:
    """This rank's variables of a layer, and their states; `made`: those that some step has made."""

    def __init__(self, strategy, rank, made):
        self.strategy, self.rank, self.made = strategy, rank, made
        self.layout = layout_of(strategy)
        self.columns = {"rows": self.arrays(), **{spec.name: self.arrays(spec) for spec in STATES if made}}

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
            key: np.full(shape[:1] if spec and spec.rowwise else shape, fill, np.float32)
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

    def describe(self):
        ranks = self.strategy.world_size
        keys = list(self.columns["rows"])
        shards = [self.shard(key) for key in keys]
        layer = LayerTables(
            "layer",
            self.layout,
            self.strategy.global_configs,
            ["float32"] * len(self.strategy.global_configs),
            {number: None for kind, number in keys if kind == "variable"},
            {number: None for kind, number in keys if kind == "table"},
        )
        place = Placement(0, 0, num_ranks=ranks, rank=self.rank)
        return layer_shards(layer, place, iter(shards)), TrainedBy("Own", 3)

    def shard(self, key):
        rows = self.columns["rows"][key]
        place = Placement(*rows.shape, num_ranks=self.strategy.world_size, rank=self.rank)

        def state(spec):
            def make():
                self.columns.setdefault(spec.name, {}).setdefault(key, self.arrays(spec)[key])
                return ranks.ArrayColumn(self.columns[spec.name][key])

            return StateShard(spec, ranks.ArrayColumn(self.columns[spec.name][key]) if self.made else None, make)

        return TableShard(ArrayTable(str(key), place, rows), [state(spec) for spec in STATES])


@st.composite
def _placements(draw, tables):
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    limits = [draw(st.one_of(st.none(), st.integers(1, 60))) for _ in range(3)]
    return DistEmbeddingStrategy(tables, ranks, draw(st.sampled_from(STRATEGIES)), None, *limits)


@st.composite
def _pairs(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 7)), min_size=1, max_size=4))
    tables = [{"input_dim": rows, "output_dim": width, "combiner": "sum"} for rows, width in shapes]
    return draw(_placements(tables)), draw(_placements(tables)), draw(st.booleans()), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=12)
@given(_pairs())
def test_any_placement_to_any_other(tmp_path_factory, pair):
    writing, reading, made, seed = pair
    path = tmp_path_factory.mktemp("dump") / "dump"
    rng = np.random.default_rng(seed)
    shapes = [(config["input_dim"], config["output_dim"]) for config in writing.global_configs]
    whole = {"rows": [rng.normal(size=shape).astype(np.float32) for shape in shapes]}
    for spec in STATES:
        each = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        whole[spec.name] = [np.broadcast_to(array[:, :1], array.shape) if spec.rowwise else array for array in each]
        if not made:
            whole[spec.name] = [np.full(shape, spec.initial, np.float32) for shape in shapes]

    def write(group):
        layer = Layer(writing, group.rank, made)
        for name in layer.columns:
            layer.set(name, whole[name])
        dump_variables(path, layer.describe, group=group, frontend="numpy", step=1, extra=None, progress=False)

    def read(group):
        layer, wanted = Layer(reading, group.rank, False), Layer(reading, group.rank, True)
        load_variables(path, layer.describe, group=group, verify="before", progress=False)
        for name in wanted.columns:
            wanted.set(name, whole[name])
            for key, array in wanted.columns[name].items():
                np.testing.assert_allclose(layer.columns[name][key], array, rtol=1e-6, err_msg=f"{name} {key}")

    ranks.results(ranks.on_ranks(writing.world_size, write))
    ranks.results(ranks.on_ranks(reading.world_size, read))


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
