# SPDX-License-Identifier: Apache-2.0
"""DistEmbeddingStrategy: which rank holds which table, columns or rows of the hybrid-parallel layer, and the order in
which inputs and outputs travel. Arithmetic only: it plans for any number of ranks on one host.

The attributes are those of NVIDIA-Merlin's distributed-embeddings, and so are the placements.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..arguments import check_table_shape
from . import dealing, slicing

if TYPE_CHECKING:
    from .report import Report

Config = dict[str, Any]

STRATEGIES = tuple(dealing.RULES)
"""The names of the ways to deal tables out to ranks."""

PLANNED = "planned"
"""The name of the strategy that a planner chooses by costs."""

_THRESHOLDS = ("column_slice_threshold", "row_slice_threshold", "data_parallel_threshold", "gpu_embedding_size")
_ALIKE = ("dtype", "trainable", "embeddings_regularizer", "activity_regularizer", "embeddings_constraint")


def config_of(embedding: Any) -> Config:
    """A copy of the config of an embedding layer, or of a mapping that is one, with its `layer_type`.

    Raises TypeError for anything else, ValueError where it says nothing of `input_dim` and `output_dim`.
    """
    if isinstance(embedding, Mapping):
        config = {"layer_type": None, **embedding}
    elif hasattr(embedding, "get_config"):
        config = {**embedding.get_config(), "layer_type": type(embedding)}
    else:
        raise TypeError(f"an embedding is a layer with get_config(), or its config, got a {type(embedding).__name__}")
    missing = [name for name in ("input_dim", "output_dim") if name not in config]
    if missing:
        raise ValueError(f"the config of {type(embedding).__name__} lacks {' and '.join(missing)}")
    return config


def configs_of(embeddings: Sequence[Any]) -> list[Config]:
    """`config_of` of each. Raises also as `check_table_shape`."""
    configs = [config_of(embedding) for embedding in embeddings]
    for number, config in enumerate(configs):
        check_table_shape((config["input_dim"], config["output_dim"]), str(config.get("name") or number))
    return configs


def tables_of_inputs(input_table_map: Sequence[int] | None, num_tables: int) -> list[int]:
    """The table of each input; None: one input a table. Raises ValueError for no table, TypeError for no list."""
    if input_table_map is None:
        return list(range(num_tables))
    if not hasattr(input_table_map, "__iter__"):
        raise TypeError(f"input_table_map must be a list of numbers of tables, got {input_table_map!r}")
    tables = list(input_table_map)
    for number, table in enumerate(tables):
        try:
            tables[number] = range(num_tables).index(operator.index(table))
        except (TypeError, ValueError):
            raise ValueError(
                "Wrong input initializing input/map groups.: "
                f"input_table_map[{number}] is {table}, and there are {num_tables} tables"
            ) from None
    return tables


def check_thresholds(limits: Sequence[Any]) -> None:
    """Of a DistEmbeddingStrategy, in its order: raises TypeError for what is neither None nor a number, ValueError for
    NaN.
    """
    for name, value in zip(_THRESHOLDS, limits, strict=True):
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if math.isnan(value):
            raise ValueError(f"{name} must be a number, got {value}")


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a rank holds of a table-parallel table: all rows of columns [first_column, first_column + columns).

    table: its number among all tables. variable, first_row: where it lies among the rank's variables.
    """

    table: int
    rank: int
    variable: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Where each table lies, said outright.

    replicated, by_rows: tables. columns: for each rank how many columns it has of which other tables; ranks have them
    in ascending order. on_host: of the tables that are not replicated, those in host memory.
    """

    replicated: tuple[int, ...]
    by_rows: tuple[int, ...]
    columns: tuple[Mapping[int, int], ...]
    on_host: frozenset[int] = frozenset()

    def check(self, configs: Sequence[Config], num_ranks: int) -> None:
        """Raises ValueError unless it gives each of these tables a place on so many ranks."""
        if len(self.columns) != num_ranks:
            raise ValueError(f"an assignment for {len(self.columns)} ranks, and there are {num_ranks}")
        placed = {
            table: configs[table]["output_dim"] for table in (*self.replicated, *self.by_rows) if table < len(configs)
        }
        twice = len(placed) != len(self.replicated) + len(self.by_rows)
        for columns in self.columns:
            for table, number in columns.items():
                twice = twice or table in (*self.replicated, *self.by_rows) or number < 1
                placed[table] = placed.get(table, 0) + number
        if twice or placed != {table: config["output_dim"] for table, config in enumerate(configs)}:
            raise ValueError(
                f"an assignment of other tables than these {len(configs)}: it must place all columns of each once"
            )


class DistEmbeddingStrategy:
    """Plans where the tables of a hybrid-parallel layer lie.

    Args:
      embeddings: layers that are not built, or their configs (mappings with `input_dim` and `output_dim`).
      world_size: the number of ranks to plan for; nobody else is asked.
      strategy: "basic" (round robin), "memory_balanced" (as many slices on each rank) or "memory_optimized" (as equal
        sums of elements as one pass gives). "basic" where there is one rank. Or an `Assignment`, which says where each
        table lies, in place of thresholds.
      input_table_map: the table of each input; None: one input a table.
      column_slice_threshold: table-parallel tables of more elements (rows x width) are cut into columns, by halves
        until none has more. None: only as far as each rank needs something to hold. Not negative.
      row_slice_threshold: tables of at least so many elements lie on all ranks, by rows. None or 0: none.
      data_parallel_threshold: tables of at most so many elements are replicated. None or 0: none. It counts first.
      gpu_embedding_size: how many elements of table-parallel tables each rank keeps on its GPU; the largest beyond it
        are marked `cpu_offload`. None: all.

    Attributes:
      strategy, column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size: as given.
      assignment: as given for `strategy`, which is "planned" then; else None.
      world_size: the number of ranks. tables_of: the table of each input.
      global_configs: the config of each table.
      table_groups: numbers of the replicated, the table-parallel and the row-sliced tables. Within the groups tables
        and inputs are counted anew; what follows counts so.
      input_groups, map_groups: for each group the inputs, and the table of each.
      rev_group_ids: the order that brings the outputs of the groups, one after another, into the order of inputs.
      dp_configs: those of the replicated tables.
      row_sliced_configs: for each rank those of its blocks of rows. row_inputs_offsets: for each rank minus the first
        row of each block; there are none without such tables.
      table_ids: for each rank its table-parallel tables, in the order in which they were dealt.
      input_ids_list: for each rank its inputs. With `dp_input=False` these are what the rank is called with.
      local_configs, local_maps, local_input_offsets: for each rank its variables, the variable of each input, and what
        is to be added to its ids.
      local_group_list, local_weight_offsets: for each rank and variable the tables in it (positions in table_ids) and
        their rows.
      local_pieces: for each rank a `Piece` for each of its table_ids.
      widths_list_flat: the width of each output, rank by rank. rev_tp_ids: the order that brings them into the order of
        inputs. sliced_out_ranges: [first, end) of outputs that are then to be joined along columns, one after another.

    Raises:
      ValueError: an unknown strategy, a number in input_table_map that is no table, a negative column_slice_threshold,
        no ranks, a table without rows or columns.
      TypeError: what is no embedding, a threshold that is no number.
    """

    row_inputs_offsets: list[list[int]]

    def __init__(
        self,
        embeddings: Sequence[Any],
        world_size: int,
        strategy: str | Assignment = "basic",
        input_table_map: Sequence[int] | None = None,
        column_slice_threshold: float | None = None,
        row_slice_threshold: float | None = None,
        data_parallel_threshold: float | None = None,
        gpu_embedding_size: float | None = None,
    ) -> None:
        self.assignment = strategy if isinstance(strategy, Assignment) else None
        if isinstance(strategy, Assignment):
            strategy = PLANNED
            limits = column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size
            if any(limit is not None for limit in limits):
                raise ValueError("an assignment says where each table lies: thresholds and sizes change nothing in it")
        elif strategy not in STRATEGIES:
            names = ", ".join((*STRATEGIES, PLANNED))
            raise ValueError(f"Unsupported shard strategy {strategy}: it must be one of {names}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        check_thresholds([column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size])
        if column_slice_threshold is not None and column_slice_threshold < 0:
            raise ValueError(f"column_slice_threshold must not be negative, got {column_slice_threshold}")
        self.world_size = world_size
        self.strategy = "basic" if world_size == 1 and self.assignment is None else strategy
        self.column_slice_threshold = column_slice_threshold
        self.row_slice_threshold = row_slice_threshold
        self.data_parallel_threshold = data_parallel_threshold
        self.gpu_embedding_size = gpu_embedding_size
        self.global_configs = configs_of(embeddings)
        self.table_groups = self._groups()
        self.tables_of = tables_of_inputs(input_table_map, len(self.global_configs))
        self._group_inputs(self.tables_of)
        self.dp_configs = [dict(self.global_configs[table]) for table in self.table_groups[0]]
        self._slice_rows()
        self._place_tables()

    def report(self, **options: Any) -> Report:
        """What each rank would hold, and how long the stages of a step would take.

        options: of `plan`: batch_size, hotness, skew, samples, optimizer, topology. Raises as it does.
        """
        from .report import report_of
        from .request import Request

        return report_of(
            self, Request.of(self.global_configs, self.world_size, input_table_map=self.tables_of, **options)
        )

    def inputs_of(self, rank: int, dp_input: bool, given: int) -> list[int]:
        """The numbers of the inputs that a rank is called with. ValueError unless they are as many as `given`."""
        expected = list(range(len(self.rev_group_ids))) if dp_input else self.input_ids_list[rank]
        if given != len(expected):
            raise ValueError(f"Expect {expected} inputs, got {given}.")
        return expected

    def flattens(self, number: int, dp_input: bool) -> bool:
        """Whether ids [b, 1] of an input without a combiner give [b, width], as distributed-embeddings has it of tables
        that are neither replicated nor cut by rows, where there are several ranks. With `dp_input` not where a planner
        chose: shapes are not to depend on costs.
        """
        named = self.assignment is None or not dp_input
        return self.world_size > 1 and named and number in self.input_groups[1]

    def joined(self, pieces: Sequence[Any], join: Callable[[list[Any]], Any]) -> list[Any]:
        """Outputs of all ranks, rank by rank, in the order of inputs; those of one input joined along columns."""
        ordered = [pieces[place] for place in self.rev_tp_ids]
        for first, end in self.sliced_out_ranges:
            ordered[first:end] = [join(ordered[first:end])]
        return ordered

    def in_input_order(self, given: Sequence[Any]) -> list[Any]:
        """What a rank that is alone was given in the order of its `input_ids_list`, in the order of inputs."""
        numbers = self.input_ids_list[0]
        return [given[numbers.index(number)] for number in sorted(set(numbers))]

    def _groups(self) -> list[list[int]]:
        if self.assignment is not None:
            self.assignment.check(self.global_configs, self.world_size)
            others = set(self.assignment.replicated) | set(self.assignment.by_rows)
            whole = [table for table in range(len(self.global_configs)) if table not in others]
            return [sorted(self.assignment.replicated), whole, sorted(self.assignment.by_rows)]
        replicated, parallel, by_rows = [], [], []
        for table, config in enumerate(self.global_configs):
            elements = config["input_dim"] * config["output_dim"]
            if self.data_parallel_threshold and elements <= self.data_parallel_threshold:
                replicated.append(table)
            elif self.row_slice_threshold and elements >= self.row_slice_threshold:
                by_rows.append(table)
            else:
                parallel.append(table)
        return [replicated, parallel, by_rows]

    def _group_inputs(self, tables: list[int]) -> None:
        places = {table: (g, i) for g, group in enumerate(self.table_groups) for i, table in enumerate(group)}
        self.input_groups: list[list[int]] = [[], [], []]
        self.map_groups: list[list[int]] = [[], [], []]
        for number, table in enumerate(tables):
            group, place = places[table]
            self.input_groups[group].append(number)
            self.map_groups[group].append(place)
        self.rev_group_ids = slicing.inverse([number for group in self.input_groups for number in group])

    def _slice_rows(self) -> None:
        self.row_sliced_configs: list[list[Config]] = [[] for _ in range(self.world_size)]
        if self.table_groups[2]:
            self.row_inputs_offsets = [[] for _ in range(self.world_size)]
        for table in self.table_groups[2]:
            config = self.global_configs[table]
            if self.assignment is not None:
                config = {**config, "cpu_offload": table in self.assignment.on_host}
            first = 0
            for rank, rows in enumerate(slicing.even_parts(config["input_dim"], self.world_size)):
                self.row_sliced_configs[rank].append({**config, "input_dim": rows})
                self.row_inputs_offsets[rank].append(-first)
                first += rows

    def _place_tables(self) -> None:
        configs = [self.global_configs[table] for table in self.table_groups[1]]
        shapes = [(config["input_dim"], config["output_dim"]) for config in configs]
        dealt, cut = self._dealt(shapes)
        self.table_ids: list[list[int]] = []
        self.input_ids_list: list[list[int]] = []
        self.local_configs: list[list[Config]] = []
        self.local_maps: list[list[int]] = []
        self.local_input_offsets: list[list[int]] = []
        self.local_group_list: list[list[list[int]]] = []
        self.local_weight_offsets: list[list[list[int]]] = []
        self.local_pieces: list[list[Piece]] = []
        inputs_of: list[list[int]] = [[] for _ in configs]
        for number, table in enumerate(self.map_groups[1]):
            inputs_of[table].append(number)
        first_column = [0] * len(configs)
        for rank, columns in enumerate(dealt):
            self._add_rank(rank, columns, configs, inputs_of, first_column)
            for table, width in columns.items():
                first_column[table] += width
        self.widths_list_flat = [
            self.local_configs[rank][variable]["output_dim"]
            for rank, variables in enumerate(self.local_maps)
            for variable in variables
        ]
        self.rev_tp_ids = slicing.inverse([number for numbers in self.input_ids_list for number in numbers])
        holders = [0] * len(configs)
        for tables in self.table_ids:
            for table in tables:
                holders[table] += 1
        self.sliced_out_ranges = [
            [number, number + holders[table]] for number, table in enumerate(self.map_groups[1]) if table in cut
        ]

    def _dealt(self, shapes: Sequence[tuple[int, int]]) -> tuple[list[dict[int, int]], set[int]]:
        """As `dealing.deal_columns`."""
        if self.assignment is None:
            return dealing.deal_columns(shapes, self.world_size, self.strategy, self.column_slice_threshold)
        place = {table: i for i, table in enumerate(self.table_groups[1])}
        ranks = [{place[table]: columns for table, columns in each.items()} for each in self.assignment.columns]
        holders = collections.Counter(table for each in ranks for table in each)
        return ranks, {table for table, number in holders.items() if number > 1}

    def _add_rank(
        self,
        rank: int,
        columns: Mapping[int, int],
        configs: Sequence[Config],
        inputs_of: Sequence[Sequence[int]],
        first_column: Sequence[int],
    ) -> None:
        """What a rank holds and is called with; columns: of its tables, in the order in which they were dealt."""
        tables = list(columns)
        own = [{**configs[table], "output_dim": columns[table]} for table in tables]
        if self.assignment is None:
            slicing.mark_offloaded(own, self.gpu_embedding_size)
        else:
            for table, config in zip(tables, own, strict=True):
                config["cpu_offload"] = self.table_groups[1][table] in self.assignment.on_host
        groups = slicing.group_alike(own, _key)
        variables: list[Config] = []
        offsets: list[list[int]] = []
        place_of: dict[int, tuple[int, int]] = {}
        for number, members in enumerate(groups):
            rows = [0]
            for member in members:
                place_of[member] = (number, rows[-1])
                rows.append(rows[-1] + own[member]["input_dim"])
            variable = {**own[members[0]], "input_dim": rows[-1]}
            if len(members) > 1 and "embeddings_initializer" in variable:
                variable["embeddings_initializer"] = [own[member].get("embeddings_initializer") for member in members]
            variables.append(variable)
            offsets.append(rows)
        inputs = [(number, member) for member, table in enumerate(tables) for number in inputs_of[table]]
        self.table_ids.append(tables)
        self.input_ids_list.append([number for number, _ in inputs])
        self.local_configs.append(variables)
        self.local_maps.append([place_of[member][0] for _, member in inputs])
        self.local_input_offsets.append([place_of[member][1] for _, member in inputs])
        self.local_group_list.append(groups)
        self.local_weight_offsets.append(offsets)
        self.local_pieces.append(
            [
                Piece(
                    self.table_groups[1][table],
                    rank,
                    *place_of[member],
                    own[member]["input_dim"],
                    first_column[table],
                    columns[table],
                )
                for member, table in enumerate(tables)
            ]
        )


def _key(config: Config) -> tuple[Any, ...]:
    """What tables must have in common to be one variable. Initial values are each table's own."""
    # In its files Keras numbers the objects of configs, by their addresses.
    alike = (re.sub(", 'shared_object_id': [0-9]+", "", repr(config.get(name))) for name in _ALIKE)
    return config["output_dim"], config.get("combiner"), config["layer_type"], *alike
