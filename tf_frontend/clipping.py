# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients over all ranks, and clipping by them: TensorFlow's functions see this rank's rows of tables alone,
so that each rank would scale by another factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import colocate_with

from sparse_operation_kit.tensorflow import communication, runtime, strategies
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.gradient import of_this_rank, scaled_values

_NAME = "sok_global_norm"


@as_written
def global_norm(t_list: Sequence[Any], name: str | None = None) -> tf.Tensor:
    """The norm of all gradients of a model as one vector, as tf.linalg.global_norm, the same on every rank.

    Of tables, whose gradients are of this rank's rows, the rows of all ranks count. A row that several lookups of a
    step named counts once, with their sum. Other gradients are replicas and count once.

    With several ranks every rank makes the call, whatever gradients it has, and waits for the others.

    Args:
      t_list: gradients, tensors or tf.IndexedSlices; None is passed over. Those of tables as a tape gives them where it
        and the lookups are in one function, or both eager; in all cases as `sok.DistributedGradientTape` gives them.
        What arithmetic makes of their tf.IndexedSlices is known as well. Dense ones the same on every rank, as
        `sok.DistributedGradientTape` averages them. Those that `sok.DistributedOptimizer` is yet to average are not.
      name: of the operation.

    Returns:
      [], float32 (float64 where a gradient is).

    Raises:
      TypeError: `t_list` is not a list or another sequence.
      RuntimeError: before init(); within `strategy.run` of several workers, where dense gradients are not yet summed,
        for any list that has some.
      tf.errors.OpError: the gradient of a table whose rows were evicted since. Eagerly tf.errors.AbortedError where
        that happened on another rank.
    """
    gradients = _of_list(t_list)
    with tf.name_scope(name or "global_norm"):
        return _norm(gradients)


@as_written
def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None, name: str | None = None
) -> tuple[list[Any], tf.Tensor]:
    """Scales the gradients of a model so that their norm over all ranks is at most `clip_norm`, as
    tf.clip_by_global_norm does in one process.

    With several ranks every rank makes the call with the same `clip_norm`, between the tape and `apply_gradients`::

        with sok.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = ...
        gradients, norm = sok.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        optimizer.apply_gradients(zip(gradients, variables))

    Args:
      t_list: as of :func:`global_norm`.
      clip_norm: a positive number, or a scalar.
      use_norm: what :func:`global_norm` gave; None: it is called. With it the ranks need not meet.
      name: of the operation.

    Returns:
      (the gradients times clip_norm / max(norm, clip_norm), with None where it was; the norm before). All are NaN where
      the norm is NaN or infinite. Tensors stay tensors. Gradients of tables stay such, with each row once.

    Raises:
      As :func:`global_norm`. Within `strategy.run` nothing is refused with `use_norm`.
    """
    gradients = _of_list(t_list)
    with tf.name_scope(name or "clip_by_global_norm"):
        norm = _norm(gradients) if use_norm is None else tf.convert_to_tensor(use_norm)
        limit = tf.cast(clip_norm, norm.dtype) if tf.is_tensor(clip_norm) else tf.constant(clip_norm, norm.dtype)
        # The difference is NaN where the norm is NaN or infinite.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [None if each is None else scaled_values(each, factor) for each in gradients], norm


def _of_list(t_list: Sequence[Any]) -> list[Any]:
    if not isinstance(t_list, Sequence) or isinstance(t_list, str):
        raise TypeError(f"t_list must be a list of gradients, got {type(t_list).__name__}")
    return list(t_list)


def _norm(gradients: list[Any]) -> tf.Tensor:
    """Of the gradients of all ranks. Those that are of tables in parts are put together in the list."""
    exchange = runtime.get().exchange
    failure, dtype = None, tf.float32
    total = tf.zeros([], tf.float64)
    try:
        total, dtype = _squares(gradients)
    except Exception as error:
        if exchange is None or not tf.executing_eagerly():
            raise
        failure = error
    if exchange is not None:
        # Where it is does not depend on what gradients this rank has.
        with tf.device(exchange.meeting_place()):
            total = _over_ranks(total, failure)
    return tf.cast(tf.sqrt(total), dtype)


def _squares(gradients: list[Any]) -> tuple[tf.Tensor, tf.DType]:
    """(this rank's share of the sum of squares, [] float64; the dtype of the norm)."""
    own, replicas = [], []
    for i, gradient in enumerate(gradients):
        of_rank = None if gradient is None else of_this_rank(gradient)
        if of_rank is not None:
            gradients[i] = of_rank
            own.append(_half_square(of_rank))
        elif gradient is not None:
            replicas.append(_half_square(gradient))
    if replicas and strategies.sums_gradients():
        raise RuntimeError(
            "within strategy.run dense gradients are not summed over the workers yet, so their norm is not known: take "
            "the norm of tables by itself, or sum the others first and say what it is with use_norm"
        )
    dtype = tf.float64 if any(each.dtype == tf.float64 for each in (*own, *replicas)) else tf.float32
    # Of replicas each rank adds its part: so all get the same bits, should these differ.
    return _twice_sum(own, dtype) + _twice_sum(replicas, dtype) / runtime.num_ranks(), dtype


def _half_square(gradient: Any) -> tf.Tensor:
    """Half the sum of squares, [] float32 or float64."""
    values = tf.convert_to_tensor(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
    with colocate_with(values):
        return tf.nn.l2_loss(tf.cast(values, tf.float32) if values.dtype.size < 4 else values)


def _twice_sum(halves: list[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    if not halves:
        return tf.zeros([], tf.float64)
    return 2.0 * tf.reduce_sum(tf.cast(tf.stack([tf.cast(half, dtype) for half in halves]), tf.float64))


def _over_ranks(mine: tf.Tensor, failure: Exception | None) -> tf.Tensor:
    """The sum over the ranks. Eagerly, where one cannot do its part all hear of it; in a graph that one's run ends."""
    if not tf.executing_eagerly():
        # Of zeros that TensorFlow takes for no constant, so that a rank without gradients gives none. What follows from
        # constants is computed before a step begins, and other ranks would not come to it.
        zeros = tf.raw_ops.Empty(shape=[1], dtype=mine.dtype, init=True)
        return tf.reshape(communication.allreduce(mine + zeros, "sum", name=_NAME), [])
    state = runtime.get()
    failed = np.zeros(state.num_ranks)
    failed[state.rank] = failure is not None
    summed = communication.allreduce(tf.concat([tf.reshape(mine, [1]), failed], 0), "sum", name=_NAME)
    if failure is not None:
        raise failure
    ranks = np.flatnonzero(summed[1:].numpy()).tolist()
    if ranks:
        raise tf.errors.AbortedError(
            None, None, f"rank {ranks[0]} has failed in the norm of the gradients (its own message says why)"
        )
    return summed[0]
