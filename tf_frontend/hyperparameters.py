# SPDX-License-Identifier: Apache-2.0
"""Reads the wrapped optimizer's settings at each step and says what the core has to do.

In eager mode the numbers are Python's; in a graph they are tensors, so that schedules and assignments to the learning
rate count at each step of the graph. What depends on the step (bias corrections, schedules) is float32 in both, as it
is in Keras: 1 - 0.999^t in float32 and in float64 differ by 1e-5 in the first steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.optimizers import NotFused, OptimizerSpec, StateSpec, from_keras
from sparse_operation_kit.tensorflow import devices, keras_compat
from sparse_operation_kit.tensorflow._ops import ops


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: the optimizer, its states as this frontend starts them, and what gradients are multiplied with."""

    spec: OptimizerSpec
    states: tuple[StateSpec, ...]
    gradient_scale: Any = 1.0


# What SokReadNumber takes. int32 variables are in host memory.
_FETCHED = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int64)


def number(value: Any) -> Any:
    """A setting as a Python number, or in a graph as a float32 scalar."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if callable(value) and not isinstance(value, (tf.Tensor, tf.Variable)) and not hasattr(value, "_value"):
        value = value()
    if isinstance(value, (bool, int, float)):
        return value
    variable = keras_compat.raw(value)
    if devices.is_on_gpu(variable) and variable.dtype in _FETCHED:
        value = ops.sok_read_number([variable.handle])
    else:
        value = tf.convert_to_tensor(value)
    if tf.executing_eagerly():
        return float(value.numpy())
    return tf.cast(value, tf.float32)


def _scheduled(schedule: Any, iterations: Any) -> Any:
    """The learning rate of a schedule. One of Keras gets the count that the host knows, where it is kept on a GPU."""
    variable = keras_compat.raw(iterations)
    counts = not tf.executing_eagerly() and devices.is_on_gpu(variable) and variable.dtype == tf.int64
    if counts and keras_compat.is_librarys_own(schedule):
        iterations = ops.sok_read_number([variable.handle], dtype=tf.int64)
    return number(schedule(iterations))


def next_step(iterations: Any) -> Any:
    """The number of the step that comes after `iterations`, 1 for the first, in float32."""
    value = number(iterations)
    return np.float32(value + 1) if isinstance(value, (int, float)) else value + 1.0


_TF1_CLASSES = {
    "GradientDescentOptimizer": "SGD",
    "MomentumOptimizer": "SGD",
    "AdagradOptimizer": "Adagrad",
    "AdamOptimizer": "Adam",
    "AdadeltaOptimizer": "Adadelta",
    "RMSPropOptimizer": "RMSprop",
    "FtrlOptimizer": "Ftrl",
}

# from_keras's setting -> the attributes that hold it, the first that exists.
_TF1_ATTRIBUTES = {
    "learning_rate": ("_learning_rate", "_lr"),
    "momentum": ("_momentum",),
    "nesterov": ("_use_nesterov",),
    "beta_1": ("_beta1",),
    "beta_2": ("_beta2",),
    "epsilon": ("_epsilon",),
    "rho": ("_rho", "_decay"),
    "centered": ("_centered",),
    "initial_accumulator_value": ("_initial_accumulator_value",),
    "learning_rate_power": ("_learning_rate_power",),
    "l1_regularization_strength": ("_l1_regularization_strength",),
    "l2_regularization_strength": ("_l2_regularization_strength",),
    "l2_shrinkage_regularization_strength": ("_l2_shrinkage_regularization_strength",),
    "beta": ("_beta",),
}

_KERAS_SETTINGS = (*_TF1_ATTRIBUTES, "amsgrad", "weight_decay")
_FLAGS = ("nesterov", "centered", "amsgrad")
_STATIC = ("initial_accumulator_value",)
# Numbers that legacy optimizers of tf_keras do not keep among their hyper-parameters.
_LEGACY_ATTRIBUTES = ("epsilon", "beta", "l2_shrinkage_regularization_strength")

# Options of Keras's optimizers that change gradients or variables in a way the core does not know.
_OBSTACLES = (
    "adaptive_epsilon",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "gradient_accumulation_steps",
    "gradient_transformers",
)


# Classes whose step depends on how many were taken before it.
_COUNTING = ("Adam", "AdamW", "Adamax")


def read(optimizer: Any, iterations: Callable[[], Any]) -> Step:
    """What the optimizer does at this step.

    iterations: gives the variable that counts the steps before this one; read only where it matters, since it may be on
    a GPU.
    Raises NotFused when the core has no fused form of it; the message names what stands in the way.
    """
    own = getattr(optimizer, "sok_step", None)
    if own is not None:
        return _with_states(own(next_step(iterations())))
    kind = keras_compat.family(optimizer)
    name = keras_compat.library_class(optimizer)
    if kind is None or name is None:
        raise NotFused(f"the class {type(optimizer).__name__}")
    for option in _OBSTACLES:
        if getattr(optimizer, option, None):
            raise NotFused(f"{option}={getattr(optimizer, option)}")
    step = next_step(iterations()) if name.removesuffix("Optimizer") in _COUNTING else None
    if kind == keras_compat.TF1:
        if name not in _TF1_CLASSES:
            raise NotFused(f"the class {name}")
        spec = from_keras(_TF1_CLASSES[name], settings(optimizer, iterations), step, "tf1")
        # tf.compat.v1.train starts RMSProp's mean square at 1.
        states = tuple(dataclasses.replace(s, initial=1.0) if s.name == "rms" else s for s in spec.states)
        return Step(spec, states)
    scale = getattr(optimizer, "loss_scale_factor", None)
    dialect = "keras_legacy" if kind == keras_compat.LEGACY else "keras"
    spec = from_keras(name, settings(optimizer, iterations), step, dialect)
    return _with_states(spec, 1.0 if scale is None else 1.0 / scale)


def settings(optimizer: Any, iterations: Callable[[], Any]) -> Mapping[str, Any]:
    """The settings of an optimizer of any Keras or of tf.compat.v1 as they are now, by the names of from_keras.

    iterations: as of `read`. Absent are settings that the optimizer does not have, and those that are None.
    """
    kind = keras_compat.family(optimizer)
    if kind == keras_compat.TF1:
        return _tf1_settings(optimizer)
    if kind == keras_compat.LEGACY:
        return _legacy_settings(optimizer, iterations)
    return _keras_settings(optimizer, iterations)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as Python's numbers; tensors of a tf.compat.v1 graph by its default session."""
    return {name: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> Any:
    if tf.is_tensor(value):
        value = value.numpy() if tf.executing_eagerly() else tf.compat.v1.get_default_session().run(value)
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value


def _with_states(spec: OptimizerSpec, gradient_scale: Any = 1.0) -> Step:
    return Step(spec, spec.states, gradient_scale)


def _keras_settings(optimizer: Any, iterations: Callable[[], Any]) -> Mapping[str, Any]:
    settings: dict[str, Any] = {}
    schedule = keras_compat.schedule(optimizer)
    for name in _KERAS_SETTINGS:
        if name == "learning_rate" and schedule is not None:
            # The property of Keras 3 computes it where the count is; that of tf_keras is the rate of the last step that
            # it took itself.
            settings[name] = _scheduled(schedule, iterations())
            continue
        value = getattr(optimizer, name, None)
        if value is not None:
            settings[name] = value if name in _FLAGS or name in _STATIC else number(value)
    return settings


def _legacy_settings(optimizer: Any, iterations: Callable[[], Any]) -> Mapping[str, Any]:
    rate = optimizer._get_hyper("learning_rate")
    # As its _decayed_lr, which would take the optimizer's own count.
    rate = number(rate(tf.cast(iterations(), tf.float32)) if keras_compat.is_schedule(rate) else rate)
    if optimizer._initial_decay > 0.0:
        rate = rate / (1.0 + optimizer._initial_decay * number(iterations()))
    settings: dict[str, Any] = {"learning_rate": rate}
    for name in _KERAS_SETTINGS:
        if name in settings:
            continue
        if name in optimizer._hyper:
            settings[name] = number(optimizer._get_hyper(name))
        elif name in _FLAGS or name in _STATIC or name in _LEGACY_ATTRIBUTES:
            value = getattr(optimizer, name, getattr(optimizer, f"_{name}", None))
            if value is not None:
                settings[name] = value
    if getattr(optimizer, "_momentum", True) is False:
        settings["momentum"] = 0.0
    return settings


def _tf1_settings(optimizer: Any) -> Mapping[str, Any]:
    settings: dict[str, Any] = {}
    for setting, attributes in _TF1_ATTRIBUTES.items():
        for attribute in attributes:
            value = getattr(optimizer, attribute, None)
            if value is not None:
                settings[setting] = value if setting in _FLAGS or setting in _STATIC else number(value)
                break
    return settings


def double(value: Any) -> tf.Tensor:
    """A number or scalar as a float64 tensor; tf.cast would round a Python number to float32 on the way."""
    return tf.cast(value, tf.float64) if tf.is_tensor(value) else tf.constant(value, tf.float64)


def hyperparameter_tensor(rows: list[list[Any]]) -> tf.Tensor:
    """[len(rows), fields] float64 of numbers and scalars."""
    if not any(tf.is_tensor(value) for row in rows for value in row):
        return tf.constant(np.array(rows, np.float64))
    return tf.stack([tf.stack([double(value) for value in row]) for row in rows])
