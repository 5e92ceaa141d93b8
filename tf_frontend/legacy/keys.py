# SPDX-License-Identifier: Apache-2.0
"""Small names of SparseOperationKit 1.x."""

from __future__ import annotations


class GraphKeys:
    """Names of graph collections. Nothing is collected under them: `model.trainable_variables` has the tables."""

    SparseOperationKitEmbeddingLayers = "SparseOperationKitEmbeddingLayers"
    SparseOperationKitOptimizer = "SparseOperationKitOptimizer"


def in_tensorflow2() -> bool:
    """Whether TensorFlow is 2.x; it is."""
    return True
