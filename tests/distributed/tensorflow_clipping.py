# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py about the norm of all gradients and clipping by it."""

import math

import numpy as np
import reference
import tensorflow as tf
import tensorflow_support
from tensorflow_support import gathered, own_rows, restart

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime

ROWS, BATCH, STEPS, CLIP = (30, 12, 20), 6, 4, 0.5


class Model:
    """A distributed table, a localized one and a dynamic one, the first looked up twice, and a dense layer."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.start = [rng.normal(size=(rows, 4)).astype(np.float32) for rows in ROWS]
        self.kernel = rng.normal(size=(12, 1)).astype(np.float32)
        self.ids = [rng.integers(0, rows, (STEPS, BATCH * sok.num_ranks(), 2)) for rows in ROWS]
        self.labels = rng.normal(size=(STEPS, BATCH * sok.num_ranks(), 1)).astype(np.float32)

    def batch(self, step, mine=True):
        part = slice(sok.rank() * BATCH, (sok.rank() + 1) * BATCH) if mine else slice(None)
        return [ids[step, part] for ids in self.ids], self.labels[step, part]

    def tables(self, dynamic):
        values = zip(self.start, ("", f"localized:{sok.num_ranks() - 1}", ""), "abc", strict=True)
        tables = [sok.Variable(value, mode=mode or None, name=f"clipped_{name}") for value, mode, name in values]
        if dynamic:
            tables[2] = sok.DynamicVariable(dimension=4, initializer="zeros", name="clipped_c")
            mine = np.arange(sok.rank(), ROWS[2], sok.num_ranks())
            sok.assign(tables[2], mine, self.start[2][mine])
        return tables

    @staticmethod
    def loss(tables, kernel, ids, labels):
        splits = tf.range(labels.shape[0] + 1, dtype=tf.int64) * 2

        def bags(which):
            ragged = [tf.RaggedTensor.from_row_splits(tf.reshape(ids[t], [-1]), splits) for t in which]
            return sok.lookup_sparse([tables[t] for t in which], ragged, combiners=["sum"] * len(which))

        vectors = bags((0, 1, 2))
        vectors[0] += 2 * bags((0,))[0]
        return tf.reduce_mean((tf.concat(vectors, 1) @ kernel - labels) ** 2)

    def alone(self):
        """(rows, kernel, norms) as one process trains them in float64 with tf.clip_by_global_norm."""
        rows, kernel = (
            [tf.Variable(value, dtype=tf.float64) for value in self.start],
            tf.Variable(self.kernel, dtype=tf.float64),
        )
        norms = []
        for step in range(STEPS):
            ids, labels = self.batch(step, mine=False)
            with tf.GradientTape() as tape:
                vectors = [
                    tf.reduce_sum(tf.one_hot(i, r.shape[0], dtype=tf.float64) @ r, 1)
                    for i, r in zip(ids, rows, strict=True)
                ]
                loss = tf.reduce_mean((tf.concat([3 * vectors[0], *vectors[1:]], 1) @ kernel - labels) ** 2)
            gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, [*rows, kernel]), CLIP)
            for variable, gradient in zip([*rows, kernel], gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
            norms.append(norm.numpy())
        return [value.numpy() for value in rows], kernel.numpy(), norms


def _check(model, tables, kernel, norms, name):
    rows, trained, wanted = model.alone()
    everywhere = gathered(kernel)
    assert (everywhere == everywhere[0]).all(), f"{name}: dense weights differ between ranks"
    everywhere = gathered(np.array(norms))
    assert (everywhere == everywhere[0]).all(), f"{name}: norms differ between ranks"
    reference.assert_close(np.array(norms), np.array(wanted), 1e-5, message=f"{name}: norms")
    reference.assert_close(kernel, trained, 1e-5, message=f"{name}: dense weights")
    for table, expected in zip(tables, rows, strict=False):
        keys, values = (each.numpy() for each in sok.export(table))
        reference.assert_close(values, expected[keys], 1e-5, message=f"{name}: rows")


def clipping():
    """Training with clipped gradients is that of one process on the joined batches: eagerly, in a function, with a
    forward pass that is a function of its own; with static tables and a dynamic one.
    """
    restart(gradient="mean")
    model = Model()
    for name in ("eager", "function", "forward"):
        for dynamic in (False, True):
            tables, kernel = model.tables(dynamic), tf.Variable(model.kernel)
            optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
            loss_of = tf.function(model.loss) if name == "forward" else model.loss

            def step(ids, labels, tables=tables, kernel=kernel, optimizer=optimizer, loss_of=loss_of):
                with sok.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = loss_of(tables, kernel, ids, labels)
                variables = [*tables, kernel]
                gradients, norm = sok.clip_by_global_norm(tape.gradient(loss, variables), CLIP)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
                return norm

            run = tf.function(step) if name == "function" else step
            norms = [float(run(*tf.nest.map_structure(tf.constant, model.batch(i)))) for i in range(STEPS)]
            _check(model, tables, kernel.numpy(), norms, f"{name}, dynamic {dynamic}")
    restart()


def clipping_in_a_session():
    """The same in a tf.compat.v1 graph; workers of a strategy do not meet there."""
    if runtime.get().arguments.comm_tool == "tensorflow":
        return
    restart(gradient="mean")
    model = Model()
    with tf.Graph().as_default():
        tables = model.tables(False)
        kernel = tf.compat.v1.get_variable("kernel", initializer=model.kernel)
        ids = [tf.compat.v1.placeholder(tf.int64, [BATCH, 2]) for _ in ROWS]
        labels = tf.compat.v1.placeholder(tf.float32, [BATCH, 1])
        variables = [*tables, kernel]
        gradients = tf.compat.v1.gradients(model.loss(tables, kernel, ids, labels), variables)
        gradients[-1] = sok.communication.allreduce(gradients[-1], "average", name="kernel")
        gradients, norm = sok.clip_by_global_norm(gradients, CLIP)
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        train = optimizer.apply_gradients(zip(gradients, variables, strict=True))
        norms = []
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for step in range(STEPS):
                mine, answers = model.batch(step)
                norms.append(session.run([norm, train], {**dict(zip(ids, mine, strict=True)), labels: answers})[0])
            *rows, trained = session.run(variables)
    wanted = model.alone()
    for table, actual, expected in zip(tables, rows, wanted[0], strict=True):
        reference.assert_close(actual, own_rows(table, expected), 1e-5, message="rows")
    _check(model, [], trained, norms, "session")
    restart()


def clipping_of_uneven_ranks():
    """A rank without gradients takes part; one that fails is heard of by all; a norm that is no number is so on all."""
    n, rank = sok.num_ranks(), sok.rank()
    last, dense = n - 1, tf.constant([3.0, 4.0])
    table = sok.Variable(np.ones((2 * n, 2), np.float32), name="items")

    def of_last():
        ids = tf.fill([1], last)  # a row of the last rank
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.all2all_dense_embedding(table, ids))
        return tape.gradient(loss, table)

    def clip():
        whole = of_last()
        gradient = whole if rank == last else None
        (clipped, none, replica), norm = sok.clip_by_global_norm([gradient, None, dense], 1.0)
        assert none is None and (clipped is None) == (gradient is None)
        norms = [norm, sok.global_norm([clipped, replica]), sok.global_norm([gradient, gradient])]
        # The values are an output, so that a function has the exchange of the backward pass on all ranks.
        return norms, replica, (sok.global_norm([]), sok.global_norm([None])), whole.values

    wanted = math.sqrt(2 * n**2 + 25)  # of n ranks that each look a row of 2 up
    for run in (clip, tf.function(clip)):
        norms, replica, nothing, _ = run()
        np.testing.assert_allclose(norms, [wanted, 1.0, 2 * n], rtol=1e-6)
        np.testing.assert_allclose(replica, dense / wanted, rtol=1e-6)
        np.testing.assert_array_equal(nothing, [0, 0])
    for bad in (math.nan, math.inf):
        gradient = of_last()
        gradient = tf.IndexedSlices(bad * gradient.values, gradient.indices, gradient.dense_shape)
        gradient = gradient if rank == last else None
        (clipped, replica), norm = sok.clip_by_global_norm([gradient, dense], 1.0)
        assert not np.isfinite(norm) and np.isnan(replica).all()
        assert clipped is None or np.isnan(clipped.values).all()
    differing = sok.clip_by_global_norm([dense + rank], 1.0)[1]  # replicas that are none have one norm all the same
    assert len(np.unique(gathered(differing.numpy()))) == 1

    try:
        sok.global_norm([tf.ones([2], tf.int32 if rank == last else tf.float32)])
    except tf.errors.AbortedError as error:
        assert rank != last and f"rank {last} has failed" in str(error), error
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError, TypeError, ValueError):
        assert rank == last
    else:
        raise AssertionError("no error")
    np.testing.assert_allclose(sok.global_norm([dense]), 5)

    clipping_optimizer = tf.keras.optimizers.Adam(global_clipnorm=1.0)
    try:
        sok.OptimizerWrapper(clipping_optimizer).build([table])
    except NotImplementedError as error:
        assert n > 1 and "sok.clip_by_global_norm" in str(error), error
    else:
        assert n == 1, "no error"


def _before(op):
    """The types of all operations that one waits for."""
    seen, left = {}, [op]
    while left:
        last = left.pop()
        for each in (*(tensor.op for tensor in last.inputs), *last.control_inputs):
            if each.name not in seen:
                seen[each.name] = each.type
                left.append(each)
    return set(seen.values())


def clipping_after_failures():
    """Where a lookup of a function fails on all ranks, none is left waiting for another in a clipped step."""
    n, rank = sok.num_ranks(), sok.rank()
    tables = [sok.Variable(np.ones((2 * n, 2), np.float32), name=f"failing{i}") for i in range(2)]
    optimizer = sok.OptimizerWrapper(sok.SGD(0.5))

    @tf.function(reduce_retracing=True)
    def step(ids):
        with tf.GradientTape() as tape:
            rows = sok.all2all_dense_embedding(tables, [ids, ids])
            loss = tf.add_n([tf.reduce_sum(each**2) for each in rows])
        gradients, norm = sok.clip_by_global_norm(tape.gradient(loss, tables), 1.0)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return norm

    graph = step.get_concrete_function(tf.constant([0, n])).graph
    asked = [op for op in graph.get_operations() if op.type == "SokCheckUpdates"]  # not over NCCL, nor of one rank
    assert all("SokReduce" in _before(op) for op in asked)
    for turn in range(6):
        bad = turn % 2 and rank == n - 1
        try:
            norm = step(tf.constant([2 * n if bad else turn % n, n]))
        except tf.errors.InvalidArgumentError as error:
            assert turn % 2 and ("outside" in str(error) or f"rank {n - 1}" in str(error)), error
        else:
            assert turn % 2 == 0, "no error"
            assert norm > 0 and len(np.unique(gathered(norm.numpy()))) == 1


def clipping_in_a_strategy():
    """Within strategy.run the norm of tables is taken, and that of dense gradients refused until it is given."""
    strategy, n = tensorflow_support.strategy, sok.num_ranks()
    if strategy is None:
        return
    with strategy.scope():
        table = sok.Variable(np.ones((2 * n, 2), np.float32), name="within")
    refused = []

    @tf.function
    def step():
        dense = tf.constant([3.0, 4.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.all2all_dense_embedding(table, tf.range(2 * n)))
        gradient = tape.gradient(loss, table)
        norm = sok.global_norm([gradient])
        try:
            sok.global_norm([gradient, dense])
        except RuntimeError as error:
            refused.append(str(error))
        (clipped, replica), used = sok.clip_by_global_norm([gradient, dense], 1.0, use_norm=norm)
        return norm, used, clipped.values, replica

    norm, used, values, replica = strategy.run(step)
    assert bool(refused) == (n > 1) and all("not summed" in each for each in refused)
    np.testing.assert_allclose([norm, used], math.sqrt(4 * n) * n, rtol=1e-6)
    np.testing.assert_allclose(values, np.full((2, 2), n / norm), rtol=1e-6)
    np.testing.assert_allclose(replica, [3 / norm, 4 / norm], rtol=1e-6)
