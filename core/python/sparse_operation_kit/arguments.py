# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that both frontends make alike, with the same messages. No framework is imported here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .placement import CONSTANT, UNIFORM, Initializer

# The numbers of sok_combiner (core/include/sok/lookup.h).
COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2}

GRADIENTS = ("sum", "mean")
SINGLE = "single"
"""The comm_tool of a process that is alone, whatever was started."""

EXCHANGES = ("auto", "nccl")  # and the name of the frontend's engine


@dataclasses.dataclass(frozen=True)
class InitArguments:
    """What `init` was called with, checked; two equal ones are the same call."""

    comm_tool: str
    gradient: str
    exchange: str
    seed: int


def check_init(
    comm_tool: str | None,
    gradient: str,
    exchange: str,
    seed: int,
    *,
    engines: Sequence[str],
) -> InitArguments:
    """Checks the arguments of `init`.

    Args:
      comm_tool, gradient, exchange, seed: as given to `init`.
      engines: what starts the processes of this frontend, comm_tools besides "single". The first is what None means;
        an exchange "engine" is that of the comm_tool.

    Raises:
      ValueError: comm_tool, gradient or exchange is unknown, or the seed is not in [0, 2**63); it lists what there is.
      TypeError: the seed is not an integer.
    """
    tool = engines[0] if comm_tool is None else str(comm_tool).strip().lower()
    if tool not in (*engines, SINGLE):
        raise ValueError(f"unknown comm_tool {comm_tool!r}: this frontend has {_listed((*engines, SINGLE))}")
    engine = engines[0] if tool == SINGLE else tool
    if gradient not in GRADIENTS:
        raise ValueError(f"unknown gradient {gradient!r}: it must be one of {_listed(GRADIENTS)}")
    if exchange == "engine":
        exchange = engine
    if exchange not in (*EXCHANGES, engine):
        raise ValueError(f"unknown exchange {exchange!r}: it must be one of {_listed((*EXCHANGES, engine))}")
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    number = seed.__index__()
    if not 0 <= number < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {number}")
    return InitArguments(tool, gradient, exchange, number)


def check_combiner(combiner: str | None, lookup: int | None = None) -> str:
    """The canonical name of a combiner; None is "mean".

    Raises TypeError when it is not a string and ValueError when there is no such combiner.
    """
    if combiner is None:
        return "mean"
    if type(combiner) is str and combiner in COMBINERS:
        return combiner
    where = "" if lookup is None else f" of lookup {lookup}"
    if not isinstance(combiner, str):
        raise TypeError(f"combiner{where} must be a string, got {combiner!r}")
    text = combiner.strip().lower()
    if text not in COMBINERS:
        raise ValueError(f"unknown combiner {combiner!r}{where}: it must be one of {_listed(COMBINERS)}")
    return text


@dataclasses.dataclass(frozen=True)
class LookupArguments:
    """The arguments of one `lookup_sparse` call as equally long lists."""

    params: list[Any]
    ids: list[Any]
    weights: list[Any]
    combiners: list[str]
    was_list: bool


def check_lookup(params: Any, ids: Any, weights: Any, combiners: Any) -> LookupArguments:
    """Makes lists of the arguments of `lookup_sparse`.

    Each is a list or tuple or a single value, which is a list of one; a combiner alone is that of all lookups, and None
    is no weights or "mean". `was_list` is that of the ids: they say how many tensors come out.

    Raises:
      ValueError: lengths differ (both are named), an empty list, an unknown combiner.
      TypeError: a combiner that is no string.
    """
    was_list = isinstance(ids, (list, tuple))
    if not was_list and not any(isinstance(value, (list, tuple)) for value in (params, weights, combiners)):
        return LookupArguments([params], [ids], [weights], [check_combiner(combiners)], False)

    params, ids = _as_list(params), _as_list(ids)
    count = len(params)
    if count == 0:
        raise ValueError("params is an empty list: a lookup needs a table")
    if len(ids) != count:
        raise ValueError(f"sp_ids has {len(ids)} entries, but params has {count}")
    if weights is None:
        weights = [None] * count
    elif len(weights := _as_list(weights)) != count:
        raise ValueError(f"sp_weights has {len(weights)} entries, but params has {count}")
    if combiners is None or isinstance(combiners, str):
        names = [check_combiner(combiners, 0)] * count
    elif not isinstance(combiners, (list, tuple)):
        raise TypeError(f"combiners must be a list of {count} strings, a string or None, got {_kind(combiners)}")
    elif len(combiners) != count:
        raise ValueError(f"combiners has {len(combiners)} entries, but params has {count}")
    elif set(map(type, combiners)) == {str} and all(name in COMBINERS for name in set(combiners)):
        names = list(combiners)
    else:
        names = [check_combiner(combiner, index) for index, combiner in enumerate(combiners)]
    return LookupArguments(params, ids, weights, names, was_list)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_table_shape(shape: Sequence[Any], name: str) -> tuple[int, int]:
    """[rows, dimension] of a table as two ints.

    Raises ValueError when there are not two numbers, one is below 1 or the table is larger than any memory, TypeError
    when one is not an integer.
    """
    try:
        sizes = [size.__index__() for size in shape]
    except (AttributeError, TypeError):
        raise TypeError(f"the shape of table '{name}' must be two integers [rows, dimension], got {shape!r}") from None
    if len(sizes) != 2:
        raise ValueError(f"table '{name}' must have two dimensions [rows, dimension], got the shape {sizes}")
    if sizes[0] < 1:
        raise ValueError(f"table '{name}' has no rows: its shape is {sizes}, rows must be at least 1")
    if sizes[1] < 1:
        raise ValueError(f"table '{name}' has rows of no elements: its shape is {sizes}, dimension must be at least 1")
    if 4 * sizes[0] * sizes[1] >= 1 << 63:  # frameworks compute bytes in int64, and not all of them look for overflow
        raise ValueError(f"table '{name}' of shape {sizes} has more than 2^63 bytes")
    return sizes[0], sizes[1]


TABLE_DTYPES = ("float32", "float16", "bfloat16")
INFINITE_FROM = {"float32": (2 - 2**-24) * 2.0**127, "bfloat16": (2 - 2**-8) * 2.0**127, "float16": 65520.0}
"""The least number that is infinite in a dtype of tables, rounded to nearest."""


def _dtype_name(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).rsplit(".", 1)[-1]


def check_table_dtype(dtype: Any, name: str) -> None:
    """Raises TypeError unless `dtype` (anything whose str ends in the dtype's name) is one of TABLE_DTYPES."""
    text = _dtype_name(dtype)
    if text not in TABLE_DTYPES:
        raise TypeError(f"table '{name}' must be {' or '.join(TABLE_DTYPES)}, got {text}")


def check_initial_values(initializer: Initializer, dtype: Any, name: str) -> None:
    """Raises ValueError for a finite number of an initializer that would be infinite in a table of `dtype`."""
    text = _dtype_name(dtype)
    for number in (initializer.a, initializer.b) if initializer.kind in (CONSTANT, UNIFORM) else ():
        if math.isfinite(number) and abs(number) >= INFINITE_FROM[text]:
            raise ValueError(f"table '{name}': {text} does not hold the initial value {number}")


def of_table(given: Any, name: str) -> Any:
    """What is said of one of several tables: `given` is one for all of them, or a mapping from some, or None."""
    return given.get(name) if isinstance(given, Mapping) else given


def check_stack(tables: Mapping[str, Sequence[Any]], stack: str) -> tuple[dict[str, int], int]:
    """(rows of each table, their dimension) of the tables of a stack, name -> (rows, dimension).

    Raises ValueError where there are none or their dimensions differ, and as check_table_shape; TypeError where a name
    is no string.
    """
    if not tables:
        raise ValueError(f"stack '{stack}' has no tables")
    rows: dict[str, int] = {}
    dimensions: dict[str, int] = {}
    for name, shape in tables.items():
        if not isinstance(name, str):
            raise TypeError(f"stack '{stack}': the name of a table must be a string, got {name!r}")
        rows[name], dimensions[name] = check_table_shape(shape, name)
    if len(set(dimensions.values())) > 1:
        raise ValueError(f"the tables of stack '{stack}' must have one dimension, got {dimensions}")
    return rows, next(iter(dimensions.values()))


def stacks_of(shapes: Mapping[str, Sequence[Any]], dtypes: Any) -> list[list[str]]:
    """The names of the tables that a collection puts into a stack each: those of one dimension and dtype, where there
    are several. shapes: (rows, dimension) of each table that it makes; dtypes: as `of_table` takes them.
    """
    alike: dict[tuple[Any, str], list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault((tuple(shape)[-1], str(of_table(dtypes, name))), []).append(name)
    return [names for names in alike.values() if len(names) > 1]


def stacked_features(
    feature_tables: Mapping[str, str], combiners: Mapping[str, str], stack_of: Mapping[str, Any]
) -> list[list[str]]:
    """The features of each lookup of a collection: those of the tables of one stack with one combiner together, in
    the order of `feature_tables`, others by themselves. stack_of: by table name, of those that are in one.
    """
    lookups: dict[Any, list[str]] = {}
    for feature, table in feature_tables.items():
        stack = stack_of.get(table)
        lookups.setdefault(feature if stack is None else (id(stack), combiners[feature]), []).append(feature)
    return list(lookups.values())


def check_features(
    tables: Mapping[str, Any], features: Mapping[str, str] | None, combiners: str | Mapping[str, str] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """(the table of each feature, the combiner of each feature) of a collection of tables, by name.

    features: None: every table is a feature of its name. combiners: one for all, or by feature; None: "mean".
    Raises ValueError for a feature of a table that is not there, or without combiner, or with an unknown one.
    """
    of_features = {name: name for name in tables} if features is None else dict(features)
    for feature, table in of_features.items():
        if table not in tables:
            raise ValueError(f"feature '{feature}' names table '{table}', which is not among {list(tables)}")
    if combiners is None or isinstance(combiners, str):
        return of_features, dict.fromkeys(of_features, check_combiner(combiners))
    missing = [feature for feature in of_features if feature not in combiners]
    if missing:
        raise ValueError(f"combiners has no entry for the features {missing}")
    return of_features, {feature: check_combiner(combiners[feature]) for feature in of_features}


def check_one_batch(lookups: Sequence[Sequence[str]], sizes: Sequence[Sequence[int] | None]) -> None:
    """Raises ValueError where features of a lookup have batches of different sizes, which have no place side by side.

    sizes: by lookup, how many bags each of its features has; None: as many as the others.
    """
    for features, differing in zip(lookups, sizes, strict=True):
        if differing is not None:
            raise ValueError(f"concat=True takes as many bags of each feature: {features} have {differing}")


def ids_of(given: Mapping[str, Any], features: Sequence[str]) -> list[Any]:
    """Those of some features, of ids by feature. KeyError, which names what there is, where they lack one."""
    try:
        return [given[feature] for feature in features]
    except KeyError:
        missing = next((feature for feature in features if feature not in given), features[0])
        raise KeyError(f"EmbeddingBagCollection: the ids have no feature '{missing}', only {list(given)}") from None


def _listed(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
