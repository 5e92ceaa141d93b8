# SPDX-License-Identifier: Apache-2.0
"""The DLRM in TensorFlow: model, optimizer, one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

from . import columns, dense_file
from .architecture import Architecture, Layer
from .devices import choose_gpu
from .features import Batch
from .keyed_ids import KeyedIds
from .settings import ADAGRAD_ACCUMULATOR, ADAGRAD_EPSILON, Settings

CPU = "CPU:0"
_COLUMNS = len(columns.CATEGORICAL)
_DENSE = tf.TensorSpec([None, len(columns.DENSE)], tf.float32)
_LABELS = tf.TensorSpec([None], tf.float32)
_GLOBAL_ROWS = tf.TensorSpec([], tf.float32)
_IDS = tf.TensorSpec([None], tf.int64)  # those of all columns; and the offsets of their bags

Prepared = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]
"""A batch where the model is: labels, rows of the global batch, dense features, ids, offsets."""


class Dlrm:
    """Embedding tables sharded over the ranks, between two dense networks that every rank has whole."""

    def __init__(self, architecture: Architecture, settings: Settings, *, on_gpu: bool) -> None:
        sizes = zip(columns.CATEGORICAL, settings.table_rows(), strict=True)
        tables = {name: _table(rows, settings) for name, rows in sizes}
        self.tables = sok.EmbeddingBagCollection(tables, combiners="sum", initializer="uniform", concat=True)
        policy = "mixed_bfloat16" if settings.precision == "bfloat16" else "float32"
        self.bottom = _mlp(architecture.bottom_layers(settings.seed), policy, on_gpu, last_is_linear=False)
        self.top = _mlp(architecture.top_layers(settings.seed), policy, on_gpu, last_is_linear=True)
        self.pairs = tf.constant(architecture.pairs)
        self.places_of_pairs = tf.constant(architecture.places_of_pairs)
        self._logits = tf.function(self._interact, jit_compile=True) if settings.compiled else self._interact

    @property
    def table_variables(self) -> list[tf.Variable]:
        """Of the tables."""
        variables: list[tf.Variable] = self.tables.trainable_variables
        return variables

    @property
    def dense_variables(self) -> list[tf.Variable]:
        """Of the dense layers."""
        return [*self.bottom.trainable_variables, *self.top.trainable_variables]

    def __call__(self, dense: tf.Tensor, ids: KeyedIds[tf.Tensor], *, training: bool) -> tf.Tensor:
        """Logits [n] of rows with dense features [n, 13] and the ids of 26 columns."""
        logits: tf.Tensor = self._logits(dense, self.tables(ids, training=training))
        return logits

    def _interact(self, dense: tf.Tensor, embedded: tf.Tensor) -> tf.Tensor:
        """embedded: the vectors of all columns, side by side."""
        bottom = self.bottom(dense)
        embedded = tf.cast(embedded, bottom.dtype)
        vectors = tf.reshape(tf.concat([bottom, embedded], axis=1), [-1, _COLUMNS + 1, bottom.shape[1]])
        products = tf.matmul(vectors, vectors, transpose_b=True)
        flat = tf.reshape(products, [-1, (_COLUMNS + 1) ** 2])
        features = tf.concat([bottom, _pick(flat, self.pairs, self.places_of_pairs)], axis=1)
        return tf.cast(tf.squeeze(self.top(features), axis=1), tf.float32)


def _table(rows: int | None, settings: Settings) -> Any:
    """What a collection makes a table of."""
    if rows is None:
        return {"dimension": settings.embedding_dim, "initializer": "uniform", "max_capacity": settings.max_table_rows}
    return rows, settings.embedding_dim


class TensorflowModel:
    """The model on this rank, with its optimizer. Implements training.Model."""

    def __init__(self, settings: Settings, device: str) -> None:
        self._device = device
        tf.config.experimental.enable_tensor_float_32_execution(settings.precision == "tf32")
        self._model = Dlrm(settings.architecture(), settings, on_gpu=device != CPU)
        self._optimizer = sok.OptimizerWrapper(_optimizer(settings))
        self._optimizer.optimizer.build(self._model.dense_variables)
        # XLA makes a kernel or two of a hundred small ones of Keras. tf_keras's optimizers do this by themselves.
        self._update_dense = tf.function(self._apply_dense, jit_compile=device != CPU)

    def prepare(self, batch: Batch) -> Prepared:
        """See training.Model."""
        arrays = (batch.labels, np.float32(batch.global_rows), batch.dense, batch.ids.values(), batch.ids.offsets())
        labels, global_rows, dense, ids, offsets = (sok.copy_to_gpu(array, self._device) for array in arrays)
        return labels, global_rows, dense, ids, offsets

    def train(self, batch: Prepared) -> SupportsFloat:
        """See training.Model."""
        total: SupportsFloat = self._train(*batch)
        return total

    def logits(self, batch: Prepared) -> npt.NDArray[np.float32]:
        """See training.Model."""
        logits: npt.NDArray[np.float32] = self._logits(*batch[2:]).numpy()
        return logits

    def dump(self, folder: Path, step: int) -> None:
        """See training.Model."""
        if sok.rank() == 0:
            dense_file.save(folder, step, {name: array.numpy() for name, array in self._dense().items()})
        sok.dump(dense_file.tables(folder), self._tables(), self._optimizer, step=step, progress=False)

    def load(self, folder: Path) -> int:
        """See training.Model."""
        found = sok.load(dense_file.tables(folder), self._tables(), self._optimizer, progress=False)
        arrays = dense_file.load(folder, found.step)
        for name, variable in self._dense().items():
            variable.assign(arrays[name])
        return found.step or 0

    def _tables(self) -> list[Any]:
        return list(self._model.tables.tables.values())

    def _dense(self) -> dict[str, tf.Variable]:
        """The dense layers and what the optimizer keeps for them, by name."""
        named = {}
        for part, layers in (("bottom", self._model.bottom.layers), ("top", self._model.top.layers)):
            for place, layer in enumerate(layers):
                named.update({f"{part}.{place}.kernel": layer.kernel, f"{part}.{place}.bias": layer.bias})
        optimizer = self._optimizer.optimizer
        # Its first two variables are the step count, which is sok.dump's, and the learning rate.
        accumulators = zip(list(named), optimizer.variables[2:], strict=False)
        return named | {f"{name}.accumulator": state for name, state in accumulators}

    @tf.function(input_signature=(_LABELS, _GLOBAL_ROWS, _DENSE, _IDS, _IDS))
    def _train(
        self, labels: tf.Tensor, global_rows: tf.Tensor, dense: tf.Tensor, ids: tf.Tensor, offsets: tf.Tensor
    ) -> tf.Tensor:
        # Averages the gradients of the dense layers over the ranks, and leaves those of the tables to sok.
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            logits = self._model(dense, _keyed(ids, offsets), training=True)
            total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
            # The average of this over the ranks is the mean over the global batch, however its rows are spread.
            loss = total * (sok.num_ranks() / global_rows)
        tables, dense_layers = self._model.table_variables, self._model.dense_variables
        of_tables, of_dense_layers = tape.gradient(loss, [tables, dense_layers])
        self._optimizer.apply_gradients(zip(of_tables, tables, strict=True))
        self._update_dense(of_dense_layers)
        return total

    def _apply_dense(self, gradients: list[tf.Tensor]) -> None:
        self._optimizer.optimizer.apply(gradients, self._model.dense_variables)

    @tf.function(input_signature=(_DENSE, _IDS, _IDS))
    def _logits(self, dense: tf.Tensor, ids: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
        return self._model(dense, _keyed(ids, offsets), training=False)


class Dense(tf.keras.layers.Dense):  # type: ignore[misc]
    """Keras's, with no activation or ReLU. On a GPU XLA makes one kernel of bias and activation and one of their
    gradients: TensorFlow's own gradient of a bias takes longer there than all products of matrices together.
    """

    def __init__(self, units: int, *, is_relu: bool, on_gpu: bool, dtype: str) -> None:
        super().__init__(units, activation="relu" if is_relu else None, dtype=dtype)
        self._is_relu = is_relu
        self._forward, self._backward = _COMPILED if on_gpu else _AS_THEY_ARE

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """See Keras."""

        @tf.custom_gradient
        def activated(product: tf.Tensor, bias: tf.Tensor) -> Any:
            values = self._forward(product, bias, self._is_relu)
            return values, lambda upstream: self._backward(upstream, values, self._is_relu)

        product = tf.matmul(inputs, tf.convert_to_tensor(self.kernel))
        result: tf.Tensor = activated(product, tf.convert_to_tensor(self.bias))
        return result


def _forward(product: tf.Tensor, bias: tf.Tensor, is_relu: bool) -> tf.Tensor:
    values = product + bias
    return tf.nn.relu(values) if is_relu else values


def _backward(upstream: tf.Tensor, values: tf.Tensor, is_relu: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """The gradients of the product and of the bias, from that of the values."""
    if is_relu:
        upstream = tf.where(values > 0, upstream, tf.zeros([], upstream.dtype))
    return upstream, tf.cast(tf.reduce_sum(tf.cast(upstream, tf.float32), axis=0), upstream.dtype)


_AS_THEY_ARE = (_forward, _backward)
_COMPILED = tuple(tf.function(function, jit_compile=True) for function in _AS_THEY_ARE)


@tf.custom_gradient
def _pick(values: tf.Tensor, columns_: tf.Tensor, places: tf.Tensor) -> Any:
    """tf.gather of different columns, whose own gradient transposes twice and adds up by atomic operations. places: of
    each column of the values its number among those, or how many these are.
    """

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None, None]:
        return tf.gather(tf.pad(upstream, [[0, 0], [0, 1]]), places, axis=1), None, None

    return tf.gather(values, columns_, axis=1), gradient


def _mlp(layers: list[Layer], policy: str, on_gpu: bool, *, last_is_linear: bool) -> tf.keras.Sequential:
    model = tf.keras.Sequential()
    for place, layer in enumerate(layers):
        inputs, outputs = layer.kernel.shape
        is_relu = place < len(layers) - last_is_linear
        dense = Dense(outputs, is_relu=is_relu, on_gpu=on_gpu, dtype=policy)
        dense.build([None, inputs])
        dense.set_weights([layer.kernel, layer.bias])
        model.add(dense)
    return model


def _optimizer(settings: Settings) -> tf.keras.optimizers.Optimizer:
    if settings.optimizer == "sgd":
        return tf.keras.optimizers.SGD(settings.learning_rate)
    return tf.keras.optimizers.Adagrad(
        settings.learning_rate, initial_accumulator_value=ADAGRAD_ACCUMULATOR, epsilon=ADAGRAD_EPSILON
    )


def _keyed(ids: tf.Tensor, offsets: tf.Tensor) -> KeyedIds[tf.Tensor]:
    return KeyedIds(columns.CATEGORICAL, ids, offsets)


def use_threads(threads: int) -> None:
    """Before TensorFlow runs its first op."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def choose_device(device: str, local_rank: int, local_ranks: int) -> tuple[int | None, str]:
    """The number of this rank's GPU, the only one that TensorFlow sees from now on, or None; and the device's name."""
    gpus = tf.config.list_physical_devices("GPU")
    gpu = choose_gpu(device, local_rank, local_ranks, len(gpus))
    tf.config.set_visible_devices([] if gpu is None else gpus[gpu], "GPU")
    if gpu is None:
        return None, CPU
    tf.config.experimental.set_memory_growth(gpus[gpu], True)
    return gpu, "GPU:0"
