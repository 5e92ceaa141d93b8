# SPDX-License-Identifier: Apache-2.0
"""Small names of SparseOperationKit 1.x."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class GraphKeys:
    """Names of graph collections. Nothing is collected under them: `model.trainable_variables` has the tables."""

    SparseOperationKitEmbeddingLayers = "SparseOperationKitEmbeddingLayers"
    SparseOperationKitOptimizer = "SparseOperationKitOptimizer"


class _Eager:
    """What stands for eager mode among graphs."""


_eager = _Eager()


def graph_of_variables() -> Any:
    """The graph in which variables that are made now live; in eager mode an object that stands for it."""
    with tf.init_scope():
        return _eager if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def in_tensorflow2() -> bool:
    """Whether TensorFlow behaves as 2.x: not in graphs of tf.compat.v1, as scripts for 1.15 make them."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions())
