# SPDX-License-Identifier: Apache-2.0
"""One call of lookup_sparse with its tables made distinct, in the form that the ops take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.placement import Member, Placement
from sparse_operation_kit.tensorflow.ids import Batch
from sparse_operation_kit.tensorflow.table_variable import TableVariable


@dataclasses.dataclass(frozen=True)
class Tables:
    """Distinct tables, as the ops' attributes tell of them, and the rank that looks at them."""

    names: tuple[str, ...]
    num_rows: tuple[int, ...]
    dimensions: tuple[int, ...]
    owners: tuple[int, ...]
    num_ranks: int
    rank: int
    indexed: tuple[int, ...] = ()
    """The positions of those that have an index: they alone insert keys, and what stands for keys are slots."""

    def attributes(self) -> dict[str, Any]:
        """The attributes of an op that takes these tables."""
        indexed = {"indexed": self.indexed} if self.indexed else {}
        return {
            "table_names": self.names,
            "num_rows": self.num_rows,
            "dimensions": self.dimensions,
            "owners": self.owners,
            "num_ranks": self.num_ranks,
            "rank": self.rank,
            **indexed,
        }

    def counted_attributes(self) -> dict[str, Any]:
        """The same for an op that has no variables from which TensorFlow could count the tables."""
        return {"num_tables": len(self.names), **self.attributes()}

    def local_shape(self, position: int) -> tuple[int | None, int]:
        """The shape of a table's rows on this rank, as far as it is known before it runs."""
        if position in self.indexed:
            return None, self.dimensions[position]
        table = self.num_rows[position], self.dimensions[position], self.owners[position]
        return Placement(*table, self.num_ranks, self.rank).local_shape

    def only(self, *positions: int) -> Tables:
        """Some of the tables alone."""
        names = tuple(self.names[i] for i in positions)
        num_rows, dimensions, owners = (
            tuple(column[i] for i in positions) for column in (self.num_rows, self.dimensions, self.owners)
        )
        indexed = tuple(i for i, position in enumerate(positions) if position in self.indexed)
        return Tables(names, num_rows, dimensions, owners, self.num_ranks, self.rank, indexed)

    @staticmethod
    def of(variables: Sequence[TableVariable]) -> Tables:
        """The tables of these variables."""
        names = tuple(variable.table_name for variable in variables)
        places = [variable.placement for variable in variables]
        num_rows, dimensions, owners = zip(
            *((place.num_rows, place.dimension, place.owner) for place in places), strict=True
        )
        indexed = tuple(i for i, variable in enumerate(variables) if variable.has_index)
        return Tables(names, num_rows, dimensions, owners, places[0].num_ranks, places[0].rank, indexed)

    @staticmethod
    def of_op(op: Any) -> Tables:
        """The tables of an op that a gradient function is called with."""
        names = tuple(map(tf.compat.as_str, op.get_attr("table_names")))
        num_rows, dimensions, owners = (tuple(op.get_attr(name)) for name in ("num_rows", "dimensions", "owners"))
        ranks = op.get_attr("num_ranks"), op.get_attr("rank")
        return Tables(names, num_rows, dimensions, owners, *ranks, tuple(op.get_attr("indexed")))


@dataclasses.dataclass(frozen=True)
class Members:
    """The members of the stacks of a call. counts: how many each lookup has, 0 where its table is no stack, or () where
    none is; of all these the name, the first key in its stack and the number of rows.
    """

    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    keys: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def of_lookup(self, lookup: int) -> int:
        """How many vectors side by side each row of the lookup's output is; 0: it is one."""
        return self.counts[lookup] if self.counts else 0

    def attributes(self) -> dict[str, Any]:
        """The attributes of an op that takes lookups."""
        if not self.counts:
            return {}
        return {
            "members": self.counts,
            "member_names": self.names,
            "member_keys": self.keys,
            "member_rows": self.rows,
        }

    @staticmethod
    def of(lookups: Sequence[Sequence[Member]]) -> Members:
        """Those of each lookup."""
        every = [member for members in lookups for member in members]
        if not every:
            return Members()
        names, keys = tuple(each.name for each in every), tuple(each.first_key for each in every)
        return Members(tuple(map(len, lookups)), names, keys, tuple(each.placement.num_rows for each in every))

    @staticmethod
    def of_op(op: Any) -> Members:
        """Those of an op that a gradient function is called with."""
        counts, keys, rows = (tuple(op.get_attr(name)) for name in ("members", "member_keys", "member_rows"))
        return Members(counts, tuple(map(tf.compat.as_str, op.get_attr("member_names"))), keys, rows)


NO_MEMBERS = Members()


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """The lookups of a call, which name their tables by position; weights of those alone that have some."""

    keys: list[tf.Tensor]
    row_splits: list[tf.Tensor]
    weights: list[tf.Tensor]
    tables: list[int]
    combiners: list[int]
    weighted: list[bool]
    members: Members = NO_MEMBERS

    def arguments(self) -> dict[str, Any]:
        """The inputs and attributes of an op that takes lookups."""
        return {
            "keys": self.keys,
            "row_splits": self.row_splits,
            "weights": self.weights,
            "lookup_tables": self.tables,
            "combiners": self.combiners,
            "weighted": self.weighted,
            **self.members.attributes(),
        }

    def of_stacks(self) -> tuple[Lookups, list[int]]:
        """(those in stacks, without weights; which they are)."""
        chosen = [i for i, count in enumerate(self.members.counts) if count]
        members = dataclasses.replace(self.members, counts=tuple(self.members.counts[i] for i in chosen))
        keys, splits, tables, combiners = (
            [column[i] for i in chosen] for column in (self.keys, self.row_splits, self.tables, self.combiners)
        )
        return Lookups(keys, splits, [], tables, combiners, [False] * len(chosen), members), chosen

    @property
    def num_inputs(self) -> int:
        """How many inputs of the op they are."""
        return 2 * len(self.keys) + len(self.weights)

    @staticmethod
    def of(batches: Sequence[Batch], tables: list[int], combiners: Sequence[int], members: Members) -> Lookups:
        """The lookups of these batches."""
        weights = [batch.weights for batch in batches]
        given = [weight for weight in weights if weight is not None]
        keys, row_splits = [batch.keys for batch in batches], [batch.row_splits for batch in batches]
        weighted = [weight is not None for weight in weights]
        return Lookups(keys, row_splits, given, tables, list(combiners), weighted, members)

    @staticmethod
    def of_op(op: Any, first: int) -> Lookups:
        """The lookups of an op that a gradient function is called with, whose inputs begin at `first`."""
        tables, combiners, weighted = (list(op.get_attr(name)) for name in ("lookup_tables", "combiners", "weighted"))
        inputs, count = list(op.inputs)[first:], len(tables)
        weights = inputs[2 * count : 2 * count + sum(weighted)]
        members = Members.of_op(op)
        return Lookups(inputs[:count], inputs[count : 2 * count], weights, tables, combiners, weighted, members)


def distinct(tables: Sequence[TableVariable]) -> tuple[list[TableVariable], list[int]]:
    """The tables without repetitions, and the position of each given one among them."""
    places: dict[int, int] = {}
    positions = [places.setdefault(id(table), len(places)) for table in tables]
    return list(dict(zip(map(id, tables), tables, strict=True)).values()), positions
