# SPDX-License-Identifier: Apache-2.0
"""What optimizers keep for tables, in the files of Keras 3 and tf_keras: beside the variables that Keras numbers.

Tables are numbered in the order in which the optimizer was built for them, as Keras numbers variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_operation_kit.tensorflow import keras_compat, layer_tables

if TYPE_CHECKING:
    from sparse_operation_kit.tensorflow.optimizer import TableOptimizer

_OURS = "table"
_COUNTER = "tables_iterations"
_SCALAR = "tables_scalar_"


_Any: Any = object  # stands before a class of Keras


def save(store: Any, tables: TableOptimizer) -> None:
    """Writes what is kept for tables to the store of an optimizer's `save_own_variables`."""
    for number, (table, states) in enumerate(tables.states.items()):
        for name, state in states.items():
            layer_tables.write(store, f"{_OURS}{number}_{name}", table, state)
    if tables.counter is not None:
        store[_COUNTER] = tables.counter.numpy()
    for name, variable in _scalars(tables).items():
        store[f"{_SCALAR}{name}"] = variable.numpy()


def without(store: Any) -> dict[str, Any]:
    """What is in the store of an optimizer's `load_own_variables` but for what `save` wrote."""
    return {name: store[name] for name in store.keys() if not name.startswith(_OURS)}  # noqa: SIM118


def prepare_taking(store: Any, tables: TableOptimizer) -> Callable[[], None]:
    """What gives tables what `save` wrote, after the optimizer itself has what is its own.

    Raises ValueError for a file that has not what these tables need.
    """
    taken = [
        layer_tables.prepare_taking(store, f"{_OURS}{number}_{name}", table, state)
        for number, (table, states) in enumerate(tables.states.items())
        for name, state in states.items()
    ]
    scalars = {name: float(np.asarray(store[f"{_SCALAR}{name}"])) for name in _scalars(tables)}

    def take() -> None:
        for each in taken:
            each()
        found = store[_COUNTER] if _COUNTER in store else keras_compat.raw(keras_compat.iterations(tables.optimizer))
        iterations = int(np.asarray(found))
        if _COUNTER in store or tables.counter is not None:
            tables.own_counter().assign(iterations)
        if tables.rows is not None:
            tables.rows.resume(scalars)

    return take


class InFiles(_Any):  # type: ignore[misc]
    """Before a class of an optimizer of Keras: its files hold what is kept for tables, beside its own variables."""

    def kept(self) -> TableOptimizer:
        """What it keeps for tables."""
        raise NotImplementedError

    def save_own_variables(self, store: Any) -> None:
        """Writes its state to a store of Keras."""
        super().save_own_variables(store)
        save(store, self.kept())

    def load_own_variables(self, store: Any) -> None:
        """Takes its state from a store of Keras.

        Raises ValueError for what is not of its tables.
        """
        dense = without(store)
        if len(dense) != len(self.variables):
            super().load_own_variables(dense)  # which says so, and takes nothing
            return
        take = prepare_taking(store, self.kept())
        super().load_own_variables(dense)
        take()


def _scalars(tables: TableOptimizer) -> dict[str, Any]:
    return {} if tables.rows is None else tables.rows.scalars
