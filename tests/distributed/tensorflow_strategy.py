# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: the same training by Horovod and by the workers of a MultiWorkerMirroredStrategy, and
what the two engines move.
"""

import importlib
import unittest.mock

import hybrid_model
import numpy as np
import pytest
import reference
import tensorflow as tf
import tensorflow_support
from tensorflow_support import gathered, own_rows, restart

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import dist_model_parallel as dmp
from sparse_operation_kit.tensorflow import runtime

ROWS, BATCH, STEPS = 6, 8, 4


class Unknown(tf.keras.layers.Layer):
    """An embedding of a class that dist_model_parallel does not know."""

    def __init__(self, input_dim, output_dim, **options):
        super().__init__(**options)
        self.input_dim, self.output_dim = input_dim, output_dim

    def build(self, shape):
        self.embeddings = self.add_weight(shape=(self.input_dim, self.output_dim), initializer="ones")

    def call(self, ids):
        return tf.gather(self.embeddings, ids)

    def get_config(self):
        return {**super().get_config(), "input_dim": self.input_dim, "output_dim": self.output_dim}


def _model():
    """(initial rows, initial kernel, ids and labels of all steps and ranks), each batch naming every row."""
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(np.arange(BATCH * sok.num_ranks()) % ROWS) for _ in range(STEPS)])
    labels = rng.random((*ids.shape, 1)).astype(np.float32)
    return rng.random((ROWS, 4)).astype(np.float32), rng.random((4, 1)).astype(np.float32), ids, labels


def _optimizer(keras):
    """One whose step grows with the gradient, as Adam's does not: a gradient that is N times too large shows."""
    return keras.optimizers.SGD(0.5, momentum=0.9)


def _alone(keras, start, kernel, ids, labels):
    """(rows, kernel) as one process trains them, on joined batches."""
    rows, dense = tf.Variable(start), tf.Variable(kernel)
    optimizer = _optimizer(keras)
    for step_ids, step_labels in zip(ids, labels, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.one_hot(step_ids, ROWS) @ rows @ dense - step_labels) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, [rows, dense]), [rows, dense], strict=True))
    return rows.numpy(), dense.numpy()


def _mine(batch):
    return batch[BATCH * sok.rank() : BATCH * (sok.rank() + 1)]


def same_model():
    """The joined batch's model, whatever the engine: by averages of local means under Horovod, by sums of shares of the
    global mean under a strategy. Neither table gradients nor dense ones are reduced twice.
    """
    strategy = tensorflow_support.strategy
    for name, compiled in (("keras", True), ("tf_keras", True), ("tf_keras", False)):
        keras = importlib.import_module(name)
        restart(gradient="sum" if strategy else "mean")
        start, kernel, ids, labels = _model()
        scope = (strategy or tf.distribute.get_strategy()).scope()
        with scope:
            table = sok.Variable(start, name="same")
            dense = tf.Variable(kernel)
            optimizer = sok.OptimizerWrapper(_optimizer(keras))

        def step(step_ids, step_labels, table=table, dense=dense, optimizer=optimizer):
            with sok.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((sok.all2all_dense_embedding(table, step_ids) @ dense - step_labels) ** 2)
                if strategy:
                    loss /= sok.num_ranks()
            gradients = tape.gradient(loss, [table, dense])
            optimizer.apply_gradients(zip(gradients, [table, dense], strict=True))

        step = tf.function(step, reduce_retracing=True) if compiled else step
        for batch in zip(ids, labels, strict=True):
            mine = tuple(map(tf.constant, map(_mine, batch)))
            strategy.run(step, mine) if strategy else step(*mine)
        rows, trained = _alone(keras, start, kernel, ids, labels)
        reference.assert_close(table.numpy(), own_rows(table, rows), 1e-5, message=f"{name} {compiled}")
        reference.assert_close(dense.numpy(), trained, 1e-5, message=f"{name} {compiled}")
        everywhere = gathered(dense.numpy())
        assert (everywhere == everywhere[0]).all()
    restart()


def strategy_fit():
    """tf_keras's fit, evaluate and predict in the scope of the strategy."""
    import tf_keras

    from sparse_operation_kit.tensorflow.embedding import layer_class

    strategy = tensorflow_support.strategy
    if strategy is None:
        return
    start, kernel, ids, labels = _model()
    with strategy.scope():
        table = sok.Variable(start, name="fit")
        inputs = tf_keras.Input((1,), dtype="int64", name="fit")
        vectors = layer_class(tf_keras)({"fit": table}, combiners="sum")({"fit": inputs})["fit"]
        dense = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer=tf_keras.initializers.Constant(kernel))
        model = tf_keras.Model({"fit": inputs}, dense(vectors))
        model.compile(sok.DistributedOptimizer(_optimizer(tf_keras)), "mse")
    features, answers = {"fit": ids.reshape(-1, 1)}, labels.reshape(-1, 1)
    model.fit(features, answers, batch_size=BATCH * sok.num_ranks(), shuffle=False, verbose=0)
    rows, trained = _alone(tf_keras, start, kernel, ids, labels)
    reference.assert_close(table.numpy(), own_rows(table, rows), 1e-5)
    reference.assert_close(dense.get_weights()[0], trained, 1e-5)
    loss = model.evaluate(features, answers, batch_size=BATCH * sok.num_ranks(), verbose=0)
    expected = np.mean((rows[ids.reshape(-1)] @ trained - answers) ** 2)
    assert abs(loss - expected) < 1e-5 * max(1, expected)


def strategy_layers():
    """dist_model_parallel in `strategy.run`: tables of every kind train as in one process; layers that look up by
    themselves, whose weights one rank alone has, are refused by all.
    """
    strategy = tensorflow_support.strategy
    if strategy is None:
        return
    kinds = dict(hybrid_model.ALL_KINDS, kinds=["dense"] * 12)  # what strategies hand on
    tables, combiners = hybrid_model.TABLES, kinds.pop("combiners")
    case = hybrid_model.Case(tables, combiners, kinds.pop("kinds"), kinds["tables_of"], sok.rank(), sok.num_ranks())
    embeddings = [dmp.Embedding(*shape, combiner=c) for shape, c in zip(tables, combiners, strict=True)]
    with strategy.scope():
        layer = dmp.DistributedEmbedding(embeddings, input_table_map=kinds.pop("tables_of"), **kinds)
        layer.build()
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    layer.set_weights(case.start)
    if sok.num_ranks() > 1:
        assert all(layer.strategy.table_groups), "replicated, whole and row-sliced tables"

    @tf.function
    def step(inputs, upstream):
        with tf.GradientTape() as tape:
            outputs = layer(inputs)
            losses = [tf.reduce_sum(o * u) for o, u in zip(outputs, upstream, strict=True)]
            loss = tf.add_n(losses) / strategy.num_replicas_in_sync
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return outputs

    mine = [[tf.constant(each[case.share]) for each in part] for part in (case.bags, case.upstream)]
    mine[1] = [tf.cast(each, tf.float32) for each in mine[1]]
    case.check_outputs(strategy.run(step, mine))
    case.check_tables(layer.get_weights(True), 0.5)
    refused = False
    with strategy.scope():
        try:
            dmp.DistributedEmbedding([Unknown(4, 2) for _ in range(sok.num_ranks())]).build()
        except NotImplementedError as error:
            refused = "look up by themselves" in str(error)
    outside = dmp.DistributedEmbedding([Unknown(4, 2) for _ in range(sok.num_ranks())])
    ids = [tf.constant([1, 2])] * sok.num_ranks()
    assert outside(ids)[0].shape == (2, 2)
    try:
        strategy.run(lambda: outside(ids))
    except NotImplementedError as error:
        refused = refused and "look up by themselves" in str(error)
    else:
        refused = False
    assert refused == (sok.num_ranks() > 1)


def strategy_arguments():
    """Which engine init() takes, and what it refuses."""
    engine = runtime.get().arguments.comm_tool
    ranks = sok.num_ranks()
    sok.init()
    sok.init(comm_tool=engine)
    sok.set_comm_tool(engine)
    other = "horovod" if engine == "tensorflow" else "tensorflow"
    runtime.shutdown()
    if ranks > 1:
        try:
            sok.init(comm_tool=other)
        except RuntimeError as error:
            assert f"{ranks} processes are connected" in str(error) and "sok.init()" in str(error)
        else:
            raise AssertionError("no error")
    assert runtime.session.state is None
    sok.init(comm_tool="single")
    assert sok.num_ranks() == 1
    restart()


def collective_gradients():
    """Each call's gradient (of a gather and a broadcast the mean, as Horovod has it), dtypes that travel as others,
    empty tensors, one name twice in a function, and loops.
    """
    n, rank, calls = sok.num_ranks(), sok.rank(), sok.communication
    for dtype in (tf.bool, tf.uint8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64):
        mine = tf.cast(tf.reshape(tf.range(2 * (rank + 1)), [rank + 1, 2]), dtype)
        joined = calls.allgather(mine, name=f"dtypes_{dtype.name}")
        expected = np.concatenate([np.arange(2 * (r + 1)).reshape(-1, 2) for r in range(n)])
        np.testing.assert_array_equal(joined, tf.cast(expected, dtype))
        assert joined.dtype == dtype
    for shape in ((0, 3), (n, 0)):
        assert calls.alltoall(tf.zeros(shape), name=f"empty_{shape[1]}").shape == shape
    assert calls.allgather(tf.zeros([0, 3]), name="empty_gather").shape == (0, 3)
    if tensorflow_support.strategy is not None and n > 1:
        # Over NCCL wrong splits are an error of the rank that has them, as in Horovod's alltoall.
        by_nccl = runtime.get().exchange.communicator(tf.zeros([1])) is not None
        wrong = [2 if by_nccl or rank == n - 1 else 1] + [1] * (n - 1)
        message = "send_splits add up to" if by_nccl else "the splits of each rank"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            calls.alltoall(tf.zeros([n]), wrong, name="wrong_splits")

    splits = [(rank + r) % 3 for r in range(n)]
    values = tf.random.stateless_normal([sum(splits), 2], [rank, 1])
    factor = tf.constant(float(rank + 1))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([values, factor])
        moved = tf.reduce_sum(calls.alltoall(values, splits, name="gradient_alltoall") * (rank + 1.0))
        joined = tf.reduce_sum(calls.allgather(values, name="gradient_allgather") * (rank + 1.0))
        added = (rank + 1.0) * calls.allreduce(factor, name="gradient_allreduce") ** 2
        told = (rank + 1.0) * calls.broadcast(factor, n - 1, name="gradient_broadcast")
    total = n * (n + 1) / 2
    receivers = np.repeat(np.arange(n) + 1.0, splits)[:, None] * np.ones([1, 2])
    np.testing.assert_allclose(tape.gradient(moved, values), receivers)
    np.testing.assert_allclose(tape.gradient(joined, values), np.full(values.shape, total / n))
    np.testing.assert_allclose(tape.gradient(added, factor), 2 * total * total)
    np.testing.assert_allclose(tape.gradient(told, factor), total / n if rank == n - 1 else 0)

    @tf.function
    def inner(tensor):
        return calls.allreduce(tensor, name="twice")

    @tf.function
    def outer(tensor):
        doubled = inner(tensor) + inner(2 * tensor)
        for _ in tf.range(3):
            doubled = tf.ensure_shape(calls.allgather(doubled, name="looped")[-1:], [1]) + 1
        return doubled

    for _ in range(3):
        assert outer(tf.fill([1], 1.0)).numpy() == [3 * n + 3]
    try:
        calls.alltoall(tf.zeros([3]), tf.fill([n], 2), name="misfit")
    except (tf.errors.InvalidArgumentError, tf.errors.UnknownError):
        return
    assert n == 1, "no error"


def slices_of_replicas():
    """Gradients of replicated rows are the same bits on all ranks, in whatever order each adds what is of one row: by
    atomic operations a GPU adds in another one each time.
    """
    rank, add = sok.rank(), tf.math.unsorted_segment_sum
    rng = np.random.default_rng(rank)
    entries, table = 300 + rank, tf.Variable(tf.zeros([40, 3]))
    indices = tf.constant(rng.integers(7 * rank, 7 * rank + 12, entries))
    values = tf.constant(rng.normal(size=(entries, 3)) * 10.0 ** rng.integers(-3, 4, (entries, 1)), tf.float32)

    def in_any_order(data, segment_ids, num_segments):
        order = tf.argsort(tf.random.stateless_uniform([tf.shape(data)[0]], [rank, 1]))
        return add(tf.gather(data, order), tf.gather(segment_ids, order), num_segments)

    def reduced():
        slices = tf.IndexedSlices(values, indices, tf.constant([40, 3], tf.int64))
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.gather(table, indices) * values)
        return [
            sok.communication.allreduce(slices, name="slices"),
            sok.communication.allreduce(slices, "average", name="mean_of_slices"),
            tape.gradient(loss, table),
        ]

    wanted = np.zeros((40, 3))
    np.add.at(wanted, indices.numpy(), values.numpy().astype(np.float64))
    wanted = gathered(wanted).sum(0)
    rows = np.unique(sok.communication.allgather(tf.unique(indices).y, name="rows"))
    with unittest.mock.patch.object(tf.math, "unsorted_segment_sum", in_any_order):
        for run in (reduced, tf.function(reduced)):
            for number, slices in enumerate(run()):
                assert isinstance(slices, tf.IndexedSlices) and slices.dense_shape.numpy().tolist() == [40, 3]
                found = gathered(slices.values.numpy().view(np.int32))
                assert (found == found[0]).all(), f"{number}: not the same bits on all ranks"
                found = gathered(slices.indices)
                assert (found == found[0]).all() and np.unique(found[0]).tolist() == rows.tolist()
                assert len(found[0]) == len(rows) or sok.num_ranks() == 1  # where gradients stay as they are
                whole = tf.convert_to_tensor(slices).numpy() * (sok.num_ranks() if number else 1)
                np.testing.assert_allclose(whole, wanted, rtol=1e-4, atol=1e-2)
    nothing = tf.IndexedSlices(tf.zeros([0, 3]), tf.zeros([0], tf.int64), tf.constant([40, 3], tf.int64))
    assert sok.communication.allreduce(nothing, name="no_slices").values.shape == (0, 3)
