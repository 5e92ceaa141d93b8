# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: what leaves the tables of several ranks, and comes back."""

import pathlib
import shutil
import tempfile

import dumping
import following
import numpy as np
import tensorflow as tf
from hybrid_model import TABLES
from tensorflow_support import restart

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp
from sparse_operation_kit.tensorflow import group, saving


def shared_folder():
    """The path of a new folder, the same on all ranks."""
    path = tempfile.mkdtemp() if sok.rank() == 0 else ""
    return group.Group().allgather(path.encode())[0].decode()


def barrier(name):
    """Waits for all ranks: on GPUs a reduction alone does not."""
    sok.communication.allreduce(1.0, name=name).numpy()


def incremental():
    """Changed rows of all ranks reach a copy on as many."""
    import keras

    restart()

    def make_step(tables):
        optimizer = sok.OptimizerWrapper(keras.optimizers.Adam())

        @tf.function
        def compiled(*keys):
            ids = [tf.RaggedTensor.from_row_splits(k, [0, tf.size(k)]) for k in keys]
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(output**2) for output in sok.lookup_sparse(tables, ids)])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

        return lambda keys: compiled(*map(tf.constant, keys))

    folder = shared_folder()
    following.follow(sok, make_step, lambda table: table.numpy(), f"{folder}/delta")
    barrier("saved")
    if sok.rank() == 0:
        shutil.rmtree(folder)


def dump_while_training():
    """What dump_async writes is what the tables were when it was called."""
    import keras

    restart()
    tables = dumping.tables_of(sok, tf.bfloat16)
    layer = dmp.DistributedEmbedding(
        [dmp.Embedding(*shape, combiner="sum") for shape in TABLES], name="layer", **dumping.LAYER
    )
    layer.build()
    variables = [*tables, *layer.trainable_variables]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))

    def step(turn):
        keys = dumping.keys_of(sok, turn)
        ids = [tf.RaggedTensor.from_row_splits(each, np.arange(0, len(each) + 1, 4)) for each in keys]
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(tables, ids, combiners=["sum"] * len(tables))
            outputs += layer([tf.constant(keys[0] % 7)[:, None]] * len(TABLES))
            loss = tf.add_n([tf.reduce_sum((output - 1) ** 2) for output in outputs])
        gradients = dmp.DistributedGradientTape(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    dumping.while_training(sok, group.Group(), [*tables, layer], step, tables[-1], optimizer)


def _model():
    import keras

    tables = {
        "items": sok.Variable(shape=(12, 4), initializer="normal", name="saved_items"),
        "users": sok.Variable(
            shape=(7, 4), initializer="normal", name="saved_users", mode=f"localized:{sok.num_ranks() - 1}"
        ),
    }
    layer = sok.EmbeddingBagCollection(tables, combiners="sum")
    inputs = {name: keras.Input((2,), dtype="int64", name=name) for name in tables}
    pooled = layer(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(pooled["items"] + pooled["users"]))
    return model, sok.DistributedOptimizer(keras.optimizers.Adam(0.1))


def _train(model, optimizer, steps):
    ids = np.array([[sok.rank(), 3], [5, 6]])
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model({"items": ids, "users": ids}) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def checkpoints():
    """Each rank's own files restore it; those of rank 0 are refused by the others, or leave their tables alone."""
    restart()
    folder, rank, ranks = shared_folder(), sok.rank(), sok.num_ranks()
    model, optimizer = _model()
    _train(model, optimizer, 2)
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(f"{folder}/c-{rank}")
    model.save_weights(f"{folder}/w-{rank}.weights.h5")
    barrier("written")
    other, again = _model()
    tf.train.Checkpoint(model=other, optimizer=again).read(f"{folder}/c-{rank}")
    third, _ = _model()
    third.load_weights(f"{folder}/w-{rank}.weights.h5")
    for loaded in (other, third):
        for ours, theirs in zip(model.variables, loaded.variables, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    _train(model, optimizer, 2)
    _train(other, again, 2)
    for ours, theirs in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if ranks > 1:
        before = [variable.numpy() for variable in other.variables[:2]]
        for read in (
            lambda: tf.train.Checkpoint(model=other).read(f"{folder}/c-0").expect_partial(),
            lambda: other.load_weights(f"{folder}/w-0.weights.h5"),
        ):
            with saving.tables_left_alone():
                read()
            for rows, table in zip(before, other.variables[:2], strict=True):
                np.testing.assert_array_equal(rows, table)
            try:
                read()
            except ValueError as error:
                assert rank != 0 and "rank 0 of" in str(error) and "sok.dump" in str(error), error
            else:
                assert rank == 0
            before = [variable.numpy() for variable in other.variables[:2]]
    fourth, last = _model()
    last.sok_build(fourth.variables[:2])
    with saving.from_all_ranks():
        for writer in range(ranks):
            tf.train.Checkpoint(model=fourth, optimizer=last).read(f"{folder}/c-{writer}")
    _train(fourth, last, 2)
    for ours, theirs in zip(model.variables, fourth.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    barrier("read")
    if rank == 0:
        shutil.rmtree(folder)


def keras_resume():
    """Models of either Keras that stop and train on, each rank from files of its own, are those that did not stop."""
    import keras
    import keras_resume
    import tf_keras

    if sok.num_ranks() != 2:  # one is in tests/tensorflow/test_keras_resume.py
        return
    restart(gradient="mean")
    for kit in (keras, tf_keras):
        folder = pathlib.Path(tempfile.mkdtemp())
        keras_resume.check(kit, folder)
        shutil.rmtree(folder)
    restart()
