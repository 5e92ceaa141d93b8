# SPDX-License-Identifier: Apache-2.0
"""A framework as what runs between steps sees it: its ranks, and how its tables and optimizers are described."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from .checkpoint.group import Group
from .checkpoint.variables import Described, TableShard, TrainedBy
from .held import HeldTable
from .hybrid.dumping import LayerTables, with_layers

Held = TypeVar("Held", bound=HeldTable)


class Framework(abc.ABC, Generic[Held]):
    """A frontend derives from `Frontend`, which derives from this, and says what is abstract here."""

    version: str
    """The framework's name and version, for a dump's manifest."""

    def check_between_steps(self, what: str) -> None:
        """Raises RuntimeError where `what` cannot run now."""

    @abc.abstractmethod
    def group(self) -> Group:
        """The ranks that init() found; RuntimeError before init()."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Waits for what was enqueued on devices and raises what it has found wrong."""

    def members(self, value: Any) -> Sequence[Any]:
        """The tables that `value` stands for: those of a stack, or itself alone."""
        return [value]

    @abc.abstractmethod
    def held(self, value: Any) -> Held | None:
        """The table that `value` is or wraps; None where it is none."""

    def layer(self, value: Any) -> LayerTables | None:
        """The tables of the DistributedEmbedding that `value` is, or is a table of; None where it is none."""
        marked = getattr(self.variable(value), "_sok_layer", None)
        layer = value if marked is None else marked()
        tables = getattr(layer, "layer_tables", None)
        return None if tables is None else tables()

    def variable(self, value: Any) -> Any:
        """What a layer has marked as its own: `value`, or the variable that it wraps."""
        return value

    def held_in_layer(self, variable: Any) -> Held:
        """What a layer has for variables and for replicated tables."""
        table = self.held(variable)
        assert table is not None
        return table

    @abc.abstractmethod
    def trained(self, optimizer: Any, tables: Sequence[Held]) -> tuple[Sequence[TableShard], TrainedBy]:
        """The tables with what `optimizer` keeps for each of them, and the optimizer."""

    # --- what the functions use ---------------------------------------------------------------------------------------

    def tables(self, vars: Any) -> list[HeldTable]:
        """Those that `vars` names, a table or several."""
        entries, tables = self._entries(vars)
        return [shard.held for shard in with_layers(entries, map(TableShard, tables), self.group)]

    def _entries(self, vars: Any) -> tuple[list[Held | LayerTables], list[Held]]:
        """(tables, and layers of which there are some or all; the tables, and what layers hold of theirs), in order."""
        entries: list[Held | LayerTables] = []
        tables: list[Held] = []
        for position, value in self._listed(vars):
            layer = self.layer(value)
            if layer is None:
                tables.append(self._table(position, value))
                entries.append(tables[-1])
            elif all(not isinstance(each, LayerTables) or each.layout is not layer.layout for each in entries):
                tables += [self.held_in_layer(each) for each in (*layer.variables.values(), *layer.replicated.values())]
                entries.append(layer)
        return entries, tables

    def _listed(self, vars: Any) -> list[tuple[int, Any]]:
        """(position, table), where a stack stands for its members."""
        single = hasattr(vars, "shape") or self.layer(vars) is not None or not isinstance(vars, Iterable)
        listed = enumerate([vars] if single else vars)
        return [(position, member) for position, each in listed for member in self.members(each)]

    def _table(self, position: int, value: Any) -> Held:
        table = self.held(value)
        if table is None:
            name = getattr(value, "name", None)
            raise TypeError(
                f"vars[{position}] must be a sok.Variable, got {type(value).__name__}"
                f"{f' named {name!r}' if name else ''}; sok.filter_variables tells tables from other variables, "
                "which the framework itself saves"
            )
        return table

    def describe(self, vars: Any, optimizer: Any) -> Described:
        """The tables in `vars`, with what an optimizer, or one for each, keeps for them, and it."""
        self.settle()  # a GPU may not have said yet that the last step was wrong
        entries, tables = self._entries(vars)
        if optimizer is None:
            shards: Sequence[TableShard] = [TableShard(table) for table in tables]
            trained_by = None
        elif isinstance(optimizer, (list, tuple)):
            shards, trained_by = self._trained_apart(optimizer, tables)
        else:
            shards, trained_by = self.trained(optimizer, tables)
        return with_layers(entries, shards, self.group), trained_by

    def _trained_apart(self, optimizers: Sequence[Any], tables: Sequence[Held]) -> Described:
        """The tables with what an optimizer of its own keeps for each."""
        if len(optimizers) != len(tables):
            raise ValueError(
                f"optimizer is a list of {len(optimizers)}, but there are {len(tables)} tables: one a table"
            )
        shards: list[TableShard] = []
        names: list[str] = []
        for optimizer, table in zip(optimizers, tables, strict=True):
            (shard,), trained_by = self.trained(optimizer, [table])
            if trained_by.iterations is not None:  # it counts for all its tables, which are others in each dump
                shard = replace(
                    shard, iterations=trained_by.iterations, restore=_both(shard.restore, trained_by.restore)
                )
            shards.append(shard)
            names.append(trained_by.name)
        if len(set(names)) > 1:
            raise ValueError(f"a dump holds the states of one class of optimizers, got {sorted(set(names))}")
        return shards, TrainedBy(names[0])


def _both(
    restore: Callable[[int | None, Mapping[str, float]], None], count: Callable[[int], None]
) -> Callable[[int | None, Mapping[str, float]], None]:
    """What takes over a table's counts, and those of its optimizer."""

    def both(iterations: int | None, scalars: Mapping[str, float]) -> None:
        restore(iterations, scalars)
        if iterations is not None:
            count(iterations)

    return both
