# SPDX-License-Identifier: Apache-2.0
"""One call of lookup_sparse with its tables made distinct, in the form that the ops take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch.ids import Bags
from sparse_operation_kit.torch.variable import Variable


@dataclasses.dataclass(slots=True)
class Lookups:
    """The lookups of a call; the field order is that of the schemas in csrc/library.cc."""

    keys: list[Tensor]
    key_tables: list[int]
    combiners: list[int]
    row_splits: list[Tensor]
    bagged: list[int]
    weights: list[Tensor]
    weighted: list[int]

    def arguments(self) -> tuple[Any, ...]:
        """As an op takes them."""
        return (
            self.keys,
            self.key_tables,
            self.combiners,
            self.row_splits,
            self.bagged,
            self.weights,
            self.weighted,
        )

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order that `with_tensors` reads."""
        return [*self.keys, *self.row_splits, *self.weights]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Lookups:
        """These lookups with other tensors."""
        first = len(self.key_tables)
        second = first + len(self.bagged)
        third = second + len(self.weighted)
        return Lookups(
            list(tensors[:first]),
            self.key_tables,
            self.combiners,
            list(tensors[first:second]),
            self.bagged,
            list(tensors[second:third]),
            self.weighted,
        )

    def without_tensors(self) -> Lookups:
        """These lookups without any tensor, to be kept while autograd keeps the tensors."""
        return Lookups([], self.key_tables, self.combiners, [], self.bagged, [], self.weighted)

    @property
    def num_tensors(self) -> int:
        """How many tensors `with_tensors` reads."""
        return len(self.key_tables) + len(self.bagged) + len(self.weighted)


@dataclasses.dataclass(slots=True)
class Call:
    """The tables of a call, each once, and its lookups, which name them by position."""

    tables: list[Variable]
    lookups: Lookups

    def names(self) -> list[str]:
        """Of the tables."""
        return [table._sok_name for table in self.tables]

    def owners(self) -> list[int]:
        """The rank that holds each table, -1 for distributed ones."""
        return [table._placement.owner for table in self.tables]

    def num_rows(self) -> list[int]:
        """Rows of each table on all ranks together."""
        return [table._placement.num_rows for table in self.tables]

    def dimensions(self) -> list[int]:
        """Columns of each table."""
        return [table._placement.dimension for table in self.tables]


def distinct(params: Sequence[Any]) -> tuple[list[Variable], list[int]]:
    """(the tables among `params`, each once; the position of each parameter's table among them).

    Raises TypeError for what is no table.
    """
    tables: list[Variable] = []
    positions: list[int] = []
    # Dynamo cannot trace id(); what is no table is named below.
    if not torch.compiler.is_compiling() and set(map(type, params)) == {Variable}:
        places: dict[int, int] = {}
        for param in params:
            position = places.setdefault(id(param), len(tables))
            if position == len(tables):
                tables.append(param)
            positions.append(position)
        return tables, positions
    for i, param in enumerate(params):
        if not isinstance(param, Variable):
            raise TypeError(f"params[{i}] must be a sok.Variable, got {type(param).__name__}")
        position = len(tables)
        for j, table in enumerate(tables):
            if param is table:
                position = j
                break
        else:
            tables.append(param)
        positions.append(position)
    return tables, positions


def make(
    tables: list[Variable], positions: list[int], batches: Sequence[Bags], combiners: Sequence[int], num_ranks: int
) -> Call:
    """Puts a call together. Raises ValueError for a table made for another number of ranks."""
    _check_ranks(tables, num_ranks)
    lookups = Lookups([], positions, list(combiners), [], [], [], [])
    for i, batch in enumerate(batches):
        lookups.keys.append(batch.keys)
        if batch.row_splits is not None:
            lookups.row_splits.append(batch.row_splits)
            lookups.bagged.append(i)
        if batch.weights is not None:
            lookups.weights.append(batch.weights)
            lookups.weighted.append(i)
    return Call(tables, lookups)


def of_pairs(
    tables: list[Variable],
    positions: list[int],
    keys: list[Tensor],
    row_splits: list[Tensor],
    combiners: list[int],
    num_ranks: int,
) -> Call:
    """As `make`, where every lookup has row splits and none has weights."""
    _check_ranks(tables, num_ranks)
    return Call(tables, Lookups(keys, positions, combiners, row_splits, list(range(len(keys))), [], []))


def _check_ranks(tables: list[Variable], num_ranks: int) -> None:
    for table in tables:
        if table._placement.num_ranks != num_ranks:
            raise ValueError(
                f"table '{table._sok_name}' was made for {table._placement.num_ranks} ranks and there are {num_ranks}"
            )
