# SPDX-License-Identifier: Apache-2.0
"""IntegerLookup: a vocabulary that grows as keys appear, as a layer of either Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import keras_compat
from sparse_operation_kit.tensorflow._autograph import as_written


def make_integer_lookup(keras: Any) -> Any:
    """IntegerLookup as a layer of the given Keras."""

    @keras.utils.register_keras_serializable(package="sparse_operation_kit")
    class IntegerLookup(keras.layers.Layer):  # type: ignore[misc]
        """Numbers keys from 1 on in the order in which they first appear in a flattened batch; 0 is for what is
        unknown when the vocabulary is full.

        Args:
          max_tokens: how many keys get a number. An embedding of the numbers has max_tokens + 1 rows.
          use_gpu: accepted because distributed-embeddings has it; the vocabulary is where the layer is made.
          **kwargs: as of a Keras layer.

        Call it with int32 or int64 keys of any shape, any values: it returns int64 numbers of the same shape. With
        `training=False` new keys give 0 and are not learnt. `count` [max_tokens + 1] int64 says how often each number
        was given, those of evaluation too. Each process has a vocabulary of its own.

        The vocabulary is a weight of the layer: it is saved and restored with the model.

        Raises:
          ValueError: max_tokens that is not positive. TypeError: keys that are no integers.
        """

        def __init__(self, max_tokens: int, use_gpu: bool = True, **kwargs: Any) -> None:
            max_tokens = int(max_tokens)
            if max_tokens <= 0:
                raise ValueError(f"max_tokens should be positive, found {max_tokens}")
            kwargs["dtype"], kwargs["autocast"] = "int64", False
            super().__init__(**kwargs)
            keras_compat.take_any_input(self)
            self.max_tokens, self.use_gpu = max_tokens, use_gpu

            def zeros(name: str, *shape: int) -> Any:
                return keras_compat.add_weight(self, name, shape, "zeros", dtype="int64", trainable=False)

            self.table = zeros("table", 2, max_tokens)  # keys, ascending, and their numbers; as many as `size` says
            self.size = zeros("size")
            self.count = zeros("count", max_tokens + 1)
            self.built = True

        def build(self, input_shape: Any = None) -> None:
            """The vocabulary is there from the start."""

        @as_written
        def call(self, inputs: Any, training: Any = None) -> Any:
            """See the class."""
            keys = tf.convert_to_tensor(inputs)
            if not keys.dtype.is_integer:
                raise TypeError(f"keys must be integers, got {keys.dtype.name}")
            flat = tf.reshape(tf.cast(keys, tf.int64), [-1])
            different, places = tf.unique(flat, tf.int64)
            if training is None or training is True:
                self._learn(different)
            elif training is not False:
                tf.cond(training, lambda: self._learn(different), lambda: None)
            numbers = tf.gather(self._numbers(different), places)
            count = keras_compat.raw(self.count)
            count.scatter_add(tf.IndexedSlices(tf.ones_like(numbers), numbers))
            return tf.reshape(numbers, tf.shape(keys))

        def _numbers(self, different: tf.Tensor) -> tf.Tensor:
            """The number of each key, 0 where it has none."""
            size = keras_compat.raw(self.size).read_value()
            table = keras_compat.raw(self.table).read_value()
            known = table[0, :size]
            where = tf.minimum(tf.searchsorted(known, different, out_type=tf.int64), tf.maximum(size - 1, 0))
            found = tf.logical_and(size > 0, tf.gather(table[0], where) == different)
            return tf.where(found, tf.gather(table[1], where), tf.zeros_like(where))

        def _learn(self, different: tf.Tensor) -> None:
            """Gives numbers to the keys that have none, in order, as long as there is room."""
            size = keras_compat.raw(self.size)
            new = tf.boolean_mask(different, self._numbers(different) == 0)[: self.max_tokens - size.read_value()]
            tf.cond(tf.size(new) > 0, lambda: self._merge(new), lambda: None)

        def _merge(self, new: tf.Tensor) -> None:
            size, table = keras_compat.raw(self.size), keras_compat.raw(self.table)
            before, more = size.read_value(), tf.size(new, tf.int64)
            order = tf.argsort(new, stable=True)
            new = tf.gather(new, order)
            known = table.read_value()[:, :before]
            # Both are ascending, so a key comes to stand behind all smaller ones of its own list and of the other.
            to_new = tf.range(more) + tf.searchsorted(known[0], new, out_type=tf.int64)
            to_known = tf.range(before) + tf.searchsorted(new, known[0], out_type=tf.int64)
            keys = tf.concat([known[0], new], 0)
            numbers = tf.concat([known[1], before + 1 + tf.cast(order, tf.int64)], 0)
            places = tf.concat([to_known, to_new], 0)[:, tf.newaxis]
            whole = tf.scatter_nd(places, tf.stack([keys, numbers], 1), [before + more, 2])
            table[:, : before + more].assign(tf.transpose(whole))
            size.assign(before + more)

        def get_vocabulary(self) -> list[int]:
            """The keys by their numbers, after -1, which stands for what is unknown."""
            size = int(keras_compat.raw(self.size).numpy())
            keys, numbers = keras_compat.raw(self.table).numpy()[:, :size]
            vocabulary = dict(zip(numbers.tolist(), keys.tolist(), strict=True))
            return [-1, *(vocabulary[number] for number in range(1, size + 1))]

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape

        def get_config(self) -> dict[str, Any]:
            config = {**super().get_config(), "max_tokens": self.max_tokens, "use_gpu": self.use_gpu}
            del config["dtype"]
            return config

    return IntegerLookup
