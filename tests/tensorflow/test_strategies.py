# SPDX-License-Identifier: Apache-2.0
"""Strategies of tf.distribute and jobs of TF_CONFIG: a replica is a rank; what would train wrongly is refused."""

import json

import numpy as np
import pytest
import tensorflow as tf

import sparse_operation_kit as sok
from sparse_operation_kit.tensorflow import runtime, strategies

REMEDY = r"(?s)one process a GPU.*hvd\.init\(\).*sok\.init\(\)"


def two_replicas():
    """Of one process. Whether there is a second device does not matter: nothing is run on it."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize("options", [{}, {"comm_tool": "single"}])
def test_init_refuses_several_replicas_in_one_process(options):
    runtime.shutdown()
    with two_replicas().scope(), pytest.raises(RuntimeError, match=REMEDY) as error:
        sok.init(**options)
    assert "MirroredStrategy has 2 replicas in this process" in str(error.value)
    assert runtime.session.state is None


def test_tables_and_lookups_refuse_them_too():
    """Where init() came before the strategy, and for a dynamic table without init()."""
    table = sok.Variable(np.ones((4, 2), np.float32), name="before")
    strategy = two_replicas()
    for make in (
        lambda: sok.Variable(shape=(4, 2)),
        lambda: sok.DynamicVariable(dimension=2),
        lambda: sok.All2AllDenseEmbedding(4, 2, 1, 1),
        lambda: sok.lookup_sparse(table, tf.ragged.constant([[1]], tf.int64)),
        lambda: strategy.run(lambda: sok.lookup_sparse(table, tf.ragged.constant([[1]], tf.int64))),
        lambda: strategy.run(tf.function(lambda: sok.all2all_dense_embedding(table, tf.constant([1])))),
    ):
        with strategy.scope(), pytest.raises(RuntimeError, match=REMEDY):
            make()
    with pytest.raises(RuntimeError, match="2 replicas in this process"):
        strategy.run(lambda: sok.all2all_dense_embedding(table, tf.constant([1])))
    runtime.shutdown()
    with strategy.scope(), pytest.raises(RuntimeError, match=REMEDY):
        sok.DynamicVariable(dimension=2)
    assert runtime.session.state is None


def test_parameter_servers_are_refused(monkeypatch):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", tf.distribute.OneDeviceStrategy)
    with strategy.scope(), pytest.raises(RuntimeError, match="servers of a OneDeviceStrategy"):
        sok.Variable(shape=(4, 2))


@pytest.mark.parametrize(
    "make", [lambda: tf.distribute.MirroredStrategy(["CPU:0"]), lambda: tf.distribute.OneDeviceStrategy("CPU:0")]
)
def test_one_replica_is_rank_0_of_1(make):
    strategy = make()
    runtime.shutdown()
    with strategy.scope(), tf.device("CPU:0"):
        sok.init()
        table = sok.Variable(np.ones((4, 2), np.float32), name="one")
        dense = tf.Variable([[1.0], [1.0]])
        adam = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum") @ dense)
        variables = [table, dense]
        adam.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    strategy.run(step, (tf.ragged.constant([[1, 1], [2]], tf.int64),))
    assert (sok.rank(), sok.num_ranks()) == (0, 1)
    np.testing.assert_array_equal(table.numpy(), [[1, 1], [-1, -1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(dense.numpy(), [[-2], [-2]])


def job(task, **cluster):
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}})


@pytest.mark.parametrize("cluster", [{"worker": ["a:1", "b:1"]}, {"chief": ["a:1"], "worker": ["b:1"]}])
def test_a_job_that_nothing_connects_is_refused(monkeypatch, cluster):
    """Each worker would train tables of its own."""
    runtime.shutdown()
    monkeypatch.setenv("TF_CONFIG", job("worker", **cluster))
    for begin in (sok.init, lambda: sok.DynamicVariable(dimension=2), lambda: sok.Init(global_batch_size=2)):
        with pytest.raises(RuntimeError, match=REMEDY) as error:
            begin()
        assert "TF_CONFIG describes a job of 2 processes" in str(error.value)
    sok.init(comm_tool="single")  # was meant
    assert sok.num_ranks() == 1


@pytest.mark.parametrize(
    "config",
    [
        "",
        job("worker", worker=["a:1"]),
        job("worker", worker=["a:1"], evaluator=["c:1"]),
        job("evaluator", chief=["a:1"], worker=["b:1"], evaluator=["c:1"]),
    ],
)
def test_jobs_of_one_worker_and_evaluators_are_not(monkeypatch, config):
    runtime.shutdown()
    monkeypatch.setenv("TF_CONFIG", config)
    sok.init()
    assert sok.num_ranks() == 1


def test_ranks_cover_the_job(monkeypatch):
    """Horovod sees the others: a TF_CONFIG beside it, as some launchers leave it, does no harm."""
    monkeypatch.setenv("TF_CONFIG", job("worker", worker=["a:1", "b:1"]))
    strategies.check_job(num_ranks=2, known=2)
