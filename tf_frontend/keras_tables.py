# SPDX-License-Identifier: Apache-2.0
"""Tables as attributes of layers and models of Keras: weights that train, and are saved with the layout of their rows.

tf_keras finds tables as it finds any tf.Variable. Keras 3 looks for variables of its own alone; here its tracker is
given one around each table that it meets, as an attribute or in a list or dict of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from sparse_operation_kit.tensorflow import keras_compat, layer_tables
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table


def install(kind: str) -> None:
    """Makes the layers of a Keras know tables."""
    if kind == keras_compat.KERAS:
        keras_compat.replace("keras.src.utils.tracking", "Tracker", "track", _tracking)
        keras_compat.replace("keras.src.backend.tensorflow.layer", "TFLayer", "_trackable_children", _children)
        layers, lists = "keras.src.layers.layer", ("_trainable_variables", "_non_trainable_variables")
    else:
        layers, lists = "tf_keras.src.engine.base_layer", ("_trainable_weights", "_non_trainable_weights")
    keras_compat.replace(layers, "Layer", "save_own_variables", functools.partial(_saving, lists))
    keras_compat.replace(layers, "Layer", "load_own_variables", functools.partial(_loading, lists))


def _tracking(track: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(self: Any, attr: Any) -> Any:
        if not isinstance(attr, TableVariable):
            return track(self, attr)
        if "trainable_variables" in self.config:  # a layer's, not an optimizer's or metric's
            if self.locked:
                keras_compat.warn_of_untracked(
                    attr, "is an attribute of a layer that is built already: make it in __init__ or build"
                )
            else:
                track(self, keras_compat.keras_variable(attr))
        return attr

    return replaced


def _children(children: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(self: Any, save_type: str = "checkpoint", **options: Any) -> Any:
        found = dict(children(self, save_type, **options))
        lists = [getattr(self, name, []) for name in ("_trainable_variables", "_non_trainable_variables")]
        tables = [as_table(variable) for each in lists for variable in each if is_table(variable)]
        return {**found, **{f"table_{table.table_name}": table for table in tables}}

    return replaced


def _saving(lists: Sequence[str], save: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(self: Any, store: Any) -> None:
        variables = _own(self, lists)
        if not any(map(is_table, variables)):
            save(self, store)
            return
        for number, variable in enumerate(variables):
            if is_table(variable):
                layer_tables.write(store, f"{number}", as_table(variable), as_table(variable))
            else:
                store[f"{number}"] = variable.numpy()

    return replaced


def _loading(lists: Sequence[str], load: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(self: Any, store: Any) -> None:
        variables = _own(self, lists)
        if not any(map(is_table, variables)):
            load(self, store)
            return
        taken: list[Callable[[], Any]] = []
        for number, variable in enumerate(variables):
            if is_table(variable):
                taken.append(layer_tables.prepare_taking(store, f"{number}", as_table(variable), as_table(variable)))
                continue
            if f"{number}" not in store or tuple(store[f"{number}"].shape) != tuple(variable.shape):
                raise ValueError(
                    f"layer '{self.name}': the file has no variable '{variable.name}' of shape "
                    f"{tuple(variable.shape)}: not saved from such a layer, or where tables lie otherwise on "
                    "the ranks (sok.dump and sok.load go from one to the other)"
                )
            taken.append(functools.partial(variable.assign, store[f"{number}"]))
        for take in taken:
            take()

    return replaced


def _own(layer: Any, lists: Sequence[str]) -> list[Any]:
    return [variable for name in lists for variable in getattr(layer, name)]
