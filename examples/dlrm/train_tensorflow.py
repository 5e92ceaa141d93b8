# SPDX-License-Identifier: Apache-2.0
"""Trains the DLRM in TensorFlow: `horovodrun -np 2 python -m examples.dlrm.train_tensorflow --data demo/data`."""

from __future__ import annotations

import os
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok

from . import columns, dense_file, failure, training
from .architecture import Architecture, Layer
from .features import Batch
from .options import parse
from .settings import ADAGRAD_ACCUMULATOR, ADAGRAD_EPSILON, Settings
from .tensorflow_ranks import TensorflowRanks

_COLUMNS = len(columns.CATEGORICAL)
_DENSE = tf.TensorSpec([None, len(columns.DENSE)], tf.float32)
_LABELS = tf.TensorSpec([None], tf.float32)
_GLOBAL_ROWS = tf.TensorSpec([], tf.float32)
_IDS = tuple(tf.RaggedTensorSpec([None, None], tf.int64) for _ in range(_COLUMNS))


class Dlrm:
    """Embedding tables sharded over the ranks, between two dense networks that every rank has whole."""

    def __init__(self, architecture: Architecture, settings: Settings) -> None:
        sizes = zip(columns.CATEGORICAL, settings.table_rows(), strict=True)
        self.tables = [_table(name, rows, architecture.embedding_dim, settings) for name, rows in sizes]
        self.bottom = _mlp(architecture.bottom_layers(settings.seed), last_is_linear=False)
        self.top = _mlp(architecture.top_layers(settings.seed), last_is_linear=True)
        self.pairs = tf.constant(architecture.pairs)

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """Tables and dense layers."""
        return [*self.tables, *self.bottom.trainable_variables, *self.top.trainable_variables]

    def __call__(self, dense: tf.Tensor, ids: tuple[tf.RaggedTensor, ...], *, training: bool) -> tf.Tensor:
        """Logits [n] of rows with dense features [n, 13] and the ids of 26 columns."""
        embedded = sok.lookup_sparse(self.tables, list(ids), combiners="sum", training=training, concat=True)
        bottom = self.bottom(dense)
        vectors = tf.reshape(tf.concat([bottom, embedded], axis=1), [-1, _COLUMNS + 1, bottom.shape[1]])
        products = tf.matmul(vectors, vectors, transpose_b=True)
        flat = tf.reshape(products, [-1, (_COLUMNS + 1) ** 2])
        features = tf.concat([bottom, tf.gather(flat, self.pairs, axis=1)], axis=1)
        return tf.squeeze(self.top(features), axis=1)


def _table(name: str, rows: int | None, dimension: int, settings: Settings) -> tf.Variable:
    if rows is None:
        return sok.DynamicVariable(dimension, "uniform", name=name, max_capacity=settings.max_table_rows)
    return sok.Variable(shape=[rows, dimension], initializer="uniform", name=name)


class TensorflowModel:
    """The model on this rank, with its optimizer. Implements training.Model."""

    def __init__(self, settings: Settings) -> None:
        self._model = Dlrm(Architecture(settings.embedding_dim), settings)
        self._optimizer = sok.OptimizerWrapper(_optimizer(settings))

    def train(self, batch: Batch) -> float:
        """See training.Model."""
        return float(self._train(tf.constant(batch.labels), tf.constant(float(batch.global_rows)), *_inputs(batch)))

    def logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """See training.Model."""
        logits: npt.NDArray[np.float32] = self._logits(*_inputs(batch)).numpy()
        return logits

    def dump(self, folder: Path, step: int) -> None:
        """See training.Model."""
        if sok.rank() == 0:
            dense_file.save(folder, step, {name: array.numpy() for name, array in self._dense().items()})
        sok.dump(dense_file.tables(folder), self._model.tables, self._optimizer, step=step, progress=False)

    def load(self, folder: Path) -> int:
        """See training.Model."""
        found = sok.load(dense_file.tables(folder), self._model.tables, self._optimizer, progress=False)
        arrays = dense_file.load(folder, found.step)
        for name, variable in self._dense().items():
            variable.assign(arrays[name])
        return found.step or 0

    def _dense(self) -> dict[str, tf.Variable]:
        """The dense layers and what the optimizer keeps for them, by name."""
        named = {}
        for part, layers in (("bottom", self._model.bottom.layers), ("top", self._model.top.layers)):
            for place, layer in enumerate(layers):
                named.update({f"{part}.{place}.kernel": layer.kernel, f"{part}.{place}.bias": layer.bias})
        optimizer = self._optimizer.optimizer
        if not optimizer.built:
            optimizer.build(list(named.values()))
        # Its first two variables are the step count, which is sok.dump's, and the learning rate.
        accumulators = zip(list(named), optimizer.variables[2:], strict=False)
        return named | {f"{name}.accumulator": state for name, state in accumulators}

    @tf.function(input_signature=(_LABELS, _GLOBAL_ROWS, _DENSE, _IDS))
    def _train(
        self, labels: tf.Tensor, global_rows: tf.Tensor, dense: tf.Tensor, ids: tuple[tf.RaggedTensor, ...]
    ) -> tf.Tensor:
        # Averages the gradients of the dense layers over the ranks, and leaves those of the tables to sok.
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            logits = self._model(dense, ids, training=True)
            total = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
            # The average of this over the ranks is the mean over the global batch, however its rows are spread.
            loss = total * (sok.num_ranks() / global_rows)
        variables = self._model.trainable_variables
        self._optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return total

    @tf.function(input_signature=(_DENSE, _IDS))
    def _logits(self, dense: tf.Tensor, ids: tuple[tf.RaggedTensor, ...]) -> tf.Tensor:
        return self._model(dense, ids, training=False)


def main() -> None:
    """Command line; one process, or as many as horovodrun starts."""
    settings = parse(Settings, "Train a DLRM in TensorFlow, on one process or under horovodrun.")
    with failure.reported(settings.progress):
        _run(settings)


def _run(settings: Settings) -> None:
    hvd.init()
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    # DistributedGradientTape averages dense gradients over the ranks; "mean" does the same for those of the tables.
    sok.init(gradient="mean", seed=settings.seed)
    metrics = training.run("TensorFlow", TensorflowModel(settings), TensorflowRanks(), settings)
    if sok.rank() == 0:
        print(f"TensorFlow: AUC {metrics.auc:.4f}, {metrics.samples_per_second:,.0f} samples/s")


def _mlp(layers: list[Layer], *, last_is_linear: bool) -> tf.keras.Sequential:
    model = tf.keras.Sequential()
    for place, layer in enumerate(layers):
        inputs, outputs = layer.kernel.shape
        linear = last_is_linear and place == len(layers) - 1
        dense = tf.keras.layers.Dense(outputs, activation=None if linear else "relu")
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


def _inputs(batch: Batch) -> tuple[tf.Tensor, tuple[tf.RaggedTensor, ...]]:
    ids = tuple(
        tf.RaggedTensor.from_row_splits(tf.constant(keys), tf.constant(splits), validate=False)
        for keys, splits in zip(batch.keys, batch.splits, strict=True)
    )
    return tf.constant(batch.dense), ids


if __name__ == "__main__":
    main()
