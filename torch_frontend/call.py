# SPDX-License-Identifier: Apache-2.0
"""One call of lookup_sparse with its tables made distinct, in the form that the ops take."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
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

    def select(self, wanted: Sequence[int]) -> Lookups:
        """Some of these lookups, in the order of `wanted`."""
        places = {i: place for place, i in enumerate(wanted)}
        splits = [(tensor, i) for tensor, i in zip(self.row_splits, self.bagged, strict=True) if i in places]
        weights = [(tensor, i) for tensor, i in zip(self.weights, self.weighted, strict=True) if i in places]
        return Lookups(
            [self.keys[i] for i in wanted],
            [self.key_tables[i] for i in wanted],
            [self.combiners[i] for i in wanted],
            [tensor for tensor, _ in splits],
            [places[i] for _, i in splits],
            [tensor for tensor, _ in weights],
            [places[i] for _, i in weights],
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
class Tables:
    """Distinct tables, as the ops are told about them. It does not keep the tables alive."""

    ids: tuple[int, ...]
    """id() of each table."""
    positions: list[int]
    """Of the table of each parameter of the call."""
    names: list[str]
    owners: list[int]
    num_rows: list[int]
    dimensions: list[int]
    num_ranks: list[int]
    handle: Any
    """torch.classes.sok.TableList (csrc/table_list.h); None in a graph."""
    references: list[Any]
    """Weak ones, for torch.utils.swap_tensors, which refuses tensors that have such: `handle` knows what it swaps."""


@dataclasses.dataclass(slots=True)
class Call:
    """The tables of a call, each once, and its lookups, which name them by position."""

    tables: list[Variable]
    described: Tables
    lookups: Lookups

    def names(self) -> list[str]:
        """Of the tables."""
        return self.described.names

    def owners(self) -> list[int]:
        """The rank that holds each table, -1 for distributed ones."""
        return self.described.owners

    def num_rows(self) -> list[int]:
        """Rows of each table on all ranks together."""
        return self.described.num_rows

    def dimensions(self) -> list[int]:
        """Columns of each table."""
        return self.described.dimensions


_KEPT = 256
_described: dict[tuple[int, ...], Tables] = {}


def distinct(params: Sequence[Any]) -> tuple[list[Variable], Tables, torch.device | None]:
    """(the tables among `params`, each once; what is known of them, which is kept for the next call with the same
    params; where they are). The device is None where they are on several, and in a graph, which asks no table for it.

    Raises TypeError for what is no table.
    """
    if torch.compiler.is_compiling():
        tables, positions = _distinct_in_a_graph(params)
        return tables, _describe(tables, positions), None
    key = tuple(map(id, params))
    described = _described.get(key)
    device = None if described is None else described.handle.device()
    if described is None or (device is None and not described.handle.present()):  # an id() may be another's now
        described = _remember(key, params)
        device = described.handle.device()
    if len(described.ids) == len(key):
        return list(params), described, device
    return list(dict(zip(key, params, strict=True)).values()), described, device


def tables_of(params: Iterable[Any]) -> list[Variable]:
    """The tables among parameters."""
    return [param for param in params if type(param) is Variable or isinstance(param, Variable)]


def _remember(key: tuple[int, ...], params: Sequence[Any]) -> Tables:
    _check_types(params)
    tables = dict(zip(key, params, strict=True))
    places = {number: position for position, number in enumerate(tables)}
    described = _describe(list(tables.values()), [places[number] for number in key])
    if len(_described) >= _KEPT:
        _described.clear()
    _described[key] = described
    return described


def _distinct_in_a_graph(params: Sequence[Any]) -> tuple[list[Variable], list[int]]:
    """Without id(), which Dynamo cannot trace."""
    _check_types(params)
    tables: list[Variable] = []
    positions: list[int] = []
    for param in params:
        position = len(tables)
        for j, table in enumerate(tables):
            if param is table:
                position = j
                break
        else:
            tables.append(param)
        positions.append(position)
    return tables, positions


def _check_types(params: Sequence[Any]) -> None:
    for i, param in enumerate(params):
        if not isinstance(param, Variable):
            raise TypeError(f"params[{i}] must be a sok.Variable, got {type(param).__name__}")


def _describe(tables: list[Variable], positions: list[int]) -> Tables:
    places = [table._placement for table in tables]
    names = [table._sok_name for table in tables]
    owners, num_rows = [place.owner for place in places], [place.num_rows for place in places]
    dimensions, num_ranks = [place.dimension for place in places], [place.num_ranks for place in places]
    ids: tuple[int, ...] = ()
    handle = None
    references: list[Any] = []
    if not torch.compiler.is_compiling():
        ids = tuple(map(id, tables))
        references = list(map(weakref.ref, tables))
        handle = torch.classes.sok.TableList(tables, positions, names, owners, num_rows)
    return Tables(ids, positions, names, owners, num_rows, dimensions, num_ranks, handle, references)


def make(tables: list[Variable], described: Tables, batches: Sequence[Bags], combiners: list[int]) -> Call:
    """Puts a call together."""
    lookups = Lookups([], described.positions, combiners, [], [], [], [])
    for i, batch in enumerate(batches):
        lookups.keys.append(batch.keys)
        if batch.row_splits is not None:
            lookups.row_splits.append(batch.row_splits)
            lookups.bagged.append(i)
        if batch.weights is not None:
            lookups.weights.append(batch.weights)
            lookups.weighted.append(i)
    return Call(tables, described, lookups)


def of_pairs(
    tables: list[Variable], described: Tables, keys: list[Tensor], row_splits: list[Tensor], combiners: list[int]
) -> Call:
    """As `make`, where every lookup has row splits and none has weights."""
    every = list(range(len(keys)))
    return Call(tables, described, Lookups(keys, described.positions, combiners, row_splits, every, [], []))


def check_ranks(described: Tables, num_ranks: int) -> None:
    """Raises ValueError for a table made for another number of ranks."""
    if described.num_ranks.count(num_ranks) == len(described.num_ranks):
        return
    for name, made_for in zip(described.names, described.num_ranks, strict=True):
        if made_for != num_ranks:
            raise ValueError(f"table '{name}' was made for {made_for} ranks and there are {num_ranks}")
