# SPDX-License-Identifier: Apache-2.0
"""Makes Keras know this package: tables among its variables, and the classes that its files name."""

from __future__ import annotations

from sparse_operation_kit.tensorflow import (
    dist_model_parallel,
    distributed,
    embedding,
    keras_compat,
    keras_optimizers,
    keras_tables,
    runtime,
)
from sparse_operation_kit.tensorflow.legacy import layers as legacy_layers
from sparse_operation_kit.tensorflow.legacy import optimizers as legacy_optimizers
from sparse_operation_kit.tensorflow.optimizer import OptimizerWrapper
from sparse_operation_kit.tensorflow.own_optimizers import SGD, Ftrl, RowWiseAdagrad

_known: set[str] = set()


def register() -> None:
    """For the Kerases that are loaded: the active one, which TensorFlow loads, and others that are by the time of
    `init()`.
    """
    for kind, keras in keras_compat.loaded().items():
        if kind in _known:
            continue
        _known.add(kind)
        keras_tables.install(kind)
        for layers_of in (embedding.layer_class, dist_model_parallel.layers_of, legacy_layers.classes):
            layers_of(keras)
        legacy_optimizers.adams_of(keras.optimizers.Adam)
        distributed.register(kind)
        for cls in (OptimizerWrapper, SGD, RowWiseAdagrad, Ftrl):
            keras_optimizers.form(cls, kind)


register()
runtime.at_init.append(register)
