# SPDX-License-Identifier: Apache-2.0
"""Embedding and ConcatOneHotEmbedding: layers of either Keras whose one weight this process holds whole."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import devices, keras_compat
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.dist_model_parallel.embedding_ops import (
    check_combiner,
    dense_lookup,
    embedding_lookup,
)
from sparse_operation_kit.tensorflow.dist_model_parallel.inputs import as_ids

_NOT_OURS = ("mask_zero", "input_length", "batch_input_shape", "quantization_config")
"""What configs of Keras's own Embedding have besides."""


def clean(config: dict[str, Any]) -> dict[str, Any]:
    """The config of an Embedding of Keras 3, of tf_keras or of this package as this package's Embedding takes it."""
    if config.get("mask_zero"):
        warnings.warn(
            f"the embedding {config.get('name')!r} has mask_zero=True: this layer makes no mask, and looks 0 up as any "
            "id",
            stacklevel=3,
        )
    config = {name: value for name, value in config.items() if name not in _NOT_OURS}
    if "dtype" in config:
        config["dtype"] = keras_compat.policy_name(config["dtype"])
    return config


def make_embedding(keras: Any) -> Any:
    """Embedding as a layer of the given Keras."""

    @keras.utils.register_keras_serializable(package="sparse_operation_kit")
    class Embedding(keras.layers.Layer):  # type: ignore[misc]
        """An embedding table and a combiner.

        Args:
          input_dim, output_dim: rows and width.
          embeddings_initializer, embeddings_regularizer, activity_regularizer, embeddings_constraint: as of Keras's own
            Embedding. Initial values are drawn on the CPU.
          combiner: None, "sum" or "mean": over the last dimension of the ids.
          use_custom_kernel: accepted because distributed-embeddings has it; ignored.
          **kwargs: as of a Keras layer, and `weights=[array]`.

        Call it with ids, int32 or int64 (others are cast). Without a combiner a tensor of any shape gives ids.shape +
        [output_dim] and a `tf.RaggedTensor` [n, None] a ragged [n, None, output_dim]; with one a tensor of two
        dimensions or more, a ragged or a `tf.SparseTensor` of two give all but the last, + [output_dim]. An empty bag
        gives zeros. The output has the dtype of the weight, `embeddings` [input_dim, output_dim].

        `build()` needs no input shape, and `set_weights` builds.

        Raises:
          ValueError: input_dim or output_dim that is not positive; an unknown combiner; ids of one dimension with a
            combiner, ragged ones of more than two, sparse ones without a combiner.
          tf.errors.InvalidArgumentError: an id outside [0, input_dim).
        """

        def __init__(
            self,
            input_dim: int,
            output_dim: int,
            embeddings_initializer: Any = "uniform",
            embeddings_regularizer: Any = None,
            activity_regularizer: Any = None,
            embeddings_constraint: Any = None,
            combiner: str | None = None,
            use_custom_kernel: bool = True,
            **kwargs: Any,
        ) -> None:
            if input_dim <= 0 or output_dim <= 0:
                raise ValueError(
                    f"Both input_dim and output_dim should be positive, found {input_dim} and {output_dim}"
                )
            check_combiner(combiner)
            self._given_weights = kwargs.pop("weights", None)
            kwargs.setdefault("autocast", False)
            super().__init__(activity_regularizer=activity_regularizer, **kwargs)
            keras_compat.take_any_input(self)
            self.input_dim, self.output_dim = int(input_dim), int(output_dim)
            self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
            self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
            self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
            self.combiner = combiner
            self.use_custom_kernel = use_custom_kernel

        def build(self, input_shape: Any = None) -> None:
            if hasattr(self, "embeddings"):
                return
            self.embeddings = keras_compat.add_weight(
                self,
                "embeddings",
                (self.input_dim, self.output_dim),
                _on_cpu(self.embeddings_initializer),
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )
            self.built = True
            if self._given_weights is not None:
                super().set_weights(self._given_weights)

        def set_weights(self, weights: Any) -> None:
            self.build()
            super().set_weights(weights)

        @as_written
        def call(self, inputs: Any, training: Any = None) -> Any:
            """See the class."""
            ids = as_ids(inputs)
            if isinstance(ids, tf.RaggedTensor) and (ids.ragged_rank != 1 or ids.values.shape.rank != 1):
                raise ValueError(f"Ragged input should be 2D. Got the shape {ids.shape}")
            if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
                return embedding_lookup(self.embeddings, ids, self.combiner)
            if self.combiner is not None and ids.shape.rank == 1:
                raise ValueError(
                    "1D input with combiner is ambiguous. Please make it [batch, 1] or [1, ids], or take no combiner."
                )
            return dense_lookup(keras_compat.raw(self.embeddings), ids, self.combiner)

        def compute_output_shape(self, input_shape: Any) -> Any:
            shape = tuple(input_shape)
            return (*(shape if self.combiner is None else shape[:-1]), self.output_dim)

        def get_config(self) -> dict[str, Any]:
            return {
                **super().get_config(),
                "input_dim": self.input_dim,
                "output_dim": self.output_dim,
                "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
                "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
                "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
                "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
                "combiner": self.combiner,
                "use_custom_kernel": self.use_custom_kernel,
            }

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls(**clean(config))

    return Embedding


def _on_cpu(initializer: Any) -> Any:
    def draw(shape: Any, dtype: Any = None, **options: Any) -> Any:
        with tf.device(devices.HOST):
            return initializer(shape, dtype=dtype, **options)

    return draw


def make_concat_one_hot(keras: Any) -> Any:
    """ConcatOneHotEmbedding as a layer of the given Keras."""

    @keras.utils.register_keras_serializable(package="sparse_operation_kit")
    class ConcatOneHotEmbedding(keras.layers.Layer):  # type: ignore[misc]
        """Several tables of one width in one weight, `params` [sum of feature_sizes, embedding_width].

        Args:
          feature_sizes: the rows of each table.
          embedding_width: their width.
          **kwargs: as of a Keras layer.

        Call it with int32 or int64 ids [n, tables], a column a table; it returns [n, tables, embedding_width].

        Raises:
          ValueError: no tables, sizes that are not positive; another number of columns.
          tf.errors.InvalidArgumentError: an id outside all tables. That it is in another one's rows is not found.
        """

        def __init__(self, feature_sizes: Sequence[int], embedding_width: int, **kwargs: Any) -> None:
            sizes = [int(size) for size in feature_sizes]
            if not sizes or min(sizes) <= 0 or embedding_width <= 0:
                raise ValueError(f"sizes and width should be positive, found {sizes} and {embedding_width}")
            kwargs.setdefault("dtype", "float32")
            kwargs.setdefault("autocast", False)
            super().__init__(**kwargs)
            keras_compat.take_any_input(self)
            self.feature_sizes, self.embedding_width = sizes, int(embedding_width)
            self._first = [sum(sizes[:i]) for i in range(len(sizes))]
            self.params = keras_compat.add_weight(
                self, "params", (sum(sizes), self.embedding_width), keras.initializers.get("glorot_uniform")
            )
            self.built = True

        def build(self, input_shape: Any = None) -> None:
            """The weight is there from the start."""

        @as_written
        def call(self, inputs: Any, training: Any = None) -> Any:
            """See the class."""
            ids = as_ids(inputs)
            if ids.shape.rank != 2 or ids.shape[1] != len(self._first):
                raise ValueError(f"ids must be [n, {len(self._first)}], a column a table; got the shape {ids.shape}")
            return dense_lookup(keras_compat.raw(self.params), ids + tf.constant(self._first, ids.dtype), None)

        def compute_output_shape(self, input_shape: Any) -> Any:
            return (*tuple(input_shape), self.embedding_width)

        def get_config(self) -> dict[str, Any]:
            return {
                **super().get_config(),
                "feature_sizes": self.feature_sizes,
                "embedding_width": self.embedding_width,
            }

    return ConcatOneHotEmbedding
