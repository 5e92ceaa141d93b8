# SPDX-License-Identifier: Apache-2.0
"""The optimizers of SparseOperationKit 1.x, as optimizers of the active Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import keras_compat
from sparse_operation_kit.tensorflow.distributed import states_of
from sparse_operation_kit.tensorflow.legacy import scope, stepping
from sparse_operation_kit.tensorflow.table_io import filter_variables
from sparse_operation_kit.tensorflow.table_variable import as_table

unique = tf.unique
unsorted_segment_sum = tf.math.unsorted_segment_sum

_ADAM = """Keras's Adam, which also steps tables, by the fused op.

    Every row of a table moves at every step, as in SparseOperationKit 1.x and as those of an ordinary variable do:
    the moments of rows that the batch does not name decay, and still move them. `sok.OptimizerWrapper`, which new code
    uses, moves the rows of the batch.

    Args:
      update: "all" as said, or "touched": the rows that the batch names.
      Others as of Keras's Adam.

    States of tables are in `sok.dump(path, tables, optimizer)` and in checkpoints of the optimizer. `apply_gradients`
    takes experimental_aggregate_gradients under either Keras.
    """

_PLUGIN = (
    _ADAM
    + """
    Its arguments by position are learning_rate, beta_1, beta_2, epsilon and name, and `lr` stands for learning_rate. In
    a tf.compat.v1 graph `initializer` is there to be run.
    """
)

_classes: dict[Any, tuple[Any, Any]] = {}


def adam_classes() -> tuple[Any, Any]:
    """(Adam, PluginAdam) over the Adam of the active Keras that works here: in tf.compat.v1 graphs the legacy one."""
    module = tf.keras.optimizers
    if not tf.compat.v1.executing_eagerly_outside_functions() and hasattr(module, "legacy"):
        module = module.legacy
    return adams_of(module.Adam)


def adams_of(base: Any) -> tuple[Any, Any]:
    """(Adam, PluginAdam) over the Adam of a Keras, which finds them in its files if it is not a legacy one."""
    if base not in _classes:
        _classes[base] = _make(base)
        kind = keras_compat.kind_of_class(base)
        if kind is not None and not base.__module__.endswith("optimizers.legacy.adam"):
            for cls in _classes[base]:
                keras_compat.register(kind, cls.__name__, cls)
    return _classes[base]


def _make(base: Any) -> tuple[Any, Any]:
    is_keras3 = any(cls.__module__.startswith("keras.src.") for cls in base.__mro__)

    class Adam(base):  # type: ignore[misc]
        __doc__ = _ADAM

        sok_takes_tables = True

        def __init__(self, *args: Any, update: str = "all", **options: Any) -> None:
            scope.install()
            super().__init__(*args, **options)
            self._sok_update = stepping.check_update(update)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "update": self._sok_update}

        if is_keras3:

            def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **options: Any) -> Any:
                del name, options  # experimental_aggregate_gradients, skip_gradients_aggregation
                return super().apply_gradients(grads_and_vars)

            def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
                variables = self._trainable_variables if trainable_variables is None else trainable_variables
                run = super().apply
                stepping.step(
                    self,
                    zip(grads, variables, strict=True),
                    lambda dense: run([g for g, _ in dense], [v for _, v in dense]),
                    lambda _: self._sok_update,
                    {},
                )

        else:

            def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **options: Any) -> Any:
                run = super().apply_gradients
                return stepping.step(
                    self,
                    grads_and_vars,
                    lambda dense: run(dense, name=name, **options),
                    lambda _: self._sok_update,
                    {"name": name},
                )

        if hasattr(base, "build"):

            def build(self, var_list: Any) -> Any:
                return super().build(stepping.without_tables(var_list))

        def sok_slots(self, var: Any) -> Any:
            """The optimizer states of a table by name."""
            return states_of(self).states.of(as_table(var))

        def sok_build(self, vars: Any) -> None:
            """Makes the states of tables before their first step, for example to restore them."""
            states_of(self).build(vars)

        @property
        def initializer(self) -> Any:
            """Of a tf.compat.v1 graph: nothing is left to be run, since variables have initializers of their own."""
            return tf.no_op()

    class PluginAdam(Adam):
        __doc__ = _PLUGIN

        def __init__(
            self,
            learning_rate: Any = 0.001,
            beta_1: Any = 0.9,
            beta_2: Any = 0.999,
            epsilon: float = 1e-7,
            name: str = "Plugin_Adam",
            **options: Any,
        ) -> None:
            learning_rate = options.pop("lr", learning_rate)
            numbers = {"learning_rate": learning_rate, "beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
            super().__init__(**numbers, name=name, **options)

    for cls in (Adam, PluginAdam):
        cls.__module__, cls.__qualname__ = __name__, cls.__name__
    return Adam, PluginAdam


class LazyAdamOptimizer(tf.compat.v1.train.AdamOptimizer):  # type: ignore[misc]
    """tf.contrib.opt.LazyAdamOptimizer: Adam that moves the rows of the batch, of tables and of ordinary variables.

    Args: as of tf.compat.v1.train.AdamOptimizer. `apply_gradients` takes tables, eagerly, in functions and in graphs.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        run = super().apply_gradients
        return stepping.step(
            self,
            grads_and_vars,
            lambda dense: run(dense, global_step=global_step, name=name),
            lambda _: "touched",
            {"global_step": global_step, "name": name},
        )

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> Any:  # of an ordinary variable
        beta1, beta2 = self._get_beta_accumulators()
        rate = tf.cast(self._lr_t, grad.dtype) * tf.sqrt(1 - tf.cast(beta2, grad.dtype)) / (1 - beta1)
        operations = []
        rows = []
        for slot, decay, value in (("m", self._beta1_t, grad), ("v", self._beta2_t, grad * grad)):
            state = self.get_slot(var, slot)
            rows.append(tf.gather(state, indices) * decay + value * (1 - decay))
            operations.append(state.scatter_update(tf.IndexedSlices(rows[-1], indices)))
        change = rate * rows[0] / (tf.sqrt(rows[1]) + self._epsilon_t)
        operations.append(var.scatter_sub(tf.IndexedSlices(change, indices)))
        return tf.group(*operations)


def LossScaleOptimizer(optimizer: Any, loss_scale: Any = "dynamic") -> Any:
    """The active Keras's LossScaleOptimizer, by the arguments that SparseOperationKit 1.x gave it.

    Args:
      optimizer: what steps.
      loss_scale: "dynamic", or a number: a fixed scale. That of Keras 3 is dynamic always and begins with the number.

    In a tf.compat.v1 graph it has the `initializer` of a plug-in Adam in it.
    """
    scope.install()
    scaler = tf.keras.mixed_precision.LossScaleOptimizer
    options: dict[str, Any] = {}
    if loss_scale != "dynamic":
        is_keras3 = hasattr(scaler, "scale_loss")
        options = {"initial_scale": float(loss_scale), **({} if is_keras3 else {"dynamic": False})}
    scaled = scaler(optimizer, **options)
    if not tf.compat.v1.executing_eagerly_outside_functions() and hasattr(optimizer, "initializer"):
        scaled.initializer = optimizer.initializer
    return scaled


def split_embedding_variable_from_others(variables: Any) -> tuple[list[Any], list[Any]]:
    """(tables, other variables) of a list or tuple, each in its order. New code: `sok.filter_variables`.

    Raises ValueError for anything but a list or tuple.
    """
    if not isinstance(variables, (list, tuple)):
        raise ValueError(f"variables must be a list or tuple, got {type(variables).__name__}")
    return filter_variables(variables)


def __getattr__(name: str) -> Any:
    if name in ("Adam", "PluginAdam"):
        return adam_classes()[name == "PluginAdam"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
