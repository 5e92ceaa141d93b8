# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training of everything that is not a table: broadcast, averaged gradients; tables are left alone.

Gradients of dense variables are averaged over the ranks, as Horovod does. Those of table rows have met at their owner
already, where they are summed (or averaged too, with `sok.init(gradient="mean")`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from sparse_operation_kit.tensorflow import communication, keras_compat, runtime
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.gradient import scaled
from sparse_operation_kit.tensorflow.optimizer import OptimizerWrapper, TableOptimizer, split_pairs
from sparse_operation_kit.tensorflow.table_variable import as_table, is_table


@as_written
def broadcast_variables(vars: Iterable[Any], root_rank: int = 0) -> Any:
    """Gives the variables of all ranks the values of `root_rank`; tables are skipped, each rank holds other rows.

    Args:
      vars: variables of TensorFlow, Keras 3 or tf_keras.
      root_rank: whose values.

    Returns:
      None; in a tf.compat.v1 graph the operation to run.

    Raises:
      RuntimeError: before init(). ValueError: no such rank.
    """
    communication.check_root(root_rank)
    dense = [variable for variable in vars if not is_local(variable)]
    if runtime.get().num_ranks == 1:
        return None if tf.executing_eagerly() or tf.inside_function() else tf.no_op()
    operations = []
    for i, variable in enumerate(dense):
        target = keras_compat.raw(variable)
        value = communication.broadcast(target, root_rank, name=f"sok_broadcast_{i}")
        operations.append(target.assign(tf.ensure_shape(value, target.shape)))
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*operations)


def is_local(variable: Any) -> bool:
    """Whether a variable is this rank's alone: a table, or what is marked so (as layers of dist_model_parallel do)."""
    return is_table(variable) or hasattr(variable, "de_local") or hasattr(keras_compat.raw(variable), "de_local")


def average_gradients(
    gradients: Sequence[Any], sources: Sequence[Any], name: str, divide_local: bool = False
) -> list[Any]:
    """Averages over the ranks those gradients whose source is the same on all of them; None stays None.

    divide_local: divides the others, which are sums over the ranks, by their number, unless init() has it done.
    """
    result, state = list(gradients), runtime.get()
    if state.num_ranks == 1:
        return result
    dense = [i for i, (g, v) in enumerate(zip(result, sources, strict=True)) if g is not None and not is_local(v)]
    if dense:
        averages = communication.grouped_average([result[i] for i in dense], name)
        for i, average in zip(dense, averages, strict=True):
            result[i] = average
    if divide_local:
        tables = [i for i, v in enumerate(sources) if result[i] is not None and is_table(v)]
        others = [i for i, v in enumerate(sources) if result[i] is not None and is_local(v) and not is_table(v)]
        factor = 1.0 / state.num_ranks
        for places, by in ((tables, factor / state.gradient_scale), (others, factor)):
            for i, gradient in zip(places, scaled([result[i] for i in places], by), strict=True):
                result[i] = gradient
    return result


class DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """A `tf.GradientTape` whose gradients of dense variables are averaged over the ranks.

    Gradients of tables stay as they are: not yet materialised `tf.IndexedSlices` of this rank's rows.

    Args:
      gradtape: the tape to wrap; None makes one.
      persistent, watch_accessed_variables: of a tape that is made.

    Example::

        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = ...
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))
    """

    _sok_divides = False

    def __init__(
        self, gradtape: tf.GradientTape | None = None, persistent: bool = False, watch_accessed_variables: bool = True
    ) -> None:
        runtime.get()
        if gradtape is None:
            super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        else:
            # Share everything with the tape that is wrapped: it may be recording already.
            self.__dict__ = gradtape.__dict__

    @as_written
    def gradient(self, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        """As of `tf.GradientTape`, averaged over the ranks except for tables."""
        gradients = super().gradient(target, sources, *args, **options)
        flat_sources = tf.nest.flatten(sources)
        flat = _flatten_like(sources, gradients)
        averaged = average_gradients(flat, flat_sources, "sok_tape", self._sok_divides)
        return tf.nest.pack_sequence_as(sources, averaged)


def _flatten_like(structure: Any, gradients: Any) -> list[Any]:
    flat: list[Any] = tf.__internal__.nest.flatten_up_to(structure, gradients)
    return flat


def DistributedOptimizer(optimizer: Any) -> Any:
    """Makes an optimizer average the gradients of dense variables over the ranks and update tables by the fused op.

    It works in `model.compile` and `fit` of Keras 3 and of tf_keras, in own training loops, and in tf.compat.v1 graphs.
    The optimizer itself is changed and returned: it stays an instance of its own class, with its state, its schedule
    and its `get_config`; what is saved of it loads as the optimizer that it was. Under mixed_float16 Keras 3 scales
    losses; the ranks then skip the same steps. The loss scaling of tf_keras is for one rank alone.

    Args:
      optimizer: of Keras 3, tf_keras (new or legacy) or tf.compat.v1.train, or a `sok.OptimizerWrapper`, `sok.SGD`,
        ....

    Returns:
      The optimizer. `sok_slots(table)` gives the states of a table; `sok_build(tables)` makes them before the first
      step.

    Raises:
      RuntimeError: before init(). TypeError: not an optimizer.
    """
    return distribute(optimizer, divide_tables=False)


def distribute(optimizer: Any, *, divide_tables: bool) -> Any:
    """DistributedOptimizer. divide_tables: whether tables' gradients are divided by the number of ranks."""
    runtime.get()
    if isinstance(optimizer, OptimizerWrapper) or hasattr(optimizer, "sok_step"):
        return _AveragingWrapper(optimizer)
    if keras_compat.family(optimizer) is None:
        raise TypeError(
            "DistributedOptimizer takes optimizers of Keras, tf_keras or tf.compat.v1.train, got "
            f"{type(optimizer).__name__}"
        )
    if getattr(type(optimizer), "_sok_wrapper", False):
        return optimizer
    if keras_compat.family(optimizer) == keras_compat.KERAS:
        _scale_losses_together()
    base = type(optimizer)
    methods = dict(
        _Keras3Methods.__dict__ if keras_compat.family(optimizer) == keras_compat.KERAS else _Methods.__dict__
    )
    for name in ("__dict__", "__weakref__"):
        methods.pop(name, None)
    # The class takes the name and module of its base, so that what is saved of the optimizer names a class that exists.
    methods.update(
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_sok_wrapper": True,
            "_sok_divides": divide_tables,
        }
    )
    for attribute in ("_keras_api_export_path", "_api_export_path", "_tf_keras_api_names"):
        if attribute in base.__dict__:
            methods[attribute] = base.__dict__[attribute]
    wrapped: Any = type(base.__name__, (base,), methods)
    wrapped._sok_base = wrapped.__mro__[1]
    optimizer.__class__ = wrapped
    return optimizer


def _scale_losses_together() -> None:
    """Makes LossScaleOptimizers of Keras 3 around a DistributedOptimizer ask all ranks whether a step is skipped.

    `compile` puts one around any optimizer under mixed_float16. It looks at the gradients before they are averaged, and
    tables have other rows on each rank: one rank would skip a step that the others wait for it to average.
    """
    import keras

    scaler = keras.optimizers.LossScaleOptimizer
    inherited = scaler.check_finite
    if getattr(inherited, "_sok_asks_all_ranks", False):
        return

    @functools.wraps(inherited)
    def check_finite(self: Any, grads: Any) -> Any:
        if not getattr(type(self.inner_optimizer), "_sok_wrapper", False):
            return inherited(self, grads)
        # The rows of the step alone: of tf.IndexedSlices Keras would make a tensor of the table's size.
        finite = inherited(self, [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads])
        return communication.allreduce(tf.cast(finite, tf.float32), "min", name="sok_finite") > 0

    check_finite._sok_asks_all_ranks = True  # type: ignore[attr-defined]
    scaler.check_finite = check_finite


class _Methods:
    """What DistributedOptimizer puts over the class of a tf_keras or tf.compat.v1 optimizer."""

    _sok_base: Any

    @as_written
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any) -> Any:
        return _apply(
            self,
            grads_and_vars,
            lambda dense: self._sok_base.apply_gradients(self, dense, *args, **options),
            options.get("global_step"),
        )

    def build(self, var_list: Any, *args: Any, **options: Any) -> Any:
        return self._sok_base.build(self, [v for v in var_list if not is_table(v)], *args, **options)

    def sok_slots(self, var: Any) -> Any:
        return _slots(self, var)

    def sok_build(self, vars: Any) -> None:
        states_of(self).build(vars)


class _Keras3Methods:
    """The same for Keras 3, whose `apply_gradients` calls `apply`, as `fit` of other backends does directly."""

    _sok_base: Any

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        if trainable_variables is None:
            trainable_variables = self._trainable_variables  # type: ignore[attr-defined]
        _apply(
            self,
            list(zip(grads, trainable_variables, strict=True)),
            lambda dense: self._sok_base.apply(self, [g for g, _ in dense], [v for _, v in dense]),
        )

    def build(self, variables: Any) -> Any:
        return self._sok_base.build(self, [v for v in variables if not is_table(v)])

    def sok_slots(self, var: Any) -> Any:
        return _slots(self, var)

    def sok_build(self, vars: Any) -> None:
        states_of(self).build(vars)


def _slots(optimizer: Any, var: Any) -> Any:
    """The optimizer states of a table by name."""
    return states_of(optimizer).states.of(as_table(var))


def table_optimizer(optimizer: Any) -> TableOptimizer | None:
    """What an optimizer keeps for tables: an OptimizerWrapper, what DistributedOptimizer gave, one of this package, or
    what one of these wraps. None for any other object.
    """
    tables = getattr(optimizer, "_tables", None)
    if isinstance(tables, TableOptimizer):
        return tables
    known = hasattr(optimizer, "sok_takes_tables") or hasattr(optimizer, "_sok_tables")  # of legacy
    if known or getattr(type(optimizer), "_sok_wrapper", False):
        return states_of(optimizer)
    return TableOptimizer.of(optimizer)  # as PyTorch's frontend also takes what a wrapper wraps


def states_of(optimizer: Any) -> TableOptimizer:
    """The same of an optimizer of a framework; made late, because Keras may make copies with from_config."""
    state: TableOptimizer | None = getattr(optimizer, "_sok_tables", None)
    if state is None:
        state = TableOptimizer(optimizer)
        object.__setattr__(optimizer, "_sok_tables", state)
        if isinstance(optimizer, trackable.Trackable):
            optimizer._track_trackable(state, "sok_tables")
    return state


def _apply(optimizer: Any, pairs: Iterable[tuple[Any, Any]], apply_dense: Any, global_step: Any = None) -> Any:
    given = list(pairs)
    gradients = average_gradients(
        [g for g, _ in given], [v for _, v in given], "sok_optimizer", type(optimizer)._sok_divides
    )
    tables, dense = split_pairs((gradient, variable) for gradient, (_, variable) in zip(gradients, given, strict=True))
    return states_of(optimizer).step(tables, dense, apply_dense, global_step=global_step)


class _AveragingWrapper(trackable.Trackable):  # type: ignore[misc]
    """DistributedOptimizer of an optimizer of this package."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._track_trackable(optimizer, "optimizer")

    @as_written
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any) -> Any:
        """Averages the gradients of dense variables, then applies all."""
        pairs = list(grads_and_vars)
        gradients = average_gradients([g for g, _ in pairs], [v for _, v in pairs], "sok_optimizer")
        averaged = [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs, strict=True)]
        return self._optimizer.apply_gradients(averaged, *args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_self_"):  # TensorFlow's notes about this object
            raise AttributeError(name)
        return getattr(self._optimizer, name)
