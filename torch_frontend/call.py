# SPDX-License-Identifier: Apache-2.0
"""One call of lookup_sparse with its tables made distinct, in the form that the ops take."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.placement import Member
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.compiling import is_exporting
from sparse_operation_kit.torch.exchange import Exchange
from sparse_operation_kit.torch.ids import Bags
from sparse_operation_kit.torch.table_parameter import TableParameter
from sparse_operation_kit.torch.table_stack import Exported, Selection, members_of, table_of


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


@dataclasses.dataclass(slots=True)
class Tables:
    """Distinct tables, as the ops are told about them. It does not keep the tables alive."""

    ids: tuple[int, ...]
    """id() of each table."""
    positions: list[int]
    """Of the table of each parameter of the call."""
    firsts: list[int]
    """Of each table the first parameter."""
    names: list[str]
    owners: list[int]
    num_rows: list[int]
    num_ranks: list[int]
    handle: Any
    """torch.classes.sok.TableList (csrc/table_list.h); None in a graph."""
    references: list[Any]
    """Weak ones, for torch.utils.swap_tensors, which refuses tensors that have such: `handle` knows what it swaps."""

    selections: list[Any] = dataclasses.field(default_factory=list)
    """Weak references to the `Selection`s among the parameters."""
    members: Sequence[Sequence[Member]] = ()
    """In a graph: of each parameter those that it names, of a stack."""


@dataclasses.dataclass(slots=True)
class Call:
    """The tables of a call, each once, and its lookups, which name them by position."""

    tables: list[Any]
    described: Tables
    lookups: Lookups
    concat: bool = False
    """Whether the outputs are one tensor, side by side."""
    training: int = 1
    """What the call may do to dynamic tables whose gradients are recorded (csrc/located_tables.h)."""


_KEPT = 256
_described: dict[tuple[Any, ...], Tables] = {}


def distinct(params: Sequence[Any]) -> tuple[list[TableParameter], Tables, torch.device | None]:
    """(the tables among `params`, each once; what is known of them, which is kept for the next call with the same
    params; where they are). The device is None where they are on several, and in a graph, which asks no table for it.

    Raises TypeError for what is no table.
    """
    if torch.compiler.is_compiling():
        tables, positions = _distinct_in_a_graph([table_of(param) for param in params])
        in_graph = _describe(tables, positions)
        in_graph.members = [members_of(param) for param in params]
        return tables, in_graph, None
    key = tuple(map(id, params))
    described = _described.get(key)
    device = None if described is None else described.handle.device()
    if described is None or not (  # an id() may be another's now
        (device is not None or described.handle.present()) and all(ref() is not None for ref in described.selections)
    ):
        described = _remember(key, params)
        device = described.handle.device()
    return [table_of(params[first]) for first in described.firsts], described, device


def _remember(key: tuple[int, ...], params: Sequence[Any]) -> Tables:
    of_params = list(map(table_of, params))
    _check_types(of_params)
    tables = {id(table): table for table in of_params}
    places = {number: position for position, number in enumerate(tables)}
    positions = [places[id(table)] for table in of_params]
    described = _describe(list(tables.values()), positions, list(map(members_of, params)))
    described.selections.extend(weakref.ref(param) for param in params if isinstance(param, Selection))
    return _keep(key, described)


def described_again(
    tables: Sequence[Any], positions: Sequence[int], counts: Sequence[int], names: Sequence[str]
) -> Tables:
    """What is known of distinct tables, whose lookups a graph has. counts: of each lookup, how many members of a stack
    it names, or none where none does; names: of these, one after another.
    """
    key = (tuple(map(id, tables)), tuple(positions), tuple(counts), tuple(names))
    described = _described.get(key)
    if described is None or not described.handle.present():
        rest = iter(names)
        members = [
            [tables[position]._members[name] for name in itertools.islice(rest, count)]
            for position, count in zip(positions, counts or [0] * len(positions), strict=True)
        ]
        described = _keep(key, _describe(list(tables), list(positions), members))
    return described


def _keep(key: tuple[Any, ...], described: Tables) -> Tables:
    if len(_described) >= _KEPT:
        _described.clear()
    _described[key] = described
    return described


def _distinct_in_a_graph(params: Sequence[Any]) -> tuple[list[TableParameter], list[int]]:
    """Without id(), which Dynamo cannot trace."""
    _check_types(params)
    tables: list[TableParameter] = []
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
        if isinstance(param, TableParameter):
            continue
        if is_exporting():
            if isinstance(param, Exported):
                continue
            raise TypeError(
                f"params[{i}] is a plain tensor to torch.export: tables are exported in a sok.EmbeddingBagCollection"
            )
        tensors = "; a tensor made of a table is none: copy.deepcopy makes one" if isinstance(param, Tensor) else ""
        raise TypeError(
            f"params[{i}] must be a sok.Variable or sok.DynamicVariable, got {type(param).__name__}{tensors}"
        )


def _describe(tables: list[TableParameter], positions: list[int], members: Sequence[Sequence[Member]] = ()) -> Tables:
    places = [table._placement for table in tables]
    names = [table._sok_name for table in tables]
    owners, num_rows = [place.owner for place in places], [place.num_rows for place in places]
    num_ranks = [place.num_ranks for place in places]
    ids: tuple[int, ...] = ()
    handle = None
    references: list[Any] = []
    if not torch.compiler.is_compiling():
        ids = tuple(map(id, tables))
        references = list(map(weakref.ref, tables))
        gradients = [table._gradient.number() for table in tables]
        handle = torch.classes.sok.TableList(tables, gradients, positions, names, owners, num_rows, *_lists_of(members))
    firsts = [positions.index(position) for position in range(len(tables))]
    return Tables(ids, positions, firsts, names, owners, num_rows, num_ranks, handle, references)


def _lists_of(members: Sequence[Sequence[Member]]) -> tuple[list[int], list[str], list[int], list[int]]:
    """The members of the stacks of a call as csrc/table_list.h takes them; members: of each lookup."""
    every = [member for of_lookup in members for member in of_lookup]
    counts = list(map(len, members)) if every else []
    rows = [member.placement.num_rows for member in every]
    return counts, [member.name for member in every], [member.first_key for member in every], rows


def make(
    tables: list[TableParameter],
    described: Tables,
    batches: Sequence[Bags],
    combiners: list[int],
    concat: bool = False,
    training: int = 1,
) -> Call:
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
    return Call(tables, described, lookups, concat, training)


def run(call: Call, exchange: Exchange | None, gradient_scale: float = 1.0) -> list[Tensor]:
    """[bags, dimension] of each lookup, or all side by side in one: one function of autograd, in C++
    (csrc/lookup_function.h). With an exchange it tells the other ranks when it fails; gradient_scale: what gradients of
    tables that come by it are multiplied with.

    Raises:
      IndexError: a key is outside its table.
      ValueError: row splits that are none, outputs side by side that do not have as many rows.
      PeerError: another rank has failed.
    """
    described, lookups = call.described, call.lookups
    outputs: list[Tensor]
    if described.handle is None:
        recorded = _is_recorded(call)
        if recorded or exchange is not None or any(getattr(table, "_index", None) is not None for table in call.tables):
            return _run_as_outside(call, gradient_scale, recorded)
        counts = _locate_members(described, lookups)
        tables = [table.rows if isinstance(table, Exported) else table for table in call.tables]
        outputs = ops.gather_combine(tables, described.names, *lookups.arguments(), call.concat, counts)
    else:
        bags = (lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted)
        number = None if exchange is None else exchange.number
        options = (call.concat, call.training, number, gradient_scale)
        outputs = described.handle.lookup(lookups.keys, lookups.combiners, *bags, *options)
    return outputs


def _is_recorded(call: Call) -> bool:
    """In a graph: whether autograd is to know of the call."""
    if is_exporting() or not torch.is_grad_enabled():
        return False
    return any(each.requires_grad for each in call.tables) or any(each.requires_grad for each in call.lookups.weights)


def _run_as_outside(call: Call, gradient_scale: float, recorded: bool) -> list[Tensor]:
    """In a graph, by the operator of graph_lookup.py."""
    lookups = call.lookups
    counts, names, _, _ = _lists_of(call.described.members)
    bags = (lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted)
    learned = [i for i, weight in enumerate(lookups.weights) if recorded and weight.requires_grad]
    options = (learned, call.concat, call.training, gradient_scale, recorded)
    tables = (call.tables, lookups.key_tables, counts, names)
    outputs: list[Tensor] = ops.lookup(*tables, lookups.keys, lookups.combiners, *bags, *options)
    return outputs[:-1]


def _locate_members(described: Tables, lookups: Lookups) -> list[int]:
    """In a graph: keys of stacks become slots -> how many members each lookup has; [] where none has."""
    if not any(described.members):
        return []
    for i, members in enumerate(described.members):
        if not members:
            continue
        splits = lookups.row_splits[lookups.bagged.index(i)] if i in lookups.bagged else None
        position = described.positions[i]
        stack = (described.names[position], described.num_rows[position])
        _, names, first_keys, rows = _lists_of([members])
        lookups.keys[i] = ops.locate_members(lookups.keys[i], splits, *stack, names, first_keys, rows)
    return list(map(len, described.members))


def check_ranks(described: Tables, num_ranks: int) -> None:
    """Raises ValueError for a table made for another number of ranks."""
    if described.num_ranks.count(num_ranks) == len(described.num_ranks):
        return
    for name, made_for in zip(described.names, described.num_ranks, strict=True):
        if made_for != num_ranks:
            raise ValueError(f"table '{name}' was made for {made_for} ranks and there are {num_ranks}")
