# SPDX-License-Identifier: Apache-2.0
"""What Keras layers that hold tables have in common: how Keras takes their inputs, and their tables in weight files and
configs.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.placement import Initializer, Placement
from sparse_operation_kit.tensorflow import dynamic_saving, initializers, keras_compat, saving
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
    found = {part: _read(store[f"{name}{s}"]) for part, s in _SUFFIXES.items() if f"{name}{s}" in store}
    for part in table.saved_parts:
        if part not in found:
            raise ValueError(
                f"the file has no {name}{_SUFFIXES[part]} of table '{table.table_name}': it was not saved from it, or "
                "where tables lie otherwise on the ranks (sok.dump and sok.load go from one to the other)"
            )
    return table.prepare(column, found)


def _read(stored: Any) -> Any:
    array = np.asarray(stored)
    # HDF5 does not know bfloat16: two bytes without a meaning, of which tf_keras, unlike Keras 3, makes no numbers.
    return array.view(tf.bfloat16.as_numpy_dtype) if array.dtype == np.dtype("V2") else array


def initializer_config(keras: Any, initializer: Any, layer: str, places: Iterable[Placement]) -> Any:
    """The initializer of these static tables as a config has it, which `initializer_of` reads: a name or a number, what
    the core makes of an object where that is one for all tables, else the object as this Keras has it in configs.

    Warns of an object that Keras could not make again, by the layer's name. Returns None then.
    """
    if initializer is None or isinstance(initializer, (str, int, float)):
        return initializer
    specs = {initializers.as_spec(initializer, place) for place in places}
    if not specs:
        return None  # nothing is drawn with it
    spec = specs.pop() if len(specs) == 1 else None
    if spec is not None:
        return dataclasses.asdict(spec)
    made = initializer() if isinstance(initializer, type) else initializer
    if hasattr(made, "get_config"):  # of a function Keras keeps what it does not read back, or the name alone
        try:
            config = keras.saving.serialize_keras_object(made)
            keras.saving.deserialize_keras_object(config)  # now, where a warning is still of use
            return config
        except (TypeError, ValueError):
            pass
    warnings.warn(
        f"layer '{layer}': Keras cannot make its initializer {initializer!r} again from a config (a class needs "
        "get_config and keras.saving.register_keras_serializable): where the layer is cloned its new tables begin as "
        "'uniform'; where it is loaded they have the rows of the file",
        UserWarning,
        stacklevel=3,
    )
    return None


def initializer_of(keras: Any, config: Any) -> Any:
    """What `initializer_config` was given, or what draws the same."""
    if not isinstance(config, Mapping):
        return config
    return keras.saving.deserialize_keras_object(config) if "class_name" in config else Initializer(**config)
