# SPDX-License-Identifier: Apache-2.0
"""The layers of SparseOperationKit 1.x, as layers of the active Keras: `keras` 3, or tf_keras."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.arguments import COMBINERS
from sparse_operation_kit.tensorflow import keras_compat, layer_tables
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.legacy import variables
from sparse_operation_kit.tensorflow.legacy.dense import look_up
from sparse_operation_kit.tensorflow.legacy.initialize import ready
from sparse_operation_kit.tensorflow.legacy.keys import graph_of_variables
from sparse_operation_kit.tensorflow.legacy.scope import open_always
from sparse_operation_kit.tensorflow.lookup import all2all_dense_embedding, message_unless, pooled, together
from sparse_operation_kit.tensorflow.variable import Variable

_SPARSE = """Looks up and pools the keys of sparse features, slot by slot; all slots in one table.

    `sok.dist_model_parallel.DistributedEmbedding`, of many tables, is another class. New code: `sok.lookup_sparse`.

    Args:
      combiner: "mean", "sum" or "sqrtn", in any case.
      max_vocabulary_size_per_gpu: the rows that each of the N ranks holds.
      embedding_vec_size: elements a row.
      slot_num: slots a sample.
      max_nnz, max_feature_num: the most keys of a slot, and of a sample (1 means slot_num x max_nnz). Checked here and
        otherwise without effect: bags may be longer.
      use_hashtable: True: any value of key_dtype is a key, and takes a row when it is first looked up in training.
        False: keys are in [0, N x max_vocabulary_size_per_gpu). Either way key k is on rank k mod N.
      key_dtype: of the keys: "int64" (None), "uint32" or "int32".
      embedding_initializer: of the rows: None is uniform in [-0.05, 0.05), else as of `sok.Variable`; for a hash table
        one that draws each element by itself.
      table_name: names the table, its files and its initial rows. None: "EmbeddingVariable", "EmbeddingVariable_1", ...
        in the order in which layers are made.
      table_dtype: of the rows: tf.float32 (None), tf.float16 or tf.bfloat16.
      evict_strategy: of a hash table: what a full one gives up for new keys (see `sok.DynamicVariable`). None: it
        refuses them.
      **kwargs: as of a Keras layer (name, trainable, dtype).

    Call it with (inputs, training=True). inputs: a 2-D tf.SparseTensor or tf.RaggedTensor of key_dtype with
    batch x slot_num rows, row b x slot_num + s being slot s of sample b. It gives [batch, slot_num, embedding_vec_size]
    of the layer's compute dtype, zeros for an empty slot. With training=False a hash table inserts no keys: those that
    it lacks read their initial rows.

    All slots share the table: keys of different slots that are to be different have to be different numbers:

        ids = category + offsets[slot]  # offsets: the slots' vocabulary sizes, summed up

    `embedding_variable` (or `var`) is the table, among the layer's trainable variables. Its gradient is summed over
    the ranks, so divide the loss by the global batch.

    Raises:
      RuntimeError: before Init().
      ValueError: an unknown combiner, sizes out of range.
      TypeError: inputs of another kind, or another dtype than key_dtype.
      tf.errors.InvalidArgumentError: rows that are no multiple of slot_num; a key out of range.
      tf.errors.ResourceExhaustedError: more different keys than rows; nothing has changed.
    """

_DENSE = """Looks up one row for each key of dense features, all in one table. New code: `sok.all2all_dense_embedding`.

    Args:
      max_vocabulary_size_per_gpu, embedding_vec_size, use_hashtable, key_dtype, embedding_initializer, table_name,
        table_dtype, evict_strategy, **kwargs: as of `sok.DistributedEmbedding`.
      slot_num, nnz_per_slot: the shape of a sample.
      dynamic_input: whether inputs are vectors of any length instead.

    Call it with (inputs, training=True). inputs: [batch, slot_num, nnz_per_slot], or [n] with dynamic_input, of
    key_dtype. It gives inputs.shape + [embedding_vec_size] of the layer's compute dtype. Keys that repeat travel once,
    with or without tf.unique.

    Slots share the table, `embedding_variable` is it, and errors are as said of `sok.DistributedEmbedding`; ValueError
    or tf.errors.InvalidArgumentError for inputs of another shape.
    """

_PARALLEL = """A table of [vocabulary_size, embedding_vec_size], looked up by dense keys.

    In SparseOperationKit 1.x each replica held all of it and they gathered each other's keys and rows. Here it is a
    `sok.Variable` like any other, of which each rank holds its rows. It takes no `Init`: what that does happens where
    nobody has called it. Like the ordinary variable that it was, any optimizer steps it without OptimizerScope, and it
    is named "EmbeddingWeights", "EmbeddingWeights_1", ....

    Args:
      vocabulary_size, embedding_vec_size: the table's shape.
      initializer: a name or an object of Keras, or the table's rows as an array.
      comm_options: accepted; without effect.
      **kwargs: as of a Keras layer.

    Call it with int32 or int64 keys of any shape; it gives their shape + [embedding_vec_size]. `embedding_weights` is
    the table.

    Raises ValueError for rows of another shape; otherwise as `sok.Variable` and `sok.all2all_dense_embedding`.
    """

_classes: dict[Any, SimpleNamespace] = {}


def classes(keras: Any) -> SimpleNamespace:
    """The three layers as those of the given Keras: the module `keras`, `tf_keras` or `tf.keras`."""
    base = keras.layers.Layer
    if base not in _classes:
        _classes[base] = _make(keras)
    return _classes[base]


def _make(keras: Any) -> SimpleNamespace:

    class Embedding(keras.layers.Layer):  # type: ignore[misc]
        """A layer with one table, made with it."""

        _table: Any

        def _own(self, table: Any) -> None:
            layer_tables.prepare(self)
            self._table = table  # tf_keras finds it here
            keras_compat.track(self, table)
            self.built = True

        @property
        def output_dtype(self) -> Any:
            """The policy's compute dtype; float32 where there is no policy, as in tf_keras without TF 2's behaviour."""
            return self.compute_dtype or "float32"

        def build(self, *args: Any, **shapes: Any) -> None:
            """The table is there from the start."""

        def compute_output_shape(self, input_shape: Any) -> Any:
            return (*input_shape, self._table.placement.dimension)

        def compute_output_spec(self, inputs: Any, *args: Any, **options: Any) -> Any:
            return keras.KerasTensor(self.compute_output_shape(tuple(inputs.shape)), self.output_dtype)

        def save_own_variables(self, store: Any) -> None:
            layer_tables.save(store, {self._table.table_name: self._table})

        def load_own_variables(self, store: Any) -> None:
            layer_tables.load(store, {self._table.table_name: self._table})

    class Slots(Embedding):
        """What the two layers of slots have in common."""

        def _prepare(self, slot_num: int, **arguments: Any) -> None:
            if slot_num < 1:
                raise ValueError(f"slot_num must be 1 at least, got {slot_num}")
            initializer = arguments["embedding_initializer"]
            table = variables.make(
                arguments["max_vocabulary_size_per_gpu"],
                arguments["embedding_vec_size"],
                arguments["use_hashtable"],
                arguments["key_dtype"],
                initializer,
                arguments["table_dtype"],
                arguments["table_name"],
                self.trainable,
                arguments["evict_strategy"],
            )
            arguments.update(
                slot_num=slot_num,
                key_dtype=table.key_dtype.name,
                embedding_initializer=_plain(keras, initializer),
                table_dtype=table.dtype.name,
                table_name=table.table_name,
            )
            self._arguments = arguments
            self.slot_num = slot_num
            self._own(table)

        @property
        def embedding_variable(self) -> Any:
            """The table."""
            return self._table

        var = embedding_variable

        def __call__(self, inputs: Any, *training: Any, **options: Any) -> Any:
            # By position too; Keras 3 takes its own arguments by name alone.
            return super().__call__(inputs, **dict(zip(["training"], training, strict=False)), **options)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), **self._arguments}

    @keras.utils.register_keras_serializable(package="sparse_operation_kit.legacy")
    class DistributedEmbedding(Slots):
        __doc__ = _SPARSE

        def __init__(
            self,
            combiner: str,
            max_vocabulary_size_per_gpu: int,
            embedding_vec_size: int,
            slot_num: int,
            max_nnz: int,
            max_feature_num: int = 1,
            use_hashtable: bool = True,
            key_dtype: Any = None,
            embedding_initializer: Any = None,
            *,
            table_name: str | None = None,
            table_dtype: Any = None,
            evict_strategy: str | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(**kwargs)
            self.combiner = str(combiner).lower()
            if self.combiner not in COMBINERS:
                raise ValueError(f"combiner must be one of {', '.join(COMBINERS)}, got {combiner!r}")
            if max_nnz < 1 or not 1 <= max_feature_num <= slot_num * max_nnz:
                raise ValueError(
                    f"max_nnz must be 1 at least and max_feature_num in [1, slot_num x max_nnz = {slot_num * max_nnz}],"
                    f" got {max_nnz} and {max_feature_num}"
                )
            self._prepare(
                slot_num,
                combiner=self.combiner,
                max_vocabulary_size_per_gpu=max_vocabulary_size_per_gpu,
                embedding_vec_size=embedding_vec_size,
                max_nnz=max_nnz,
                max_feature_num=max_feature_num,
                use_hashtable=bool(use_hashtable),
                key_dtype=key_dtype,
                embedding_initializer=embedding_initializer,
                table_name=table_name,
                table_dtype=table_dtype,
                evict_strategy=evict_strategy,
            )

        def call(self, inputs: Any, training: Any = True) -> Any:
            """See the class."""
            return self._vectors(inputs, training)  # Keras has to see the parameters of `call`

        @as_written
        def _vectors(self, inputs: Any, training: Any) -> Any:
            table = self._table
            with together([table]):
                if not isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor)):
                    raise TypeError(
                        f"table '{table.table_name}': inputs must be a tf.SparseTensor or a tf.RaggedTensor, got a "
                        f"{type(inputs).__name__}"
                    )
                ids = inputs.with_values(_keys(table, inputs.values))
                rows = tf.shape(ids, tf.int64)[0] if isinstance(ids, tf.SparseTensor) else ids.nrows(tf.int64)
                what = f"table '{table.table_name}': inputs must have a multiple of {self.slot_num} rows, slot_num"
                message = message_unless(tf.equal(rows % self.slot_num, 0), lambda: tf.constant(what))
                known = _known(table, training)
            (vectors,) = pooled([table], [ids], None, [self.combiner], training=known, messages=[message])
            result = tf.reshape(vectors, [-1, self.slot_num, table.placement.dimension])
            return tf.cast(result, self.output_dtype)

        def compute_output_shape(self, input_shape: Any) -> Any:
            rows = input_shape[0]
            batch = None if rows is None else rows // self.slot_num
            return (batch, self.slot_num, self._table.placement.dimension)

    @keras.utils.register_keras_serializable(package="sparse_operation_kit.legacy")
    class All2AllDenseEmbedding(Slots):
        __doc__ = _DENSE

        def __init__(
            self,
            max_vocabulary_size_per_gpu: int,
            embedding_vec_size: int,
            slot_num: int,
            nnz_per_slot: int,
            dynamic_input: bool = False,
            use_hashtable: bool = True,
            key_dtype: Any = None,
            embedding_initializer: Any = None,
            *,
            table_name: str | None = None,
            table_dtype: Any = None,
            evict_strategy: str | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(**kwargs)
            if nnz_per_slot < 1:
                raise ValueError(f"nnz_per_slot must be 1 at least, got {nnz_per_slot}")
            self.nnz_per_slot = nnz_per_slot
            self.dynamic_input = bool(dynamic_input)
            self._prepare(
                slot_num,
                max_vocabulary_size_per_gpu=max_vocabulary_size_per_gpu,
                embedding_vec_size=embedding_vec_size,
                nnz_per_slot=nnz_per_slot,
                dynamic_input=self.dynamic_input,
                use_hashtable=bool(use_hashtable),
                key_dtype=key_dtype,
                embedding_initializer=embedding_initializer,
                table_name=table_name,
                table_dtype=table_dtype,
                evict_strategy=evict_strategy,
            )

        def call(self, inputs: Any, training: Any = True) -> Any:
            """See the class."""
            return self._vectors(inputs, training)  # Keras has to see the parameters of `call`

        @as_written
        def _vectors(self, inputs: Any, training: Any) -> Any:
            table = self._table
            with together([table]):
                if isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor)):
                    raise TypeError(f"table '{table.table_name}': inputs must be dense, got a {type(inputs).__name__}")
                keys = _keys(table, inputs)
                shape = [None] if self.dynamic_input else [None, self.slot_num, self.nnz_per_slot]
                if not keys.shape.is_compatible_with(shape):
                    raise ValueError(
                        f"table '{table.table_name}': inputs must be {shape} (dynamic_input={self.dynamic_input}), got "
                        f"{keys.shape}"
                    )
                keys = tf.ensure_shape(keys, shape)
                known = _known(table, training)
            (result,) = look_up([table], [keys], training=known)
            return tf.cast(result, self.output_dtype)

    @keras.utils.register_keras_serializable(package="sparse_operation_kit.legacy")
    class TFDistributedEmbedding(Embedding):
        __doc__ = _PARALLEL

        def __init__(
            self,
            vocabulary_size: int,
            embedding_vec_size: int,
            initializer: Any = "GlorotNormal",
            comm_options: Any = None,
            **kwargs: Any,
        ) -> None:
            del comm_options
            super().__init__(**kwargs)
            ready()
            shape = (vocabulary_size, embedding_vec_size)
            rows = None if isinstance(initializer, (str, Mapping)) or callable(initializer) else np.asarray(initializer)
            if rows is not None and rows.shape != shape:
                raise ValueError(f"the initial rows must be {list(shape)}, got {list(rows.shape)}")
            self._arguments = {
                "vocabulary_size": vocabulary_size,
                "embedding_vec_size": embedding_vec_size,
                "initializer": "zeros" if rows is not None else _plain(keras, initializer),
            }
            options: dict[str, Any] = {"name": variables.new_name("EmbeddingWeights"), "trainable": self.trainable}
            if rows is None:
                made = Variable(shape=shape, initializer=keras.initializers.get(initializer), **options)
            else:
                made = Variable(rows, dtype=tf.float32, **options)
            open_always(made)
            self._own(made)

        @property
        def embedding_weights(self) -> Any:
            """The table."""
            return self._table

        def call(self, inputs: Any) -> Any:
            """See the class."""
            return tf.cast(all2all_dense_embedding(self._table, inputs), self.output_dtype)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), **self._arguments}

    made = (DistributedEmbedding, All2AllDenseEmbedding, TFDistributedEmbedding)
    for cls in made:
        cls.__module__, cls.__qualname__ = __name__, cls.__name__
    return SimpleNamespace(**{cls.__name__: cls for cls in made})


def _plain(keras: Any, initializer: Any) -> Any:
    """An initializer in a layer's configuration; one that Keras cannot write down is left out of it."""
    if initializer is None or isinstance(initializer, (str, int, float, Mapping)):
        return initializer
    return keras.initializers.serialize(initializer) if hasattr(initializer, "get_config") else None


def _keys(table: Any, inputs: Any) -> tf.Tensor:
    """Keys as the table takes them; TypeError for another dtype than its key_dtype."""
    wanted: tf.DType = table.key_dtype
    typed = tf.is_tensor(inputs) or hasattr(inputs, "dtype")
    keys = tf.convert_to_tensor(inputs if typed else np.asarray(inputs))
    if not typed and keys.dtype in (tf.int32, tf.int64):  # numbers of Python have no dtype
        keys = tf.convert_to_tensor(inputs, wanted)
    if keys.dtype != wanted:
        raise TypeError(
            f"table '{table.table_name}': inputs are {keys.dtype.name}, and the layer's key_dtype is {wanted.name}"
        )
    return tf.cast(keys, tf.int64) if wanted == tf.uint32 else keys


def _known(table: Any, training: Any) -> bool:
    """`training` as a bool: what is inserted is decided when a function is traced."""
    if training is None:
        return True
    value = tf.get_static_value(training) if tf.is_tensor(training) else training
    if value is not None:
        return bool(value)
    if isinstance(table, variables.HashEmbeddingVariable):
        raise TypeError(f"table '{table.table_name}': training must be True or False, got the tensor {training}")
    return True


_stores: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def get_embedding(name: str, constructor: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """The layer of that name in the current graph, or in eager mode; constructor(**kwargs) makes it the first time.

    Raises ValueError for a name that is not known without a constructor.
    """
    store = _stores.setdefault(graph_of_variables(), {})
    if name not in store:
        if constructor is None:
            raise ValueError(f"there is no embedding layer {name!r}, and no constructor was given to make it")
        store[name] = constructor(**kwargs)
    return store[name]


def __getattr__(name: str) -> Any:
    if name in ("All2AllDenseEmbedding", "DistributedEmbedding", "TFDistributedEmbedding"):
        _ = tf.keras.layers  # tf.keras is a lazy stand-in until its first use
        return getattr(classes(tf.keras), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
