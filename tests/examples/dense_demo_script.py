# SPDX-License-Identifier: Apache-2.0
"""A training loop as scripts for SparseOperationKit 1.x and NVTabular's loader have it: the same calls in their order.

TF_USE_LEGACY_KERAS=1; each worker finds its place in TF_CONFIG. The losses of all steps go to --losses, a
file for each rank.
"""

import argparse
import glob
import json
import os
import pathlib
from typing import Any

import tensorflow as tf

import sparse_operation_kit as sok
from examples.dense_demo.loader import KerasSequenceLoader
from examples.dense_demo.model import DenseDemo
from examples.dense_demo.settings import Settings

parser = argparse.ArgumentParser()
parser.add_argument("--data_filename")
parser.add_argument("--global_batch_size", type=int)
parser.add_argument("--optimizer")
parser.add_argument("--losses", type=pathlib.Path)
args = parser.parse_args()

place = json.loads(os.environ["TF_CONFIG"])
workers, rank = len(place["cluster"]["worker"]), place["task"]["index"]
strategy = tf.distribute.MultiWorkerMirroredStrategy()
told = Settings(data=pathlib.Path(), units=32, layers=2, slots=4, keys=3, vocabulary=90)

loader = KerasSequenceLoader(
    paths_or_dataset=sorted(glob.glob(args.data_filename)),
    batch_size=args.global_batch_size // workers,
    label_names=["label"],
    cont_names=["feature"],
    engine="parquet",
    shuffle=False,
    buffer_size=0.06,
    sparse_as_dense=True,
    global_size=workers,
    global_rank=rank,
)

with strategy.scope():
    sok.Init(global_batch_size=args.global_batch_size)
    model = DenseDemo(told, workers)
    of_1_x: Any = sok.optimizers  # finds names of 1.x when they are used
    embedding_optimizer = (of_1_x.Adam if "plugin" in args.optimizer else tf.keras.optimizers.Adam)(learning_rate=0.01)
    dense_optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)

loss_fn = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction=tf.keras.losses.Reduction.NONE)


@tf.function
def train_step(inputs, labels):
    with tf.GradientTape() as tape:
        logits = model(inputs, training=True)
        loss = tf.nn.compute_average_loss(loss_fn(labels, logits), global_batch_size=args.global_batch_size)
    tables, others = sok.split_embedding_variable_from_others(model.trainable_variables)
    grads, table_grads = tape.gradient(loss, [others, tables])
    if "plugin" not in args.optimizer:
        with sok.OptimizerScope(tables):
            embedding_optimizer.apply_gradients(
                zip(table_grads, tables, strict=True), experimental_aggregate_gradients=False
            )
    else:
        embedding_optimizer.apply_gradients(
            zip(table_grads, tables, strict=True), experimental_aggregate_gradients=False
        )
    replica_context = tf.distribute.get_replica_context()
    grads = replica_context.all_reduce("sum", grads)
    dense_optimizer.apply_gradients(zip(grads, others, strict=True), experimental_aggregate_gradients=False)
    return replica_context.all_reduce(tf.distribute.ReduceOp.SUM, loss)


losses = []
for features, labels in loader:
    values, nnzs = features["feature"]
    inputs = tf.reshape(values, [-1, told.slots, told.keys])
    total = strategy.run(train_step, args=(inputs, labels))
    losses.append(float(total))
(args.losses / f"{rank}.json").write_text(json.dumps(losses))
