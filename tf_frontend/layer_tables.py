# SPDX-License-Identifier: Apache-2.0
"""What Keras layers that hold tables have in common: how Keras takes their inputs, and their tables in weight files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparse_operation_kit.tensorflow import dynamic_saving, keras_compat, saving
from sparse_operation_kit.tensorflow.table_variable import TableRows

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
    keras_compat.take_any_input(layer)


def save(store: Any, tables: Mapping[str, TableRows]) -> None:
    """Writes this rank's rows of tables to the store of a layer's `save_own_variables`."""
    for number, table in enumerate(tables.values()):
        write(store, f"{number}", table, table)


def load(store: Any, tables: Mapping[str, TableRows]) -> None:
    """Takes this rank's rows of tables from the store of a layer's `load_own_variables`; all tables or none.

    Raises ValueError for a store that was not saved from such tables.
    """
    taken = [prepare_taking(store, f"{number}", table, table) for number, table in enumerate(tables.values())]
    for take in taken:
        take()


def write(store: Any, name: str, table: TableRows, column: Any) -> None:
    """Writes a column of a table, its rows or an optimizer state, to a store of Keras under this name."""
    for part, value in table.content(column).items():
        store[f"{name}{_SUFFIXES[part]}"] = np.asarray(value)


def prepare_taking(store: Any, name: str, table: TableRows, column: Any) -> Callable[[], Any]:
    """What gives a column of a table what `write` wrote. Raises ValueError for what it cannot take."""
    found = {part: np.asarray(store[f"{name}{s}"]) for part, s in _SUFFIXES.items() if f"{name}{s}" in store}
    for part in table.saved_parts:
        if part not in found:
            raise ValueError(
                f"the file has no {name}{_SUFFIXES[part]} of table '{table.table_name}': it was not saved from it, or "
                "where tables lie otherwise on the ranks (sok.dump and sok.load go from one to the other)"
            )
    return table.prepare(column, found)
