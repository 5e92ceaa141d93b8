# SPDX-License-Identifier: Apache-2.0
"""The variables that a frontend makes of a plan, and the lookups that it makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..placement import DISTRIBUTED, Placement, as_signed, mode_of, table_seed
from ..placement import Member as StackMember
from .strategy import Config, DistEmbeddingStrategy

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Member:
    """A table, or columns of it, in a variable: rows [first_row, first_row + rows) there are its rows, of columns
    [first_column, first_column + columns).
    """

    table: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclasses.dataclass(frozen=True)
class PlannedVariable:
    """A variable that all ranks make: on one rank, or by rows on all of them.

    config: of its tables, which are alike. owner: a rank, or DISTRIBUTED.
    """

    owner: int
    rows: int
    columns: int
    config: Config
    members: tuple[Member, ...]

    @property
    def mode(self) -> str:
        """As `sok.Variable` takes it."""
        return mode_of(self.owner)

    def placement(self, num_ranks: int, rank: int) -> Placement:
        """What of it a rank holds."""
        return Placement(self.rows, self.columns, self.owner, num_ranks, rank)

    def chosen(self, number: int, layer: str, num_ranks: int, rank: int) -> StackMember | None:
        """Member `number`, as a lookup names it where the variable is a stack. None: it has all rows."""
        member = self.members[number]
        if member.rows == self.rows:
            return None
        place = Placement(member.rows, self.columns, self.owner, num_ranks, rank)
        return StackMember(table_name(layer, member.table), member.first_row, place)

    def name(self, layer: str, whole: Sequence[int]) -> str:
        """Its name: that of its table, with the columns that it has, or of its tables; no other contents have it.
        whole: the tables' widths.
        """
        first = self.members[0]
        if len(self.members) > 1:
            tables = "_".join(str(member.table) for member in self.members[:8])
            said = len(self.members) <= 8 and all(m.columns == whole[m.table] for m in self.members)
            others = "" if said else f"_{table_seed(0, repr(self.members)):x}"
            return f"{layer}/tables_{tables}{others}_of_rank_{self.owner}"
        if first.columns == whole[first.table]:
            return table_name(layer, first.table)
        return f"{table_name(layer, first.table)}_columns_{first.first_column}_{first.first_column + first.columns}"


@dataclasses.dataclass(frozen=True)
class Part:
    """A lookup of an input: member `member` of variable `variable`."""

    variable: int
    member: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """variables: the table-parallel ones rank by rank, then the row-sliced ones. lookups: for each input what is looked
    up, to be joined along columns; nothing for inputs of replicated tables. rank_lookups: for each rank those of the
    inputs that are its own. tables_of: the table of each input. widths: of all tables.
    """

    variables: tuple[PlannedVariable, ...]
    lookups: tuple[tuple[Part, ...], ...]
    rank_lookups: tuple[tuple[Part, ...], ...]
    tables_of: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def rank_widths(self) -> list[list[int]]:
        """For each rank the width of each output of its own inputs."""
        return [[self.variables[part.variable].columns for part in parts] for parts in self.rank_lookups]

    def joined(self, numbers: Iterable[int], outputs: Iterable[T], join: Callable[[list[T]], T]) -> list[T]:
        """The outputs of the lookups of some inputs, one after another: for each input one, joined along columns."""
        each = iter(outputs)
        parts = [[next(each) for _ in self.lookups[number]] for number in numbers]
        return [own[0] if len(own) == 1 else join(own) for own in parts]

    def own_lookups(self, rank: int, bags: Sequence[T], nothing: T) -> tuple[list[tuple[Part, T]], slice]:
        """(what all ranks look up of inputs that are a rank's own, which of it is this rank's).

        Lookups are the same on all ranks. bags: of this rank's inputs; for what others ask of their tables there is
        `nothing`.
        """
        lookups = [
            (part, bags[i] if owner == rank else nothing)
            for owner, parts in enumerate(self.rank_lookups)
            for i, part in enumerate(parts)
        ]
        first = sum(map(len, self.rank_lookups[:rank]))
        return lookups, slice(first, first + len(bags))

    def contents(self, number: int) -> int:
        """`Placement.contents` of a variable: another one where anything in the layer lies elsewhere."""
        lies = [(variable.owner, variable.members) for variable in self.variables]
        return as_signed(table_seed(number, repr(lies)))

    def of_rank(self, rank: int) -> list[int]:
        """The variables of which a rank has rows."""
        return [i for i, variable in enumerate(self.variables) if variable.owner in (DISTRIBUTED, rank)]


def chunks(rows: int, width: int, elements: int) -> Iterator[tuple[int, int]]:
    """(first, count) of rows, as many at a time as have `elements`, one at least."""
    size = max(1, elements // width)
    for first in range(0, rows, size):
        yield first, min(size, rows - first)


def table_name(layer: str, table: int) -> str:
    """The name of a table: in dumps, and what its initial rows depend on."""
    return f"{layer}/{table}"


def layout_of(strategy: DistEmbeddingStrategy) -> Layout:
    """The variables and lookups of a plan."""
    variables: list[PlannedVariable] = []
    parts: dict[int, list[Part]] = {}
    for rank, pieces in enumerate(strategy.local_pieces):
        first = len(variables)
        for number, config in enumerate(strategy.local_configs[rank]):
            members: list[Member] = []
            for piece in pieces:
                if piece.variable == number:
                    parts.setdefault(piece.table, []).append(Part(first + number, len(members)))
                    members.append(Member(piece.table, piece.first_row, piece.rows, piece.first_column, piece.columns))
            shape = config["input_dim"], config["output_dim"]
            variables.append(PlannedVariable(rank, *shape, config, tuple(members)))
    for place, table in enumerate(strategy.table_groups[2]):
        shape = strategy.global_configs[table]["input_dim"], strategy.global_configs[table]["output_dim"]
        config = {**strategy.row_sliced_configs[0][place], "input_dim": shape[0]}
        parts[table] = [Part(len(variables), 0)]
        variables.append(PlannedVariable(DISTRIBUTED, *shape, config, (Member(table, 0, shape[0], 0, shape[1]),)))
    lookups: list[tuple[Part, ...]] = [()] * len(strategy.rev_group_ids)
    for group in (1, 2):
        for number, place in zip(strategy.input_groups[group], strategy.map_groups[group], strict=True):
            lookups[number] = tuple(parts[strategy.table_groups[group][place]])
    own = tuple(
        tuple(
            next(part for part in lookups[strategy.input_groups[1][number]] if variables[part.variable].owner == rank)
            for number in numbers
        )
        for rank, numbers in enumerate(strategy.input_ids_list)
    )
    tables_of = [0] * len(lookups)
    for group in range(3):
        for number, place in zip(strategy.input_groups[group], strategy.map_groups[group], strict=True):
            tables_of[number] = strategy.table_groups[group][place]
    widths = tuple(config["output_dim"] for config in strategy.global_configs)
    return Layout(tuple(variables), tuple(lookups), own, tuple(tables_of), widths)
