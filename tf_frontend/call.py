# SPDX-License-Identifier: Apache-2.0
"""One call of lookup_sparse with its tables made distinct, in the form that the ops take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.placement import ANY_KEY, Placement
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

    def attributes(self) -> dict[str, Any]:
        """The attributes of an op that takes these tables."""
        return {
            "table_names": self.names,
            "num_rows": self.num_rows,
            "dimensions": self.dimensions,
            "owners": self.owners,
            "num_ranks": self.num_ranks,
            "rank": self.rank,
        }

    def counted_attributes(self) -> dict[str, Any]:
        """The same for an op that has no variables from which TensorFlow could count the tables."""
        return {"num_tables": len(self.names), **self.attributes()}

    @property
    def dynamic(self) -> list[int]:
        """The positions of the tables that are dynamic: they alone insert keys, and what stands for keys are slots."""
        return [i for i, rows in enumerate(self.num_rows) if rows == ANY_KEY]

    def local_shape(self, position: int) -> tuple[int | None, int]:
        """The shape of a table's rows on this rank, as far as it is known before it runs."""
        if self.num_rows[position] == ANY_KEY:
            return None, self.dimensions[position]
        table = self.num_rows[position], self.dimensions[position], self.owners[position]
        return Placement(*table, self.num_ranks, self.rank).local_shape

    def only(self, *positions: int) -> Tables:
        """Some of the tables alone."""
        names = tuple(self.names[i] for i in positions)
        num_rows, dimensions, owners = (
            tuple(column[i] for i in positions) for column in (self.num_rows, self.dimensions, self.owners)
        )
        return Tables(names, num_rows, dimensions, owners, self.num_ranks, self.rank)

    @staticmethod
    def of(variables: Sequence[TableVariable]) -> Tables:
        """The tables of these variables."""
        names = tuple(variable.table_name for variable in variables)
        places = [variable.placement for variable in variables]
        num_rows, dimensions, owners = zip(
            *((place.num_rows, place.dimension, place.owner) for place in places), strict=True
        )
        return Tables(names, num_rows, dimensions, owners, places[0].num_ranks, places[0].rank)

    @staticmethod
    def of_op(op: Any) -> Tables:
        """The tables of an op that a gradient function is called with."""
        names = tuple(map(tf.compat.as_str, op.get_attr("table_names")))
        num_rows, dimensions, owners = (tuple(op.get_attr(name)) for name in ("num_rows", "dimensions", "owners"))
        return Tables(names, num_rows, dimensions, owners, op.get_attr("num_ranks"), op.get_attr("rank"))


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """The lookups of a call, which name their tables by position; weights of those alone that have some."""

    keys: list[tf.Tensor]
    row_splits: list[tf.Tensor]
    weights: list[tf.Tensor]
    tables: list[int]
    combiners: list[int]
    weighted: list[bool]

    def arguments(self) -> dict[str, Any]:
        """The inputs and attributes of an op that takes lookups."""
        return {
            "keys": self.keys,
            "row_splits": self.row_splits,
            "weights": self.weights,
            "lookup_tables": self.tables,
            "combiners": self.combiners,
            "weighted": self.weighted,
        }

    @property
    def num_inputs(self) -> int:
        """How many inputs of the op they are."""
        return 2 * len(self.keys) + len(self.weights)

    @staticmethod
    def of(batches: Sequence[Batch], tables: list[int], combiners: Sequence[int]) -> Lookups:
        """The lookups of these batches."""
        weights = [batch.weights for batch in batches]
        given = [weight for weight in weights if weight is not None]
        keys, row_splits = [batch.keys for batch in batches], [batch.row_splits for batch in batches]
        return Lookups(keys, row_splits, given, tables, list(combiners), [weight is not None for weight in weights])

    @staticmethod
    def of_op(op: Any, first: int) -> Lookups:
        """The lookups of an op that a gradient function is called with, whose inputs begin at `first`."""
        tables, combiners, weighted = (list(op.get_attr(name)) for name in ("lookup_tables", "combiners", "weighted"))
        inputs, count = list(op.inputs)[first:], len(tables)
        weights = inputs[2 * count : 2 * count + sum(weighted)]
        return Lookups(inputs[:count], inputs[count : 2 * count], weights, tables, combiners, weighted)


def distinct(tables: Sequence[TableVariable]) -> tuple[list[TableVariable], list[int]]:
    """The tables without repetitions, and the position of each given one among them."""
    places: dict[int, int] = {}
    positions = [places.setdefault(id(table), len(places)) for table in tables]
    return list(dict(zip(map(id, tables), tables, strict=True)).values()), positions
