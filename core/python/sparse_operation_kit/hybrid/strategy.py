# SPDX-License-Identifier: Apache-2.0
"""DistEmbeddingStrategy: which rank holds which table, columns or rows of the hybrid-parallel layer, and the order in
which inputs and outputs travel. Arithmetic only: it plans for any number of ranks on one host.

The attributes are those of NVIDIA-Merlin's distributed-embeddings, and so are the placements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from . import dealing, slicing

Config = dict[str, Any]

STRATEGIES = tuple(dealing.RULES)
"""The names of the ways to deal tables out to ranks."""

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


class DistEmbeddingStrategy:
    """Plans where the tables of a hybrid-parallel layer lie.

    Args:
      embeddings: layers that are not built, or their configs (mappings with `input_dim` and `output_dim`).
      world_size: the number of ranks to plan for; nobody else is asked.
      strategy: "basic" (round robin), "memory_balanced" (as many slices on each rank) or "memory_optimized" (as equal
        sums of elements as one pass gives). "basic" where there is one rank.
      input_table_map: the table of each input; None: one input a table.
      column_slice_threshold: table-parallel tables of more elements (rows x width) are cut into columns, by halves
        until none has more. None: only as far as each rank needs something to hold. Not negative.
      row_slice_threshold: tables of at least so many elements lie on all ranks, by rows. None or 0: none.
      data_parallel_threshold: tables of at most so many elements are replicated. None or 0: none. It counts first.
      gpu_embedding_size: how many elements of table-parallel tables each rank keeps on its GPU; the largest beyond it
        are marked `cpu_offload`. None: all.

    Attributes:
      strategy, column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size: as given.
      world_size: the number of ranks.
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
      ValueError: an unknown strategy, a number in input_table_map that is no table, a negative threshold, no ranks.
      TypeError: what is no embedding.
    """

    row_inputs_offsets: list[list[int]]

    def __init__(
        self,
        embeddings: Sequence[Any],
        world_size: int,
        strategy: str = "basic",
        input_table_map: Sequence[int] | None = None,
        column_slice_threshold: float | None = None,
        row_slice_threshold: float | None = None,
        data_parallel_threshold: float | None = None,
        gpu_embedding_size: float | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"Unsupported shard strategy {strategy}: it must be one of {', '.join(STRATEGIES)}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if column_slice_threshold is not None and column_slice_threshold < 0:
            raise ValueError(f"column_slice_threshold must not be negative, got {column_slice_threshold}")
        self.world_size = world_size
        self.strategy = "basic" if world_size == 1 else strategy
        self.column_slice_threshold = column_slice_threshold
        self.row_slice_threshold = row_slice_threshold
        self.data_parallel_threshold = data_parallel_threshold
        self.gpu_embedding_size = gpu_embedding_size
        self.global_configs = [config_of(embedding) for embedding in embeddings]
        tables = range(len(self.global_configs))
        self.table_groups = self._groups()
        self._group_inputs(list(tables) if input_table_map is None else list(input_table_map))
        self.dp_configs = [dict(self.global_configs[table]) for table in self.table_groups[0]]
        self._slice_rows()
        self._place_tables()

    def in_input_order(self, given: Sequence[Any]) -> list[Any]:
        """What a rank that is alone was given in the order of its `input_ids_list`, in the order of inputs."""
        numbers = self.input_ids_list[0]
        return [given[numbers.index(number)] for number in sorted(set(numbers))]

    def _groups(self) -> list[list[int]]:
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
            if table not in places:
                raise ValueError(
                    "Wrong input initializing input/map groups.: "
                    f"input_table_map[{number}] is {table}, and there are {len(places)} tables"
                )
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
            first = 0
            for rank, rows in enumerate(slicing.even_parts(config["input_dim"], self.world_size)):
                self.row_sliced_configs[rank].append({**config, "input_dim": rows})
                self.row_inputs_offsets[rank].append(-first)
                first += rows

    def _place_tables(self) -> None:
        configs = [self.global_configs[table] for table in self.table_groups[1]]
        shapes = [(config["input_dim"], config["output_dim"]) for config in configs]
        widths = slicing.column_widths(shapes, self.world_size, self.column_slice_threshold)
        sizes = [(rows * width, table) for table, (rows, _) in enumerate(shapes) for width in widths[table]]
        dealt = dealing.RULES[self.strategy](sizes, self.world_size)
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
        cut = [0] * len(configs)  # slices of each table that lower ranks have
        first_column = [0] * len(configs)
        for rank, tables in enumerate(dealt):
            columns: dict[int, int] = {}  # slices of a table that meet become one
            for table in tables:
                columns[table] = columns.get(table, 0) + widths[table][cut[table]]
                cut[table] += 1
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
            [number, number + holders[table]]
            for number, table in enumerate(self.map_groups[1])
            if len(widths[table]) > 1
        ]

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
        slicing.mark_offloaded(own, self.gpu_embedding_size)
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
    alike = (repr(config.get(name)) for name in _ALIKE)
    return config["output_dim"], config.get("combiner"), config["layer_type"], *alike
