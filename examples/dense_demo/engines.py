# SPDX-License-Identifier: Apache-2.0
"""How ranks find one another, and what is done on all of them: by Horovod, or by a strategy of tf.distribute."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from ..dlrm.tensorflow_model import choose_device, use_threads


class Engine(Protocol):
    """What a model has to know of the ranks that train it together."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where variables and optimizers are made."""

    def run(self, function: Callable[..., tf.Tensor], *arguments: Any) -> tf.Tensor:
        """What the function gives on this rank; called by all together."""

    def summed(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Gradients of dense variables, as an optimizer is to get them, of which the sum over the ranks counts."""


class HorovodEngine:
    """Processes that horovodrun has started, or one process alone."""

    title = "Horovod"

    def __init__(self, threads: int) -> None:
        import horovod.tensorflow as hvd

        self._hvd = hvd
        hvd.init()
        _share_host(threads, hvd.local_rank(), hvd.local_size())

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See Engine."""
        return contextlib.nullcontext()

    def run(self, function: Callable[..., tf.Tensor], *arguments: Any) -> tf.Tensor:
        """See Engine."""
        return function(*arguments)

    def summed(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """See Engine."""
        summed: Sequence[tf.Tensor] = self._hvd.grouped_allreduce(list(gradients), op=self._hvd.Sum)
        return summed


class StrategyEngine:
    """The workers of a MultiWorkerMirroredStrategy, which find their places in TF_CONFIG, or one process alone."""

    title = "tf.distribute"

    def __init__(self, threads: int) -> None:
        _share_host(threads, *_place_of_worker(json.loads(os.environ.get("TF_CONFIG", "{}"))))
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See Engine."""
        scope: contextlib.AbstractContextManager[Any] = self._strategy.scope()
        return scope

    def run(self, function: Callable[..., tf.Tensor], *arguments: Any) -> tf.Tensor:
        """See Engine."""
        return self._strategy.run(function, arguments)

    def summed(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """See Engine. Keras's optimizers sum them themselves within a strategy."""
        return gradients


def start(name: str, threads: int) -> HorovodEngine | StrategyEngine:
    """The engine "horovod" or "tensorflow". Call it before any other use of TensorFlow.

    threads: what a rank computes with; 0: the cores divided by the ranks of this host.
    """
    return HorovodEngine(threads) if name == "horovod" else StrategyEngine(threads)


def _place_of_worker(config: Mapping[str, Any]) -> tuple[int, int]:
    """Its number among the workers of its host, and how many these are, by what TF_CONFIG holds."""
    workers = config.get("cluster", {}).get("worker", ["alone:0"])
    hosts = [worker.rpartition(":")[0] for worker in workers]
    index = config.get("task", {}).get("index", 0)
    return hosts[:index].count(hosts[index]), hosts.count(hosts[index])


def _share_host(threads: int, local_rank: int, local_ranks: int) -> None:
    """The rank's part of the cores, and a GPU where there is one for each rank of the host."""
    use_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_ranks))
    choose_device("auto", local_rank, local_ranks)
