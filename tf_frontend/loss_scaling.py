# SPDX-License-Identifier: Apache-2.0
"""LossScaleOptimizers of Keras 3 and tf_keras around optimizers of this package: all ranks skip the same steps.

`compile` puts one around any optimizer under mixed_float16. It looks at the gradients before they are averaged, and
tables have other rows on each rank: one rank would skip a step that the others wait for it to average.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import communication, keras_compat, runtime


class Asks:
    """What the optimizers are whose ranks skip the same steps."""


@functools.cache
def ask_all_ranks(kind: str) -> None:
    """Makes the LossScaleOptimizers of a Keras do so, once."""
    if kind == keras_compat.KERAS:
        _of_keras()
    else:
        # Those of the new optimizers and of the legacy ones.
        for scaler in keras_compat.library(kind).mixed_precision.LossScaleOptimizer.__subclasses__():
            _of_tf_keras(scaler)


def _of_keras() -> None:
    scaler = keras_compat.library(keras_compat.KERAS).optimizers.LossScaleOptimizer
    inherited = scaler.check_finite

    @functools.wraps(inherited)
    def check_finite(self: Any, grads: Any) -> Any:
        if not isinstance(self.inner_optimizer, Asks):
            return inherited(self, grads)
        # The rows of the step alone: of tf.IndexedSlices Keras would make a tensor of the table's size.
        return _on_all_ranks(inherited(self, [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]))

    scaler.check_finite = check_finite


def _of_tf_keras(scaler: Any) -> None:
    inherited = scaler.apply_gradients

    @functools.wraps(inherited)
    def apply_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any) -> Any:
        asks = isinstance(self.inner_optimizer, Asks)
        if not (asks and self.dynamic and runtime.num_ranks() > 1):
            return inherited(self, grads_and_vars, *args, **options)
        pairs, scale = list(grads_and_vars), self._loss_scale
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        parts = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
        finite = _on_all_ranks(tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(part)) for part in parts)]))
        # What says whether the step is skipped looks at one number instead of the gradients.
        instead = [tf.where(finite, 1.0, float("nan"))]
        scale.update = lambda gradients: type(scale).update(scale, instead)
        try:
            return inherited(self, pairs, *args, **options)
        finally:
            del scale.update

    scaler.apply_gradients = apply_gradients


def _on_all_ranks(finite: Any) -> tf.Tensor:
    return communication.allreduce(tf.cast(finite, tf.float32), "min", name="sok_finite") > 0
