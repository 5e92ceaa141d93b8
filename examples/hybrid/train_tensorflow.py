# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's DLRM shape in TensorFlow.

python -m examples.hybrid.train_tensorflow
horovodrun -np 2 python -m examples.hybrid.train_tensorflow --picture plan.png
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

import sparse_operation_kit.tensorflow as sok
from examples.hybrid import criteo
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp


class Towers(tf.keras.Model):  # type: ignore[misc]
    """What every process has: dense features and vectors of ids -> log odds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = tf.keras.layers
        self.bottom = tf.keras.Sequential([layers.Dense(64, "relu"), layers.Dense(width, "relu")])
        self.top = tf.keras.Sequential([layers.Dense(64, "relu"), layers.Dense(1)])

    def call(self, inputs: Any) -> tf.Tensor:
        dense, vectors = inputs
        bottom = self.bottom(dense)
        together = tf.stack([bottom, *vectors], 1)
        number = together.shape[1]
        pairs = [[i, j] for i in range(number) for j in range(i + 1, number)]
        products = tf.gather_nd(tf.transpose(tf.matmul(together, together, transpose_b=True), [1, 2, 0]), pairs)
        return self.top(tf.concat([bottom, tf.transpose(products)], 1))


def main() -> None:
    args = criteo.parse()
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:  # one a process, by its number on this host, before TensorFlow uses any
        mine = gpus[hvd.local_rank()]
        tf.config.set_visible_devices(mine, "GPU")
        tf.config.experimental.set_memory_growth(mine, True)
    tf.keras.utils.set_random_seed(0)
    rows = criteo.table_rows(args.scale)
    tables = [dmp.Embedding(count, args.width, combiner="sum") for count in rows]
    strategy = args.strategy
    if strategy == "planned":
        strategy = dmp.plan(tables, batch_size=args.batch_size, skew=criteo.SKEW, optimizer="adagrad")
    embedding = dmp.DistributedEmbedding(tables, strategy=strategy)  # calls sok.init()
    rank, num_ranks = sok.rank(), sok.num_ranks()
    about = {} if args.strategy == "planned" else {"batch_size": args.batch_size, "optimizer": "adagrad"}
    criteo.show(embedding.report(**about), args, rank)

    towers = Towers(args.width)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.05))
    entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def step_on(dense: tf.Tensor, ids: list[tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = entropy(labels, towers((dense, embedding(ids))))
        variables = [*embedding.trainable_variables, *towers.trainable_variables]
        gradients = dmp.DistributedGradientTape(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return sok.communication.allreduce(loss, op="average", name="loss")

    clicks = criteo.Clicks(rows)
    for step in range(args.steps):
        dense, ids, labels = clicks.batch(step, args.batch_size, rank, num_ranks)
        given = [tf.constant(own) for own in ids]
        criteo.progress(step, float(step_on(tf.constant(dense), given, tf.constant(labels))), args, rank)
    report = embedding.report(inputs=given, **about)
    if rank == 0:
        print("\n".join(str(report).splitlines()[-4:]), flush=True)


if __name__ == "__main__":
    main()
