# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training of everything that is not a table: broadcast, averaged gradients; tables are left alone.

Gradients of dense variables are averaged over the ranks, as Horovod does. Those of table rows have met at their owner
already, where they are summed (or averaged too, with `sok.init(gradient="mean")`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from sparse_operation_kit.tensorflow import (
    communication,
    keras_compat,
    keras_states,
    loss_scaling,
    runtime,
    strategies,
)
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.gradient import mark, scaled
from sparse_operation_kit.tensorflow.optimizer import KeepsStates, TableOptimizer, split_pairs
from sparse_operation_kit.tensorflow.table_io import filter_variables
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
    """Averages over the ranks those gradients whose source is the same on all of them; None stays None. Within
    `strategy.run` all stay as they are. What is averaged of `tf.IndexedSlices` has each row once, on one rank too.

    divide_local: divides the others, which are sums over the ranks, by their number, unless init() has it done.
    """
    result, state = list(gradients), runtime.get()
    if strategies.sums_gradients():
        return result
    dense = [i for i, (g, v) in enumerate(zip(result, sources, strict=True)) if g is not None and not is_local(v)]
    if dense:
        averages = communication.grouped_average(
            [result[i] for i in dense], name, _device_of(sources[i] for i in dense)
        )
        for i, average in zip(dense, averages, strict=True):
            result[i] = average
    if divide_local and state.num_ranks > 1:
        for i, source in enumerate(sources):
            if result[i] is not None and is_local(source):
                done = state.gradient_scale if is_table(source) else 1.0
                result[i] = scaled(result[i], 1.0 / (state.num_ranks * done))
    return result


def _device_of(variables: Iterable[Any]) -> str | None:
    """The one device of the variables, or None. In a graph gradients do not know theirs."""
    devices = {getattr(keras_compat.raw(variable), "device", "") for variable in variables}
    return devices.pop() if len(devices) == 1 else None


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
        marked = [
            mark(each, as_table(source) if is_table(source) else None) if is_local(source) else each
            for each, source in zip(averaged, flat_sources, strict=True)
        ]
        return tf.nest.pack_sequence_as(sources, marked)


def _flatten_like(structure: Any, gradients: Any) -> list[Any]:
    flat: list[Any] = tf.__internal__.nest.flatten_up_to(structure, gradients)
    return flat


def DistributedOptimizer(optimizer: Any) -> Any:
    """Makes an optimizer average the gradients of dense variables over the ranks and update tables by the fused op.

    It works in `model.compile` and `fit` of Keras 3 and of tf_keras, in own training loops, and in tf.compat.v1 graphs.
    The optimizer itself is changed and returned: its class is now one under that which it had, with its state, its
    schedule and its settings. Keras saves it as what it is: `load_model`, `load_weights`, BackupAndRestore and pickled
    models go on where training stopped, with the states of tables, each rank from a file of its own. Under
    mixed_float16 Keras scales losses; the ranks then skip the same steps.

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
    kind = _OWN if isinstance(optimizer, KeepsStates) else keras_compat.family(optimizer)
    if kind is None:
        raise TypeError(
            "DistributedOptimizer takes optimizers of Keras, tf_keras or tf.compat.v1.train, got "
            f"{type(optimizer).__name__}"
        )
    if not isinstance(optimizer, Averaging):
        optimizer.__class__ = _averaging_class(optimizer.__class__, kind, divide_tables)
    return optimizer


@functools.cache
def _averaging_class(base: Any, kind: str, divide_tables: bool) -> Any:
    """The class of an optimizer of class `base` that DistributedOptimizer has changed."""
    name = f"Distributed{base.__name__}"
    keras = keras_compat.kind_of_class(base)
    own = {"__module__": __name__, "__qualname__": name, "__doc__": base.__doc__, "_sok_keras": keras}
    made = type(name, (_CLASSES[kind], base), {**own, "_sok_base": base, "_sok_divides": divide_tables})
    if keras is not None:
        keras_compat.register(keras, _NAME, made)
        loss_scaling.ask_all_ranks(keras)
    return made


_OWN = "own"  # of this package, where the others are families of keras_compat
_NAME = "DistributedOptimizer"


def register(kind: str) -> None:
    """Lets a Keras load optimizers that DistributedOptimizer gave in another process, and scale losses for them."""
    keras_compat.register(kind, _NAME, _CLASSES[kind])
    loss_scaling.ask_all_ranks(kind)


_Any: Any = loss_scaling.Asks  # of what stands before a class of a framework


class Averaging(_Any):  # type: ignore[misc]
    """What DistributedOptimizer puts over the class of an optimizer."""

    _sok_wrapper = True
    _sok_base: type
    _sok_divides: bool

    def sok_slots(self, var: Any) -> Any:
        """The optimizer states of a table by name."""
        return _kept(self).states.of(var)

    def sok_build(self, vars: Any) -> None:
        """Makes the states of tables before their first step, for example to restore them."""
        _kept(self).build(vars)


class _Pairwise(Averaging):
    """Of tf_keras and tf.compat.v1."""

    @as_written
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any) -> Any:
        run = super().apply_gradients
        return _apply(self, grads_and_vars, lambda dense: run(dense, *args, **options), options.get("global_step"))


_BASE = "sok_distributed"
"""In a config: the class that the optimizer had, and whether tables' gradients are divided."""


class _Configured(Averaging):
    """What Keras makes anew of its config."""

    _sok_keras: str

    def get_config(self) -> dict[str, Any]:
        base = keras_compat.class_config(self._sok_keras, self._sok_base)
        return {**super().get_config(), _BASE: {**base, "divide_tables": self._sok_divides}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        base = dict(config.pop(_BASE))
        divide_tables = base.pop("divide_tables")
        made = keras_compat.deserialize(cls._sok_keras, {**base, "config": config}, custom_objects)
        return distribute(made, divide_tables=divide_tables)


class _Saved(_Configured, keras_states.InFiles):
    """What Keras builds for a model's variables, and saves beside it."""

    _sok_built = False

    def kept(self) -> TableOptimizer:
        return states_of(self)

    def build(self, variables: Any) -> None:
        object.__setattr__(self, "_sok_built", True)
        tables, dense = filter_variables(variables)
        if dense:  # some do not bear none
            super().build(dense)
        states_of(self).build(tables)


class _TfKeras(_Saved, _Pairwise):
    """Of tf_keras."""

    _sok_keras = keras_compat.TF_KERAS


class _TfKerasLegacy(_Configured, _Pairwise):
    """Of tf_keras.optimizers.legacy, which Keras's own files have no place for."""

    def apply_gradients(self, *args: Any, **options: Any) -> Any:
        result = super().apply_gradients(*args, **options)
        # In a function these give an operation: a LossScaleOptimizer has one in its other branch too.
        return tf.no_op() if tf.inside_function() else result


class _Keras3(_Saved):
    """Of Keras 3, whose `apply_gradients` calls `apply`, as `fit` of other backends does directly."""

    _sok_keras = keras_compat.KERAS

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        run = super().apply
        _apply(
            self,
            list(zip(grads, trainable_variables, strict=True)),
            lambda dense: run([g for g, _ in dense], [v for _, v in dense]),
        )


class _Own(_Configured):
    """Of this package."""

    @as_written
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        averaged = _averaged(self, [gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        variables = [variable for _, variable in pairs]
        return super().apply_gradients(list(zip(averaged, variables, strict=True)), *args, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, args, state = super().__reduce_ex__(protocol)
        return _rebuilt, (rebuild, args, self._sok_divides), state


def _rebuilt(rebuild: Any, args: Any, divide_tables: bool) -> Any:
    return distribute(rebuild(*args), divide_tables=divide_tables)


_CLASSES = {
    keras_compat.KERAS: _Keras3,
    keras_compat.TF_KERAS: _TfKeras,
    keras_compat.LEGACY: _TfKerasLegacy,
    keras_compat.TF1: _Pairwise,
    _OWN: _Own,
}


def table_optimizer(optimizer: Any) -> TableOptimizer | None:
    """What an optimizer keeps for tables: an OptimizerWrapper, what DistributedOptimizer gave, one of this package, or
    what one of these wraps. None for any other object.
    """
    tables = getattr(optimizer, "_tables", None)
    if isinstance(tables, TableOptimizer):
        return tables
    known = hasattr(optimizer, "sok_takes_tables") or hasattr(optimizer, "_sok_tables")  # of legacy
    if known or isinstance(optimizer, Averaging):
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


def _averaged(optimizer: Averaging, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    return average_gradients(gradients, variables, "sok_optimizer", optimizer._sok_divides)


def _kept(optimizer: Any) -> TableOptimizer:
    return optimizer._tables if isinstance(optimizer, KeepsStates) else states_of(optimizer)


def _apply(optimizer: Any, pairs: Iterable[tuple[Any, Any]], apply_dense: Any, global_step: Any = None) -> Any:
    given = list(pairs)
    if isinstance(optimizer, _Saved) and not optimizer._sok_built:
        with tf.init_scope():
            optimizer.build([variable for _, variable in given])
    gradients = _averaged(optimizer, [g for g, _ in given], [v for _, v in given])
    tables, dense = split_pairs((gradient, variable) for gradient, (_, variable) in zip(gradients, given, strict=True))
    return states_of(optimizer).step(tables, dense, apply_dense, global_step=global_step)
