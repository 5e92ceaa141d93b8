# SPDX-License-Identifier: Apache-2.0
"""What Keras layers that hold tables have in common: how Keras takes their inputs, and their tables in weight files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparse_operation_kit.tensorflow import dynamic_saving, saving
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
from sparse_operation_kit.tensorflow.table_variable import TableVariable

_SUFFIXES = {
    saving.VALUE: "",
    saving.LAYOUT: "_layout",
    dynamic_saving.KEYS: "_keys",
    dynamic_saving.SCORES: "_scores",
    dynamic_saving.USE_TIMES: "_use_times",
    dynamic_saving.CANDIDATES: "_candidates",
}
"""In a weight file, what follows a table's number."""


def prepare(layer: Any) -> None:
    """Lets a layer of either Keras take sparse and ragged arguments as they are."""
    layer.supports_jit = False  # Keras 3 would compile with XLA where there is a GPU; lookups are not for XLA
    # Keras 3 would turn sparse and ragged arguments into tensors of its own.
    layer._convert_input_args = False
    layer._allow_non_tensor_positional_args = True


def config_of(table: TableVariable) -> Any:
    """What a layer makes a table like it of, in plain data."""
    return table.config() if isinstance(table, DynamicVariable) else [table.placement.num_rows, table.shape[1]]


def save(store: Any, tables: Mapping[str, TableVariable]) -> None:
    """Writes this rank's rows of tables to the store of a layer's `save_own_variables`."""
    for number, table in enumerate(tables.values()):
        if isinstance(table, DynamicVariable):
            for name, value in dynamic_saving.content(table, table).items():
                store[f"{number}{_SUFFIXES[name]}"] = value.numpy()
        else:
            store[f"{number}"] = table.numpy()
            store[f"{number}_layout"] = saving.layout(table.placement)


def load(store: Any, tables: Mapping[str, TableVariable]) -> None:
    """Takes this rank's rows of tables from the store of a layer's `load_own_variables`; all tables or none.

    Raises ValueError for a store that was not saved from such tables.
    """
    taken: list[Callable[[], Any]] = []
    for number, table in enumerate(tables.values()):
        dynamic = isinstance(table, DynamicVariable)
        found = {n: np.asarray(store[f"{number}{s}"]) for n, s in _SUFFIXES.items() if f"{number}{s}" in store}
        for name in (saving.VALUE, saving.LAYOUT, *([dynamic_saving.KEYS] if dynamic else [])):
            if name not in found:
                raise ValueError(
                    f"the file has no {number}{_SUFFIXES[name]} of the tables {list(tables)}: not saved from them"
                )
        if dynamic:
            taken.append(dynamic_saving.prepare(table, table, found))
            continue
        own = saving.rows_for(table, found[saving.VALUE], found[saving.LAYOUT].tolist())
        if own is not None:
            taken.append(functools.partial(table.assign, own))
    for take in taken:
        take()
