# SPDX-License-Identifier: Apache-2.0
"""Tables as attributes of layers and models of Keras: weights that train, and are saved with the layout of their rows.
Those that are dynamic go through get_weights and set_weights with their keys.

tf_keras finds tables as it finds any tf.Variable. Keras 3 looks for variables of its own alone; here its tracker is
given one around each table that it meets, as an attribute or in a list or dict of one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparse_operation_kit.tensorflow import keras_compat, layer_tables, saving
from sparse_operation_kit.tensorflow.dynamic_variable import DynamicVariable
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
    keras_compat.replace(layers, "Layer", "get_weights", _getting)
    keras_compat.replace(layers, "Layer", "set_weights", _setting)


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


class KeyedRows(np.ndarray):
    """What `get_weights` gives of a dynamic table: its rows [n, dimension]. `content` is what `set_weights` gives back
    to such a table on such a rank: the rows, their keys, and what they are evicted by. Arrays made from it have none.
    """

    content: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> KeyedRows:
        made = np.asarray(content[saving.VALUE]).view(cls)
        made.content = content
        return made

    def __reduce__(self) -> Any:
        return super().__reduce__() if self.content is None else (KeyedRows.of, (self.content,))

    def __deepcopy__(self, memo: Any) -> Any:
        return super().__deepcopy__(memo) if self.content is None else KeyedRows.of(copy.deepcopy(self.content, memo))


def _dynamic(variable: Any) -> DynamicVariable | None:
    """The dynamic table that a weight is."""
    table = as_table(variable) if is_table(variable) else None
    return table if isinstance(table, DynamicVariable) else None


def _getting(get: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(self: Any) -> Any:
        tables = [_dynamic(variable) for variable in self.weights]
        if not any(table is not None for table in tables):
            return get(self)
        return [
            variable.numpy() if table is None else KeyedRows.of({k: v.numpy() for k, v in table.content(table).items()})
            for variable, table in zip(self.weights, tables, strict=True)
        ]

    return replaced


def _setting(set_weights: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(self: Any, weights: Any) -> None:
        own, weights = self.weights, list(weights)
        if not any(_dynamic(variable) is not None for variable in own):
            set_weights(self, weights)
            return
        if len(weights) != len(own):
            raise ValueError(f"layer '{self.name}' has {len(own)} weights; set_weights was given {len(weights)}")
        taken: list[Callable[[], Any]] = []
        for variable, value in zip(own, weights, strict=True):
            table, content = _dynamic(variable), getattr(value, "content", None)
            if table is not None:
                if not isinstance(value, KeyedRows) or content is None:
                    raise ValueError(
                        f"layer '{self.name}': table '{table.table_name}' is dynamic, so set_weights takes for it what "
                        "get_weights gave, which has the keys of its rows (sok.assign takes keys and rows)"
                    )
                taken.append(table.prepare(table, content))
                continue
            if tuple(np.shape(value)) != tuple(variable.shape):
                raise ValueError(
                    f"layer '{self.name}': weight '{variable.name}' has shape {tuple(variable.shape)}; set_weights was "
                    f"given {tuple(np.shape(value))}"
                )
            taken.append(functools.partial(variable.assign, value))
        for take in taken:
            take()

    return replaced


def _own(layer: Any, lists: Sequence[str]) -> list[Any]:
    return [variable for name in lists for variable in getattr(layer, name)]
