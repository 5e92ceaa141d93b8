# SPDX-License-Identifier: Apache-2.0
"""Hybrid parallelism: embedding tables spread over the processes beside data-parallel layers.

The names, placements and shapes are those of NVIDIA-Merlin's distributed-embeddings:

    from sparse_operation_kit.tensorflow import dist_model_parallel as dmp

    tables = [tf.keras.layers.Embedding(rows, width) for rows, width in sizes]
    embedding = dmp.DistributedEmbedding(tables, strategy="memory_balanced")
    with tf.GradientTape() as tape:
        loss = model(embedding(inputs))  # a list of inputs, this process's samples of each
    tape = dmp.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

Layers are those of `tf.keras`, Keras 3 or tf_keras; `layers_of(tf_keras)` gives those of a Keras by name. See
docs/HYBRID.md.
"""

from __future__ import annotations

import types
from typing import Any

from sparse_operation_kit.hybrid import DistEmbeddingStrategy, Plan
from sparse_operation_kit.tensorflow.dist_model_parallel.embedding_ops import embedding_lookup
from sparse_operation_kit.tensorflow.dist_model_parallel.inputs import dp_to_mp_input as _dp_to_mp_input  # noqa: F401
from sparse_operation_kit.tensorflow.dist_model_parallel.planning import plan
from sparse_operation_kit.tensorflow.dist_model_parallel.training import (
    DistributedGradientTape,
    DistributedOptimizer,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "ConcatOneHotEmbedding",
    "DistEmbeddingStrategy",
    "DistributedEmbedding",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Embedding",
    "IntegerLookup",
    "Plan",
    "broadcast_variables",
    "embedding_lookup",
    "layers_of",
    "plan",
]

_known: dict[Any, types.SimpleNamespace] = {}


def layers_of(keras: Any) -> types.SimpleNamespace:
    """The layers and the callback of this module for a Keras: the module `keras`, `tf_keras` or `tf.keras`.

    `Embedding`, `ConcatOneHotEmbedding`, `IntegerLookup`, `DistributedEmbedding`, `BroadcastGlobalVariablesCallback`.
    """
    from sparse_operation_kit.tensorflow.dist_model_parallel import embedding, integer_lookup, layer, training

    base = keras.layers.Layer
    if base not in _known:
        _known[base] = types.SimpleNamespace(
            Embedding=embedding.make_embedding(keras),
            ConcatOneHotEmbedding=embedding.make_concat_one_hot(keras),
            IntegerLookup=integer_lookup.make_integer_lookup(keras),
            DistributedEmbedding=layer.make_distributed_embedding(keras),
            BroadcastGlobalVariablesCallback=training.make_callback(keras),
        )
    return _known[base]


def __getattr__(name: str) -> Any:
    # Layers: Keras is imported only by those who use them.
    if name in __all__:
        import tensorflow as tf

        _ = tf.keras.layers  # tf.keras is a lazy stand-in until its first use
        return getattr(layers_of(tf.keras), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
