# SPDX-License-Identifier: Apache-2.0
"""What `tf.distribute` says of this process: jobs and strategies that the tables' ranks do not cover are refused.

Tables are sharded over processes, each of which has one replica. A second replica in the process would step the same
rows again, and workers that the ranks do not cover would each train tables of their own, without any message.
"""

from __future__ import annotations

import os

import tensorflow as tf

_REMEDY = (
    "Instead start one process a GPU, each with its TF_CONFIG, and begin with\n"
    "    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # which sees one GPU\n"
    '    sok.init(comm_tool="tensorflow")\n'
    "or start them with `horovodrun -np N python ...`, and begin with\n"
    "    hvd.init()  # after `import horovod.tensorflow as hvd`\n"
    "    sok.init()\n"
)
_ALONE = 'Each would train tables of its own; where that is meant, call sok.init(comm_tool="single")'


def check(num_ranks: int, alone: bool) -> None:
    """Raises RuntimeError within a strategy whose replicas are not the ranks, one a process.

    alone: whether the user has said, by comm_tool="single", that other processes do not matter.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    name = type(strategy).__name__
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise RuntimeError(f"tables cannot be on the servers of a {name}. {_REMEDY}")
    here, everywhere = len(strategy.extended.worker_devices), strategy.num_replicas_in_sync
    if here > 1:
        raise RuntimeError(f"{name} has {here} replicas in this process, which would all step the same rows. {_REMEDY}")
    if everywhere not in (1, num_ranks) and not alone:
        raise RuntimeError(
            f"{name} has {everywhere} workers, but tables would be sharded over {_ranks(num_ranks)}. {_REMEDY}"
        )


def sums_gradients() -> bool:
    """Whether this is within `strategy.run` of several workers, where optimizers of TensorFlow and Keras themselves sum
    the gradients of dense variables over the workers.
    """
    return not tf.distribute.in_cross_replica_context() and tf.distribute.get_strategy().num_replicas_in_sync > 1


def check_own_variables(what: str) -> None:
    """Raises NotImplementedError within a strategy of several workers, which takes variables that one rank alone has
    for copies of one: it would give all ranks their first values and sum their gradients.

    what: who has such variables.
    """
    if tf.distribute.has_strategy() and (count := tf.distribute.get_strategy().num_replicas_in_sync) > 1:
        raise NotImplementedError(
            f"{what} on one rank each, which a {type(tf.distribute.get_strategy()).__name__} of {count} workers would "
            "take for copies of one variable: make it outside of the strategy's scope and train it outside of "
            'strategy.run, after sok.init(comm_tool="tensorflow"), or under Horovod'
        )


def check_job(num_ranks: int, known: int) -> None:
    """Raises RuntimeError where there is a job of several processes and the engine found this one alone.

    known: the ranks of the engine that has most. TF_CONFIG may describe more.
    """
    if known > 1 and num_ranks == 1:
        raise RuntimeError(f"{known} processes are connected, but not by this comm_tool. {_ALONE}. {_REMEDY}")
    if not os.environ.get("TF_CONFIG"):
        return
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = resolver.cluster_spec().as_dict()
    tasks.pop("evaluator", None)
    count = sum(len(addresses) for addresses in tasks.values())
    if count > 1 and num_ranks == 1 and resolver.task_type != "evaluator":
        raise RuntimeError(
            f"TF_CONFIG describes a job of {count} processes, which nothing connects. {_ALONE}. {_REMEDY}"
        )


def _ranks(num_ranks: int) -> str:
    return "this process alone" if num_ranks == 1 else f"{num_ranks} ranks"
