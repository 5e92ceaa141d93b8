# SPDX-License-Identifier: Apache-2.0
"""What a plan is made for: tables, what is looked up in them, the optimizer, and what the tables' owner wants."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import optimizers
from . import distinct
from .costs import Workload
from .strategy import Config, tables_of_inputs
from .topology import Topology, topology_of

CHOICES = ("replicated", "whole", "columns", "rows")
"""What a planner does with a table: each rank holds it, one rank does, or it is cut."""

BATCH_SIZE = 65536
"""Samples of all ranks together, where nobody says how many."""

PerInput = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What a plan may do with a table.

    choices: some of `CHOICES`. min_columns: of a table that is cut into columns. on_host: whether it must be in host
    memory (True), or in the device's (False); None: in the device's while there is room.
    """

    choices: tuple[str, ...] = CHOICES
    min_columns: int = 1
    on_host: bool | None = None

    def __post_init__(self) -> None:
        wrong = [choice for choice in self.choices if choice not in CHOICES]
        if wrong or not self.choices:
            raise ValueError(f"choices of a table are some of {', '.join(CHOICES)}, got {wrong or 'none'}")
        if self.min_columns < 1:
            raise ValueError(f"min_columns must be at least 1, got {self.min_columns}")


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `plan`, checked; `of` makes it.

    hotness, exponents: for each input. states, row_states: float32 that the optimizer keeps for an element, for a row.
    constraints: for each table.
    """

    world_size: int
    batch_size: int
    hotness: tuple[float, ...]
    exponents: tuple[float, ...]
    optimizer: str
    states: float
    row_states: float
    topology: Topology
    constraints: tuple[Constraint, ...]
    tables_of: tuple[int, ...]
    dp_input: bool

    @staticmethod
    def of(
        configs: Sequence[Config],
        world_size: int,
        *,
        batch_size: int = BATCH_SIZE,
        hotness: PerInput = 1.0,
        skew: PerInput = 0.0,
        samples: Sequence[Any] | None = None,
        optimizer: Any = None,
        topology: Topology | str | Mapping[str, Any] | None = None,
        constraints: Mapping[int | str, Any] | None = None,
        input_table_map: Sequence[int] | None = None,
        dp_input: bool = True,
    ) -> Request:
        """See `plan`."""
        counts: tuple[tuple[str, Any, str], ...] = (
            ("world_size", world_size, "index"),
            ("batch_size", batch_size, "float"),
        )
        for what, value, kind in counts:
            if not hasattr(value, f"__{kind}__"):
                raise TypeError(f"{what} must be {'an integer' if kind == 'index' else 'a number'}, got {value!r}")
            if not value >= 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        tables_of = tables_of_inputs(input_table_map, len(configs))
        exponents = _each("skew", skew, len(tables_of))
        if samples is not None:
            if len(samples) != len(tables_of):
                raise ValueError(f"samples has {len(samples)} entries, and there are {len(tables_of)} inputs")
            for number, sample in enumerate(samples):
                if sample is not None:
                    exponents[number] = distinct.exponent_of(sample, configs[tables_of[number]]["input_dim"])
        name, states, row_states = states_of(optimizer)
        return Request(
            operator.index(world_size),
            batch_size,
            tuple(_each("hotness", hotness, len(tables_of))),
            tuple(exponents),
            name,
            states,
            row_states,
            topology_of(topology),
            _constraints(constraints or {}, configs),
            tuple(tables_of),
            dp_input,
        )

    def changes(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `plan` that `options` do not replace."""
        own: dict[str, Any] = {
            "batch_size": self.batch_size,
            "hotness": self.hotness,
            "optimizer": self.optimizer,
            "topology": self.topology,
        }
        if not {"skew", "samples"} & set(options):
            own["skew"] = self.exponents
        return {name: value for name, value in own.items() if name not in options}

    def to_config(self) -> dict[str, Any]:
        """Plain data, of which `from_config` makes it again."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))  # with lists for tuples
        return plain

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Request:
        """What `to_config` gave."""
        constraints = tuple(Constraint(**{**each, "choices": tuple(each["choices"])}) for each in config["constraints"])
        several = {name: tuple(config[name]) for name in ("hotness", "exponents", "tables_of")}
        topology = Topology.from_config(config["topology"])
        return Request(**{**config, **several, "constraints": constraints, "topology": topology})

    def workload(self, configs: Sequence[Config]) -> Workload:
        """What a step asks of the tables."""
        number = len(configs)
        tables = np.array(self.tables_of, np.int64)
        samples = self.batch_size / self.world_size
        hotness = np.array(self.hotness)
        bags = np.bincount(tables, minlength=number) * samples
        keys = np.bincount(tables, hotness, number) * samples
        weighted = np.bincount(tables, hotness * np.array(self.exponents), number) * samples
        return Workload(
            np.array([config["input_dim"] for config in configs], np.int64),
            np.array([config["output_dim"] for config in configs], np.int64),
            np.array([itemsize_of(config) for config in configs], float),
            keys,
            bags,
            np.divide(weighted, keys, out=np.zeros(number), where=keys > 0),
            np.array([float(bool(config.get("trainable", True))) for config in configs]),
            self.states,
            self.row_states,
            self.world_size,
        )


def itemsize_of(config: Config) -> int:
    """Bytes of an element of a table."""
    dtype = config.get("dtype")
    return {"float16": 2, "bfloat16": 2, "float64": 8}.get(dtype if isinstance(dtype, str) else "", 4)


def name_of(config: Config, table: int) -> str:
    """What a table is called in reports."""
    return str(config.get("name") or f"table {table}")


def states_of(optimizer: Any) -> tuple[str, float, float]:
    """(name, float32 that it keeps for each element, for each row) of an optimizer, or of its class by name.

    None: SGD. A number: so many for each element. Raises ValueError for a class that is not known.
    """
    if optimizer is None:
        return "SGD", 0, 0
    if isinstance(optimizer, (int, float)):
        return f"{optimizer:g}", optimizer, 0
    if isinstance(optimizer, str) and optimizer.replace(".", "", 1).isdigit():
        return optimizer, float(optimizer), 0
    name = optimizer if isinstance(optimizer, str) else type(_wrapped(optimizer)).__name__
    plain = name.lower().replace("_", "").replace("-", "")
    if plain == "rowwiseadagrad":
        return "RowWiseAdagrad", 0, 1
    if plain in ("sgd", "momentum"):
        return ("momentum", 1, 0) if plain == "momentum" or _has_momentum(optimizer) else ("SGD", 0, 0)
    if plain == "rmsprop":
        return "RMSprop", 1 + _has_momentum(optimizer), 0
    known = {each.lower(): each for each in optimizers.CLASSES}
    if plain not in known:
        raise ValueError(
            f"unknown optimizer {name!r}: it must be one of {', '.join(optimizers.CLASSES)}, momentum, or how many "
            "float32 it keeps for an element"
        )
    return known[plain], len(optimizers.slot_names(known[plain])), 0


def _wrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _has_momentum(optimizer: Any) -> bool:
    wrapped = _wrapped(optimizer)
    settings = getattr(wrapped, "defaults", None) or {}
    return bool(getattr(wrapped, "momentum", None) or settings.get("momentum"))


def _each(what: str, given: PerInput, number: int) -> list[float]:
    try:
        values = [float(given)] * number if isinstance(given, (int, float)) else [float(each) for each in given]
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, or one for each input, got {given!r}") from None
    if len(values) != number:
        raise ValueError(f"{what} has {len(values)} entries, and there are {number} inputs")
    if any(not value >= 0 for value in values):
        raise ValueError(f"{what} must not be negative, got {min(values)}")
    if any(value == float("inf") for value in values):
        raise ValueError(f"{what} must be finite, got inf")
    return values


def _constraints(given: Mapping[int | str, Any], configs: Sequence[Config]) -> tuple[Constraint, ...]:
    result = [Constraint()] * len(configs)
    numbers = {name_of(config, table): table for table, config in enumerate(configs)}
    for key, value in given.items():
        table = numbers.get(key, -1) if isinstance(key, str) else key
        if not 0 <= table < len(configs):
            raise ValueError(f"constraints name table {key!r}, and there are {len(configs)} tables")
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - {field.name for field in dataclasses.fields(Constraint)})
            if unknown:
                raise ValueError(f"constraints of table {key!r}: unknown {', '.join(unknown)}")
            value = Constraint(**{**value, "choices": tuple(value.get("choices", CHOICES))})
        if not isinstance(value, Constraint):
            raise TypeError(f"constraints of table {key!r} must be a Constraint or a mapping, got {value!r}")
        result[table] = value
    return tuple(result)
