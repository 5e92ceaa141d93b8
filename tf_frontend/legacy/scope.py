# SPDX-License-Identifier: Apache-2.0
"""OptimizerScope: within it, optimizers of Keras and TensorFlow step tables."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from sparse_operation_kit.tensorflow.keras_compat import replace
from sparse_operation_kit.tensorflow.legacy import stepping
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table

_lock = threading.Lock()


class OptimizerScope:
    """Within it `apply_gradients` of any optimizer of Keras 3, tf_keras (new or legacy) or tf.compat.v1.train, and of a
    LossScaleOptimizer around one, updates these tables, and the ordinary variables of the same call as always.

    `sok.OptimizerWrapper`, which new code uses instead, moves the rows that the batch names. Here rows move as those of
    an ordinary variable do, where the optimizer moves all at every step (Adam, and what else has momentum) all of them.

    What the optimizer keeps for these tables is in `sok.dump(path, tables, optimizer)`; `sok.load` within the scope
    restores it, before the first step too.

    Args:
      trainable_variables: a list or tuple of variables; those that are no tables are passed over.
      update: "all" as said, or "touched": the rows that the batch names.

    Raises:
      RuntimeError: neither a list nor a tuple.
      ValueError: another `update`.

    Example::

        with sok.OptimizerScope(embedding_variables):
            optimizer.apply_gradients(zip(gradients, embedding_variables), experimental_aggregate_gradients=False)
    """

    def __init__(self, trainable_variables: Any, update: str = "all") -> None:
        if not isinstance(trainable_variables, (list, tuple)):
            raise RuntimeError(f"trainable_variables must be a list or tuple, got {type(trainable_variables).__name__}")
        self._tables = [as_table(variable) for variable in trainable_variables if is_table(variable)]
        self._update = stepping.check_update(update)

    def __enter__(self) -> OptimizerScope:
        install()
        with _lock:
            for table in self._tables:
                table.scopes.append(self._update)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            for table in self._tables:
                last = len(table.scopes) - 1 - table.scopes[::-1].index(self._update)
                del table.scopes[last]  # of equal ones the innermost


def open_always(table: TableVariable) -> None:
    """Lets optimizers step a table as within a scope that does not end."""
    install()
    table.scopes.append("all")


def _is_open(variable: Any) -> bool:
    return is_table(variable) and bool(as_table(variable).scopes)


def install() -> None:
    """Puts what looks for tables of open scopes into the base classes of optimizers; without such they do as before."""

    def pairwise(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(apply_gradients).parameters)[2:]

        def replaced(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
            pairs = list(grads_and_vars)
            options.update(zip(names, args, strict=False))
            return _stepped(self, pairs, lambda rest: apply_gradients(self, rest, **options), options)

        return replaced

    def named(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:  # Keras 3, which calls `apply`
        def replaced(self: Any, grads_and_vars: Any, **options: Any) -> Any:
            pairs = list(grads_and_vars)
            inner = getattr(self, "inner_optimizer", self)
            if any(_is_open(variable) for _, variable in pairs) or hasattr(inner, "sok_takes_tables"):
                options.pop("experimental_aggregate_gradients", None)
            return apply_gradients(self, pairs, **options)

        return replaced

    def listed(apply: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if trainable_variables is None:
                return apply(self, grads)
            pairs = list(zip(grads, trainable_variables, strict=True))
            return _stepped(self, pairs, lambda rest: apply(self, [g for g, _ in rest], [v for _, v in rest]), {})

        return replaced

    replace("tensorflow.python.training.optimizer", "Optimizer", "apply_gradients", pairwise)
    replace("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2", "apply_gradients", pairwise)
    replace("tf_keras.src.optimizers.optimizer", "Optimizer", "apply_gradients", pairwise)
    replace("keras.src.optimizers.base_optimizer", "BaseOptimizer", "apply_gradients", named)
    replace("keras.src.optimizers.base_optimizer", "BaseOptimizer", "apply", listed)
    stepping.scale_losses(_is_open)


def _stepped(
    optimizer: Any,
    pairs: list[tuple[Any, Any]],
    apply_dense: Callable[[list[tuple[Any, Any]]], Any],
    options: Mapping[str, Any],
) -> Any:
    if not any(_is_open(variable) for _, variable in pairs):
        return apply_dense(pairs)
    return stepping.step(optimizer, pairs, apply_dense, lambda table: (table.scopes or ["all"])[-1], options)
