# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: SparseOperationKit 1.x's names on several ranks."""

import logging
import pathlib
import shutil

import numpy as np
import tensorflow as tf
import tensorflow_support
import tf_keras
from tensorflow_saving import barrier, shared_folder
from tensorflow_support import gathered, restart

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.checkpoint.errors import PeerError
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.legacy import layers, optimizers

CAP = 4


def dense(name, rows=CAP, **options):
    return layers.classes(tf.keras).All2AllDenseEmbedding(rows, 2, 1, 1, dynamic_input=True, table_name=name, **options)


def of_all_ranks(table):
    """Key -> row, those of all ranks."""
    keys, rows = sok.export(table)
    keys = sok.communication.allgather(tf.cast(keys, tf.int64), name="legacy_keys").numpy()
    rows = sok.communication.allgather(rows, name="legacy_rows").numpy()
    assert len(np.unique(keys)) == len(keys)
    return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def legacy_init():
    """The seed of rank 0 counts; a batch is divided among the ranks."""
    runtime.shutdown()
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("sparse_operation_kit.tensorflow.legacy.initialize").addHandler(handler)
    rank, ranks = runtime.session.find_ranks(runtime.session.find_engine())
    sok.Init(global_batch_size=2 * ranks, seed=7 + rank)
    assert runtime.get().arguments.seed == 7
    assert bool(found) == (sok.num_ranks() > 1)
    sok.Init(global_batch_size=sok.num_ranks())
    if sok.num_ranks() > 1:
        for size in (sok.num_ranks() - 1, sok.num_ranks() + 1):
            try:
                sok.Init(global_batch_size=size)
            except ValueError:
                continue
            raise AssertionError("no ValueError")
    restart()


def legacy_training():
    """Ranks with different batches, an empty one among them, train as one process does on the joined batch."""
    ranks, rank = sok.num_ranks(), sok.rank()
    for use_hashtable in (True, False):
        layer = dense(f"users{use_hashtable}", use_hashtable=use_hashtable, embedding_initializer="ones")
        keys_of_steps = [[np.arange(r) + s for r in range(ranks)] for s in range(3)]  # rank 0 has none
        adam, plain = optimizers.PluginAdam(0.1), tf.keras.optimizers.Adam(0.1)
        reference = tf.Variable(np.ones((CAP * ranks, 2), np.float32))

        @tf.function(reduce_retracing=True)
        def step(keys, layer=layer, adam=adam):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(keys, training=True) ** 2)
            adam.apply_gradients(zip(tape.gradient(loss, [layer.var]), [layer.var], strict=True))

        for keys in keys_of_steps:
            step(tf.constant(keys[rank], tf.int64))
            gradient = np.zeros((CAP * ranks, 2), np.float32)
            for key in np.concatenate(keys):
                gradient[key] += 2 * reference.numpy()[key]
            plain.apply_gradients([(tf.constant(gradient), reference)])
        found = of_all_ranks(layer.var)
        for key, row in found.items():
            np.testing.assert_allclose(row, reference.numpy()[key], rtol=1e-4, atol=1e-5)
        used = {int(key) for keys in keys_of_steps for key in np.concatenate(keys)}
        assert set(found) == (used if use_hashtable else set(range(CAP * ranks)))


def legacy_full():
    """Each rank holds as many keys as it has rows, whatever their values are; one more changes nothing anywhere."""
    ranks, rank = sok.num_ranks(), sok.rank()
    layer, other = dense("users"), dense("users")
    keys = np.array([r + ranks * (k - 2) * 2**40 for r in range(ranks) for k in range(CAP)])
    unseen = layer(tf.constant(keys[rank::2]), training=False)  # reads what the keys begin with, and inserts nothing
    assert layer.var.size == 0
    np.testing.assert_array_equal(unseen, other(tf.constant(keys[rank::2])))
    layer(tf.constant(keys))
    before = of_all_ranks(layer.var)
    assert len(before) == CAP * ranks and sok.export(layer.var)[0].shape[0] == CAP
    try:
        layer(tf.constant([ranks * 5] if rank == ranks - 1 else [], tf.int64))
        sok.check_errors()  # a GPU finds it later, and tells the others
    except tf.errors.OpError as error:
        own = ("'users'", f"at most {CAP} keys", f"rank 0 of {ranks}" if ranks > 1 else "")
        for said in own if rank == 0 else ("rank 0",):
            assert said in str(error), error
    else:
        raise AssertionError("no error")
    assert of_all_ranks(layer.var) == before
    sok.check_errors()
    np.testing.assert_array_equal(layer(tf.constant(keys[rank::2])), [before[key] for key in keys[rank::2].tolist()])


def legacy_values_that_do_not_fit():
    """A hash table that is full of other keys on one rank keeps what it has on all of them."""
    ranks, rank = sok.num_ranks(), sok.rank()
    layer = dense("given")
    own = [rank + ranks * (CAP + k) for k in range(CAP if rank == 0 else 1)]
    layer(tf.constant(own, tf.int64))
    before = of_all_ranks(layer.var)
    try:
        sok.Saver().load_embedding_values(layer.var, np.ones((CAP * ranks, 2), np.float32))
    except (tf.errors.ResourceExhaustedError, PeerError) as error:
        assert "'given'" in str(error), error
    else:
        raise AssertionError("no error")
    assert of_all_ranks(layer.var) == before


def legacy_refusals():
    """What a layer or a group lookup refuses before it looks anything up is told to the other ranks, which go on."""
    last = sok.num_ranks() - 1
    kit = layers.classes(tf.keras)
    pooled = kit.DistributedEmbedding("sum", CAP, 2, 2, 3, table_name="pooled")
    rows, table = dense("rows"), sok.Variable(np.ones((8, 2), np.float32), name="grouped")
    ids = tf.ragged.constant([[1], [2]], dtype=tf.int64, ragged_rank=1)
    keys = tf.constant([1], tf.int64)
    with sok.group_embedding_column_scope("group"):
        identities = [tf.feature_column.categorical_column_with_identity(name, 8) for name in "ab"]
        columns = [tf.feature_column.embedding_column(column, 2) for column in identities]
    features = {name: tf.constant([[1], [2]], tf.int64) for name in "ab"}
    compiled = tf.function(lambda given: pooled(given), input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    calls = [
        (lambda: compiled(ids), lambda: compiled(ids[:1]), tf.errors.InvalidArgumentError),
        *(
            (lambda ask=ask: ask(features), lambda ask=ask, bad=bad: ask(bad), ValueError)
            for bad in ({"a": features["a"]}, {**features, "b": tf.constant([[0.5], [1.0]])})
            for ask in (lambda given: sok.input_layer(given, columns), tf_keras.layers.DenseFeatures(columns))
        ),
        (lambda: pooled(ids), lambda: pooled(ids[:1]), tf.errors.InvalidArgumentError),
        (lambda: pooled(ids), lambda: pooled(tf.cast(ids, tf.int32)), TypeError),
        (lambda: rows(keys), lambda: rows(tf.constant([[1]], tf.int64)), ValueError),
        (
            lambda: sok.group_embedding_lookup_sparse(table, ids, "sum"),
            lambda: sok.group_embedding_lookup_sparse(table, ids, "max"),
            ValueError,
        ),
        (
            lambda: sok.group_embedding_lookup(table, keys),
            lambda: sok.group_embedding_lookup(table, [keys, keys]),
            ValueError,
        ),
    ]
    for good, bad, kind in calls:
        try:
            (bad if sok.rank() == last else good)()
        except (kind, tf.errors.InvalidArgumentError) as error:
            told = isinstance(error, kind) if sok.rank() == last else f"rank {last}" in str(error)
            assert told, error
        else:
            raise AssertionError("no error")
        good()


def legacy_order_of_pooled_layers():
    """As legacy_order, of DistributedEmbedding."""
    sgd = tf.keras.optimizers.SGD(0.0)
    for hashed in (True, False):
        tf.keras.backend.clear_session()
        made = [layers.classes(tf.keras).DistributedEmbedding("sum", CAP, 2, 1, 2, use_hashtable=hashed) for _ in "pq"]
        mine = made if sok.rank() % 2 == 0 else made[::-1]

        @tf.function
        def step(ids, made=made, mine=mine):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(layer(ids)) for layer in mine])
            tables = [layer.var for layer in made]
            with sok.OptimizerScope(tables):
                sgd.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
            return loss

        ids = tf.ragged.constant([[1, 2]], dtype=tf.int64)
        for given in (ids, ids.to_sparse()):
            found = step(given)
            assert (sok.communication.allgather(tf.reshape(found, [1]), name="pooled").numpy() == found.numpy()).all()


def legacy_order():
    """Layers that run in another order on another rank, in a function."""
    tf.keras.backend.clear_session()  # names of layers, and with them scopes, are those of a fresh process
    first, second = dense("users"), dense("items")
    mine = [first, second] if sok.rank() % 2 == 0 else [second, first]

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(layer(keys)) for layer in mine])
        tables = [first.var, second.var]
        with sok.OptimizerScope(tables):
            sgd.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return loss

    sgd = tf.keras.optimizers.SGD(0.0)
    for _ in range(3):
        step(tf.constant([sok.rank(), 7], tf.int64))
    assert set(of_all_ranks(first.var)) == {*range(sok.num_ranks()), 7} == set(of_all_ranks(second.var))


def legacy_scaling():
    """A gradient that is not finite on one rank, of a table or of another variable, makes all skip the step of both and
    halve the scale. Within `strategy.run` one rank alone would wait for the others to sum the other variable's.
    """
    for wrong in ("table", "weight"):
        _scaling(wrong)
    _scaling_of_tf_keras()


def _scaling(wrong):
    strategy = tensorflow_support.strategy or tf.distribute.get_strategy()
    with strategy.scope():
        table = sok.Variable(np.ones((4 * sok.num_ranks(), 2), np.float32), name="scaled")
        weight = tf.keras.Variable(np.ones(1, np.float32))
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizers.PluginAdam(0.1), initial_scale=8.0)

    @tf.function
    def step(of_row, of_weight):
        shape = tf.constant([4, 2], tf.int64)
        gradient = tf.IndexedSlices(tf.fill([1, 2], of_row), tf.constant([1], tf.int64), shape)
        optimizer.apply_gradients([(gradient, table), (tf.reshape(of_weight, [1]), weight)])

    for bad in (True, False):
        value = float("inf") if bad and sok.rank() == sok.num_ranks() - 1 else 1.0
        strategy.run(step, tuple(tf.constant(value if each == wrong else 1.0) for each in ("table", "weight")))
        assert (table.numpy()[1] == 1).all() == bad == (weight.numpy() == 1).all(), (wrong, bad)
    assert (gathered(optimizer.dynamic_scale.numpy()) == 4).all(), wrong


def _scaling_of_tf_keras():
    """Its LossScaleOptimizers sum gradients over a strategy's workers, those of other variables alone."""
    strategy = tensorflow_support.strategy or tf.distribute.get_strategy()
    for sgd in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        with strategy.scope():
            table = sok.Variable(np.ones((4 * sok.num_ranks(), 2), np.float32), name="scaled")
            weight = tf.Variable(np.ones(1, np.float32))
            optimizer = tf_keras.mixed_precision.LossScaleOptimizer(sgd(0.5))

        @tf.function
        def step(table=table, weight=weight, optimizer=optimizer):
            gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1], tf.int64), tf.constant([4, 2], tf.int64))
            with sok.OptimizerScope([table]):
                optimizer.apply_gradients([(gradient, table), (tf.ones([1]), weight)])

        strategy.run(step)
        assert table.numpy()[:, 0].tolist() == [1, 0.5, 1, 1], sgd


def legacy_files():
    """Files of any number of ranks are restored by these; both dtypes of keys."""
    from sparse_operation_kit.tensorflow.legacy import saver

    ranks = sok.num_ranks()
    folder = pathlib.Path(shared_folder())
    before, saver._ROWS_AT_A_TIME = saver._ROWS_AT_A_TIME, 3
    files = sok.Saver()
    for dtype in ("int64", "uint32"):
        for use_hashtable in (True, False):
            options = {"use_hashtable": use_hashtable, "key_dtype": dtype}
            layer, again = dense("users", **options), dense("users", embedding_initializer="zeros", **options)
            rows = np.arange(8.0 * ranks, dtype=np.float32).reshape(-1, 2)
            files.load_embedding_values(layer.var, [rows[:3], rows[3:]])
            assert of_all_ranks(layer.var) == dict(enumerate(rows.tolist()))
            files.dump_to_file(layer.var, folder)
            keys = np.fromfile(folder / "users_keys.file", np.dtype(dtype))
            assert (keys % ranks).tolist() == sorted((keys % ranks).tolist()), "rank by rank"
            files.restore_from_file(again.var, folder)
            assert of_all_ranks(again.var) == of_all_ranks(layer.var)
            # By one rank what these have written, and the reverse.
            expected = of_all_ranks(layer.var)
            alone = folder / f"{sok.rank()}"
            alone.mkdir(exist_ok=True)
            barrier("dumped")
            restart(comm_tool="single")
            single = dense("users", rows=CAP * ranks, embedding_initializer="zeros", **options)
            files.restore_from_file(single.var, folder)
            assert dict(zip(*(each.numpy().tolist() for each in sok.export(single.var)), strict=True)) == expected
            files.dump_to_file(single.var, alone)
            restart()
            barrier("dumped_alone")
            again = dense("users", embedding_initializer="zeros", **options)
            files.restore_from_file(again.var, folder / f"{ranks - 1}")
            assert of_all_ranks(again.var) == expected
    # Written by another number of ranks, in another order: five keys of any value.
    others = np.array([7, 2**32 - 1, 0, 3, 2**31], np.uint32)
    if sok.rank() == 0:
        others.tofile(folder / "users_keys.file")
        np.arange(10, dtype=np.float32).tofile(folder / "users_values.file")
    barrier("written")
    layer = dense("users", rows=8)
    files.restore_from_file(layer.var, folder)
    assert of_all_ranks(layer.var) == {int(key): [2.0 * i, 2 * i + 1] for i, key in enumerate(others)}
    try:
        files.dump_to_file(layer.var, folder / "missing")
    except (OSError, RuntimeError) as error:
        assert "missing" in str(error)
    else:
        raise AssertionError("no error")
    saver._ROWS_AT_A_TIME = before
    if sok.rank() == 0:
        shutil.rmtree(folder)
