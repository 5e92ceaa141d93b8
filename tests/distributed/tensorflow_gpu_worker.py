# SPDX-License-Identifier: Apache-2.0
"""What test_tensorflow_gpu.py runs on every rank: `horovodrun -np N python tensorflow_gpu_worker.py CHECK ...`, a GPU a
rank. They run as `checking` says.
"""

import itertools
import logging
import os
import pathlib
import signal
import sys
import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow_support import start_anew, take_own_gpu

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime
from sparse_operation_kit.tensorflow.exchange import EngineExchange, NcclExchange

# After tensorflow_support, which loads it.
import checking  # isort: skip

ROWS = 1000


def restart(**options):
    runtime.shutdown()
    sok.init(**options)
    return runtime.get().exchange


def table_of(name, dimension=16):
    with tf.device("GPU:0"):
        return sok.Variable(shape=(ROWS, dimension), initializer="uniform", name=name)


def batch(step, bags=257):
    """This rank's ids, ragged, on the host."""
    rng = np.random.default_rng(step * sok.num_ranks() + sok.rank())
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 5, bags))])
    return tf.RaggedTensor.from_row_splits(rng.integers(0, ROWS, splits[-1]), splits)


def expect(error, message, call):
    try:
        call()
    except error as caught:
        assert message in str(caught), str(caught)
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


def counts_of(number):
    """[from rank, to rank]: even, uneven and empty ones, the same on all ranks."""
    rng = np.random.default_rng(number)
    high = (2, 50, 5_000, 300_000)[number % 4]
    shape = (sok.num_ranks(), sok.num_ranks())
    return rng.integers(0, high, shape) * rng.integers(0, 2, shape)


# --- checks ----------------------------------------------------------------------------------------------------------


def equals_the_engine():
    """What NCCL brings is what Horovod brings, values and gradients, of every dtype."""
    exchange = restart(exchange="nccl")
    assert isinstance(exchange, NcclExchange)
    engine = EngineExchange(exchange.engine)
    for number in range(24):
        counts = counts_of(number)
        send, receive = counts[sok.rank()], counts[:, sok.rank()]
        dtype = (tf.float32, tf.int64, tf.float16, tf.uint8, tf.float64, tf.int32)[number % 6]
        values = np.random.default_rng(number * 10 + sok.rank()).integers(0, 100, (send.sum(), number % 3 + 1))
        with tf.device("GPU:0"):
            here = tf.identity(tf.constant(values, dtype))
        with tf.device("CPU:0"):
            there = tf.constant(values, tf.float64)
        received = exchange.all_to_all(here, tf.constant(send), tf.constant(receive), f"e{number}")
        expected = engine.all_to_all(there, tf.constant(send, tf.int32), None, f"h{number}")
        assert received.dtype == dtype
        np.testing.assert_array_equal(received.numpy().astype(np.float64), expected.numpy())
        with tf.device("GPU:0"):
            unknown = exchange.all_to_all(here, tf.constant(send), None, f"u{number}")
        np.testing.assert_array_equal(unknown.numpy(), received.numpy())
        if dtype == tf.float32:
            with tf.GradientTape() as tape:
                tape.watch(here)
                received = exchange.all_to_all(here, tf.constant(send), tf.constant(receive))
                loss = tf.reduce_sum(received * (sok.rank() + 1.0))
            factors = np.repeat(np.arange(1.0, sok.num_ranks() + 1), send)
            np.testing.assert_array_equal(tape.gradient(loss, here).numpy(), np.tile(factors, (here.shape[1], 1)).T)
    for splits in ([-1, 1], [1, 1, 1, 1, 1], [2**40] * sok.num_ranks()):
        refuses(exchange, tf.constant(splits, tf.int64))


def refuses(exchange, splits):
    with tf.device("GPU:0"):
        values = tf.zeros([sok.num_ranks()])
    expect(tf.errors.InvalidArgumentError, "splits", lambda: exchange.all_to_all(values, splits, splits))


def training():
    """Lookups and steps over NCCL give what they give over Horovod, eagerly and in functions."""
    results = []
    for kind in ("nccl", "auto", "horovod"):
        for compiled in (False, True):
            exchange = restart(exchange=kind)
            tables = [table_of("a"), table_of("b", 8)]
            optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))

            def step(first, second, tables=tables, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    # Two calls: their exchanges share no data, and must run in one order nevertheless.
                    outputs = [
                        sok.lookup_sparse(tables[0], first, combiners="sum"),
                        sok.lookup_sparse(tables[1], second, combiners="mean"),
                    ]
                    loss = tf.add_n([tf.reduce_sum(output * output) for output in outputs])
                gradients = tape.gradient(loss, tables)
                optimizer.apply_gradients(zip(gradients, tables, strict=True))
                return loss

            run = tf.function(step, reduce_retracing=True) if compiled else step
            losses = [float(run(batch(number), batch(100 + number))) for number in range(12)]
            results.append((np.array(losses), *(table.numpy() for table in tables)))
            assert (kind == "horovod") == isinstance(exchange, EngineExchange)
            assert kind == "horovod" or exchange._communicator is not None
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def across_functions():
    """A lookup in a function, its gradient outside: the function that computes it has exchanges of its own."""
    restart(exchange="nccl")
    tables = [table_of("a"), table_of("b", 8), table_of("c", 4)]

    @tf.function(reduce_retracing=True)
    def forward(*ids):
        return [sok.lookup_sparse(table, one) for table, one in zip(tables, ids, strict=True)]

    for number in range(8):
        with tf.GradientTape() as tape:
            outputs = forward(*(batch(number + 50 * t) for t in range(3)))
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs])
        for gradient in tape.gradient(loss, tables):
            tf.convert_to_tensor(gradient)


def bad_id():
    """An id out of range on one rank raises on all, and the exchange goes on working."""
    restart(exchange="nccl")
    table = table_of("items")
    good = batch(1)
    wrong = good.with_values(tf.concat([[ROWS], good.values[1:]], 0)) if sok.rank() == 0 else good
    message = f"key {ROWS} is outside" if sok.rank() == 0 else "rank 0 could not look up its batch"
    expect(tf.errors.InvalidArgumentError, message, lambda: sok.lookup_sparse(table, wrong))
    sok.lookup_sparse(table, good)


def reductions():
    """What NCCL reduces is what Horovod reduces; with gradients, in functions, of dense variables in every step."""
    exchange = restart(exchange="nccl")
    rng = np.random.default_rng(sok.rank())
    for op in ("sum", "average", "min", "max"):
        for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int64, tf.int32):
            if op == "average" and dtype.is_integer:
                continue
            values = [rng.integers(-9, 9, shape) for shape in ((3, 5), (0, 2), (), (70_000,))]
            with tf.device("GPU:0"):
                here = [tf.identity(tf.constant(value, dtype)) for value in values]
            with tf.device("CPU:0"):
                there = [tf.constant(value, tf.float64) for value in values]
            expected = exchange.engine.all_reduce(there, op, f"{op}_{dtype.name}")
            for run in (exchange.all_reduce, tf.function(exchange.all_reduce)):
                reduced = run(here, op, f"r_{op}_{dtype.name}", here[0].device)
                for got, right, given in zip(reduced, expected, here, strict=True):
                    assert got.dtype == dtype and got.shape == given.shape
                    np.testing.assert_array_equal(got.numpy().astype(np.float64), right.numpy())
    with tf.device("GPU:0"):
        x = tf.identity(tf.constant([1.0, 2.0]))
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(sok.communication.allreduce(x) * (sok.rank() + 1.0))
    total = sum(range(1, sok.num_ranks() + 1))
    np.testing.assert_array_equal(tape.gradient(loss, x).numpy(), [total, total])

    # A function does not know where its arguments will be.
    here, there = tf.identity(x), tf.constant([3.0 + sok.rank()])
    with tf.device("CPU:0"):
        there = tf.identity(there)

    def unplaced(first, second):
        return [
            sok.communication.allreduce(2 * first, name="first"),
            sok.communication.allreduce(second, "max", name="second"),
            sok.communication.alltoall(tf.repeat(second, sok.num_ranks()), name="third"),
        ]

    traced = tf.function(unplaced).get_concrete_function(here, there)
    operations = [op.type for op in traced.graph.get_operations()]
    assert not [kind for kind in operations if kind.startswith("Horovod")], operations
    assert operations.count("SokAllReduce") == 2 and operations.count("SokAllToAll") == 1, operations
    ranks = sok.num_ranks()
    for got in (traced(here, there), unplaced(here, there)):
        wanted = ([2.0 * ranks, 4.0 * ranks], [2.0 + ranks], 3.0 + np.arange(ranks))
        for one, right in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one.numpy(), right)

    with tf.device("GPU:0"):
        dense = [tf.Variable(tf.ones([50, 3])), tf.Variable(tf.ones([3]))]

    def averaged():
        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(dense[0]) * (sok.rank() + 1.0) + tf.reduce_sum(dense[1] ** 2) * sok.rank()
        return tape.gradient(loss, dense)

    traced = tf.function(averaged).get_concrete_function()
    operations = [op for op in traced.graph.get_operations() if "AllReduce" in op.type or "Horovod" in op.type]
    assert [op.type for op in operations] == ["SokAllReduce"], operations
    for gradients in (averaged(), traced()):
        np.testing.assert_allclose(gradients[0].numpy(), np.full((50, 3), total / sok.num_ranks()), rtol=1e-6)
        np.testing.assert_allclose(gradients[1].numpy(), [sok.num_ranks() - 1] * 3, rtol=1e-6)


def tiers():
    """A dynamic table of which a tenth is on the GPU trains as one that is there whole, and what was prefetched is on
    the GPU when it is looked up.
    """
    restart(exchange="nccl")
    tiered: dict[str, Any] = {"max_hbm_for_vectors": 3000 * 64e-9}
    with tf.device("GPU:0"):
        tables = [sok.DynamicVariable(16, "normal", name="t", max_capacity=30_000, **more) for more in ({}, tiered)]
    optimizers = [sok.OptimizerWrapper(sok.RowWiseAdagrad(0.1)) for _ in tables]
    far, rng = tables[1], np.random.default_rng(sok.rank())

    def bags(keys):
        with tf.device("GPU:0"):
            return tf.RaggedTensor.from_uniform_row_length(tf.identity(keys), 3)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys):
        outputs = []
        for table, optimizer in zip(tables, optimizers, strict=True):
            with tf.GradientTape() as tape:
                outputs.append(sok.lookup_sparse(table, bags(keys), combiners="mean"))
                loss = tf.reduce_sum(outputs[-1] ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return outputs

    def train(keys):
        outputs = step(tf.constant(keys, tf.int64))
        np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)

    for first in range(0, 30_000, 1500):
        train(np.arange(first, first + 1500))
    batches = [rng.integers(0, 30_000, 600) for _ in range(9)]
    sok.prefetch(far, bags(tf.constant(batches[0])))
    before = far.statistics()
    for keys, following in itertools.pairwise(batches):
        train(keys)
        sok.prefetch(far, bags(tf.constant(following)))
    after = far.statistics()
    sok.check_errors()
    assert after.host_hits == before.host_hits and after.moves > before.moves, (before, after)
    assert after.lookups - before.lookups == after.device_hits - before.device_hits > 0, (before, after)
    with tf.device("GPU:0"):
        every = tf.RaggedTensor.from_uniform_row_length(tf.range(30_000, dtype=tf.int64), 1)
    rows = [sok.lookup_sparse(table, every, training=False) for table in tables]
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-5, atol=1e-6)


def collectives():
    """sok.communication.alltoall of tensors on the GPU."""
    restart(exchange="nccl")
    ranks, rank = sok.num_ranks(), sok.rank()
    with tf.device("GPU:0"):
        values = tf.identity(tf.range(2.0 * ranks) + 100.0 * rank)
    received = sok.communication.alltoall(values)
    expected = [100.0 * r + 2 * rank + i for r in range(ranks) for i in range(2)]
    np.testing.assert_array_equal(received.numpy(), expected)
    splits = [2 * ranks - ranks + 1] + [1] * (ranks - 1)
    received = sok.communication.alltoall(values, splits)
    assert received.shape[0] == ranks * splits[rank]


def slow_peer():
    """A rank that comes 20 s late is no error."""
    exchange = restart(exchange="nccl")
    with tf.device("GPU:0"):
        counts = tf.ones([sok.num_ranks(), 1], tf.int64)
    exchange.swap_counts(counts)
    if sok.rank() == 0:
        time.sleep(20)
    sent, received = exchange.swap_counts(counts)
    assert received.numpy().tolist() == sent.numpy().tolist() == [[1]] * sok.num_ranks()


def dead_peer():
    """The last rank is killed; the others get their error, or the launcher ends them first."""
    exchange = restart(exchange="nccl")
    with tf.device("GPU:0"):
        counts = tf.ones([sok.num_ranks(), 1], tf.int64)
    exchange.swap_counts(counts)
    if sok.rank() == sok.num_ranks() - 1:
        pathlib.Path(os.environ["TEST_FOLDER"], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    print(expect(tf.errors.UnavailableError, "of this host ended", lambda: exchange.swap_counts(counts)), flush=True)
    os._exit(3)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    hvd.init()
    take_own_gpu(hvd.local_rank())
    sok.init()
    if not checking.run(sys.argv[1:], globals().get, hvd.rank(), hvd.size(), start_anew):
        sys.exit(1)
