# SPDX-License-Identifier: Apache-2.0
"""Small optimizers of this package: SGD, row-wise Adagrad, Ftrl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit import optimizers as _optimizers
from sparse_operation_kit.optimizers import OptimizerSpec
from sparse_operation_kit.tensorflow import devices, keras_compat, keras_optimizers
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.hyperparameters import number
from sparse_operation_kit.tensorflow.optimizer import KeepsStates, TableOptimizer, split_pairs


class OwnOptimizer(KeepsStates):
    """What the optimizers of this package share: a learning rate, a step count,
    and tables updated without a wrapper.
    """

    loss_scale_factor = None  # Keras asks for these
    use_ema = False

    def __init__(self, learning_rate: Any) -> None:
        keras_optimizers.enter(self, keras_compat.active())
        self.name = type(self).__name__.lower()
        self.learning_rate = learning_rate
        with tf.init_scope(), tf.device(devices.HOST):
            self._iterations = tf.Variable(0, trainable=False, dtype=tf.int64, name="sok_iterations")
        self._tables = TableOptimizer(self)
        self._track_trackable(self._iterations, "iterations")
        self._track_trackable(self._tables, "tables")
        self._dense: dict[Any, tf.Variable] = {}

    @property
    def iterations(self) -> tf.Variable:
        """The variable that counts steps, an int64."""
        return self._iterations

    @property
    def variables(self) -> list[tf.Variable]:
        """The count of steps, the learning rate where it is a variable, and the states of dense variables."""
        rate = [self._learning_rate] if isinstance(self._learning_rate, tf.Variable) else []
        return [self._iterations, *rate, *self._dense.values()]

    @property
    def learning_rate(self) -> Any:
        """The learning rate: a variable where it was given as a number, `optimizer.lr.assign(0.1)`. It may be set to
        all that the optimizer takes.
        """
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        rate = getattr(self, "_learning_rate", None)
        if isinstance(value, (int, float)) and isinstance(rate, tf.Variable):
            rate.assign(value)
            return
        if isinstance(value, (int, float)):
            with tf.init_scope(), tf.device(devices.HOST):
                value = tf.Variable(float(value), trainable=False, dtype=tf.float32, name="sok_learning_rate")
                self._track_trackable(value, "learning_rate", overwrite=True)
        self._learning_rate = value

    lr = learning_rate

    def _rate(self) -> Any:
        rate = self.learning_rate
        return number(rate(self.iterations) if keras_compat.is_schedule(rate) else rate)

    def sok_step(self, step: Any) -> OptimizerSpec:
        """The core's form of this step."""
        raise NotImplementedError

    @as_written
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """Updates tables and dense variables; one step, which `global_step`, a variable, counts too. Inside
        OptimizerWrapper only the dense ones come here. In a tf.compat.v1 graph it gives the operation to run, of that
        name, else the step count.
        """
        tables, dense = split_pairs(grads_and_vars)
        operations = [self._tables.apply(tables)] if tables else []
        for gradient, variable in dense:
            operations.append(self._apply_dense(tf.convert_to_tensor(gradient), keras_compat.raw(variable)))
        counters = [self.iterations, *([] if global_step is None else [global_step])]
        with tf.control_dependencies([op for op in operations if op is not None] if not tf.executing_eagerly() else []):
            counted = [counter.assign_add(1) for counter in counters]
        if tf.executing_eagerly() or tf.inside_function():
            return self.iterations
        return tf.group(*(each.op for each in counted), name=name)

    def _apply_dense(self, gradient: Any, variable: Any) -> Any:
        raise NotImplementedError

    def _build_dense(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            self._dense_states(keras_compat.raw(variable))

    def _dense_states(self, variable: Any) -> Sequence[tf.Variable]:
        """The states of a dense variable, made where they are not there."""
        del variable
        return ()

    def _arguments(self) -> dict[str, Any]:
        """What makes an optimizer like it."""
        return {"lr": self.learning_rate}

    def _config(self, kind: str) -> dict[str, Any]:
        return {name: keras_compat.as_config(kind, value) for name, value in self._arguments().items()}

    @classmethod
    def _made(cls, kind: str, config: dict[str, Any], custom_objects: Any) -> OwnOptimizer:
        return cls(**{name: keras_compat.from_config(kind, value, custom_objects) for name, value in config.items()})

    def _state(self, variable: Any, name: str, initial: float, shape: Any) -> tf.Variable:
        key = (variable.ref(), name)
        if key not in self._dense:
            with tf.init_scope():
                value = tf.fill(shape, tf.cast(initial, variable.dtype))
                self._dense[key] = tf.Variable(value, trainable=False, name=f"{type(self).__name__}_{name}")
                # By number: variables are given in the same order whenever the model is made.
                self._track_trackable(self._dense[key], f"dense_{len(self._dense) - 1}")
        return self._dense[key]


class SGD(OwnOptimizer):
    """Plain stochastic gradient descent: w -= lr g, for tables and dense variables.

    Args:
      lr: learning rate: a number, a tensor or variable, a schedule of Keras, or a function of no arguments.
    """

    def __init__(self, lr: Any = 0.01) -> None:
        super().__init__(lr)

    def sok_step(self, step: Any) -> OptimizerSpec:
        return _optimizers.sgd(self._rate())

    def _apply_dense(self, gradient: Any, variable: Any) -> Any:
        return variable.assign_sub(tf.cast(self._rate(), variable.dtype) * gradient)


class RowWiseAdagrad(OwnOptimizer):
    """Adagrad with one accumulator a row, which grows by the mean of the squared gradient (Mudigere et al. 2022).

    Args:
      lr: learning rate, as of `SGD`.
      initial_accumulator_value: what accumulators start from.
      epsilon: added to the root.
    """

    def __init__(
        self,
        lr: Any = 0.01,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-10,
    ) -> None:
        super().__init__(lr)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def sok_step(self, step: Any) -> OptimizerSpec:
        return _optimizers.rowwise_adagrad(self._rate(), self.initial_accumulator_value, self.epsilon)

    def _arguments(self) -> dict[str, Any]:
        names = ("initial_accumulator_value", "epsilon")
        return {**super()._arguments(), **{name: getattr(self, name) for name in names}}

    def _dense_states(self, variable: Any) -> Sequence[tf.Variable]:
        initial = self.initial_accumulator_value
        return [self._state(variable, "accumulator", initial, variable.shape[:1])]

    def _apply_dense(self, gradient: Any, variable: Any) -> Any:
        (accumulator,) = self._dense_states(variable)
        axes = list(range(1, len(variable.shape)))
        root = tf.sqrt(accumulator.assign_add(tf.reduce_mean(tf.square(gradient), axes)))
        root = tf.reshape(root, [-1] + [1] * len(axes)) if axes else root
        return variable.assign_sub(tf.cast(self._rate(), variable.dtype) * gradient / (root + self.epsilon))


class Ftrl(OwnOptimizer):
    """Follow the regularised leader (McMahan et al. 2013), as Keras parametrises it.

    Args:
      lr: learning rate, as of `SGD`.
      learning_rate_power, initial_accumulator_value, l1_regularization_strength, l2_regularization_strength,
        l2_shrinkage_regularization_strength, beta: as of `keras.optimizers.Ftrl`.
    """

    def __init__(
        self,
        lr: Any = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        super().__init__(lr)
        self._power = learning_rate_power
        self._initial = initial_accumulator_value
        self._strengths = (l1_regularization_strength, l2_regularization_strength, l2_shrinkage_regularization_strength)
        self._beta = beta

    def sok_step(self, step: Any) -> OptimizerSpec:
        return _optimizers.ftrl(self._rate(), self._power, self._initial, *self._strengths, self._beta)

    def _arguments(self) -> dict[str, Any]:
        l1, l2, shrinkage = self._strengths
        return {
            **super()._arguments(),
            "learning_rate_power": self._power,
            "initial_accumulator_value": self._initial,
            "l1_regularization_strength": l1,
            "l2_regularization_strength": l2,
            "l2_shrinkage_regularization_strength": shrinkage,
            "beta": self._beta,
        }

    def _dense_states(self, variable: Any) -> Sequence[tf.Variable]:
        initial = {"accumulator": self._initial, "linear": 0.0}
        return [self._state(variable, name, value, variable.shape) for name, value in initial.items()]

    def _apply_dense(self, gradient: Any, variable: Any) -> Any:
        rate = tf.cast(self._rate(), variable.dtype)
        accumulator, linear = self._dense_states(variable)
        l1, l2, shrinkage = self._strengths
        return tf.raw_ops.ResourceApplyFtrlV2(
            var=variable.handle,
            accum=accumulator.handle,
            linear=linear.handle,
            grad=gradient,
            lr=rate,
            l1=tf.cast(l1, variable.dtype),
            l2=tf.cast(l2 + self._beta / (2.0 * rate), variable.dtype),
            l2_shrinkage=tf.cast(shrinkage, variable.dtype),
            lr_power=tf.cast(self._power, variable.dtype),
        )
