# SPDX-License-Identifier: Apache-2.0
"""Optimizers of this package as those of a Keras: what `compile` takes, and Keras saves and loads with a model.

Keras takes instances of its own base class alone. Each class of an optimizer of this package has one below it for each
Keras, `form(cls, kind)`, which is that too; `sok.SGD(...)` makes one of the active Keras, `sok.OptimizerWrapper(...)`
one of the Keras of what it wraps. In a tf.compat.v1 graph, and without Keras, they are what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from sparse_operation_kit.tensorflow import keras_compat, keras_states, loss_scaling
from sparse_operation_kit.tensorflow.table_variable import is_table


def enter(optimizer: Any, kind: str | None) -> None:
    """Makes an optimizer whose __init__ begins one of a Keras too (KERAS or TF_KERAS)."""
    if kind is not None and tf.compat.v1.executing_eagerly_outside_functions():
        optimizer.__class__ = form(optimizer.__class__, kind)


@functools.cache
def form(cls: Any, kind: str) -> Any:
    """The class `cls` as an optimizer of a Keras."""
    if issubclass(cls, OfKeras):
        return cls
    base = keras_compat.library(kind).optimizers.Optimizer
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = type(cls.__name__, (_FORMS[kind], cls, base), {**same, "_sok_keras": kind, "_sok_plain": cls})
    keras_compat.register(kind, cls.__name__, made)
    loss_scaling.ask_all_ranks(kind)
    return made


def _blank(cls: Any, kind: str) -> Any:
    return object.__new__(form(cls, kind))


class OfKeras(loss_scaling.Asks, keras_states.InFiles):
    """What stands before an optimizer of this package and Keras's base class, whose __init__ is not called: it would
    make a count of steps and a learning rate beside those that there are.
    """

    _sok_keras: str
    _sok_plain: Any
    _sok_variables: list[Any]
    built = _built = False
    jit_compile = False

    # Without Keras's and TensorFlow's notes of what is assigned: these classes note what is saved themselves.
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    def kept(self) -> Any:
        """See InFiles."""
        return self._tables

    def build(self, vars: Iterable[Any]) -> None:
        """Makes the states of a model's variables, tables among them, as Keras calls it and before a first step."""
        variables = list(vars)
        super().build(variables)
        if not self.built:
            self._sok_variables = variables
        self.built = self._built = True

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any) -> Any:
        """See the class; makes states of all that it is given first, as Keras does."""
        pairs = list(grads_and_vars)
        if not self.built:
            with tf.init_scope():
                self.build([variable for _, variable in pairs])
        return super().apply_gradients(pairs, *args, **options)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` takes, as plain data."""
        config: dict[str, Any] = self._config(self._sok_keras)
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        """An optimizer with these settings."""
        return cls._made(cls._sok_keras, dict(config), custom_objects)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (self._sok_plain, self._sok_keras), self.__dict__

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        return dict(trackable.Trackable._trackable_children(self, save_type, **options))


class _OfKeras3(OfKeras):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As `apply_gradients`; without variables of those that it was built for."""
        variables = self._sok_variables if trainable_variables is None else trainable_variables
        self.apply_gradients(zip(grads, variables, strict=True))


class _OfTfKeras(OfKeras):
    _run_with_dtensor, _mesh = False, None  # a LossScaleOptimizer asks for these

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Dense gradients summed over a strategy's replicas: what a LossScaleOptimizer looks at."""
        pairs = list(grads_and_vars)
        tables, dense = [pair for pair in pairs if is_table(pair[1])], [pair for pair in pairs if not is_table(pair[1])]
        wrapped = getattr(self, "_optimizer", None)
        of_legacy = getattr(wrapped, "_aggregate_gradients", list)
        return [*tables, *getattr(wrapped, "aggregate_gradients", of_legacy)(dense)]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *args: Any,
        skip_gradients_aggregation: bool = False,
        **options: Any,
    ) -> Any:
        """See the class."""
        if skip_gradients_aggregation:
            family = keras_compat.family(getattr(self, "_optimizer", None))
            if family == keras_compat.LEGACY:
                options["experimental_aggregate_gradients"] = False
            elif family == keras_compat.TF_KERAS:
                options["skip_gradients_aggregation"] = True
        return super().apply_gradients(grads_and_vars, *args, **options)


_FORMS = {keras_compat.KERAS: _OfKeras3, keras_compat.TF_KERAS: _OfTfKeras}
