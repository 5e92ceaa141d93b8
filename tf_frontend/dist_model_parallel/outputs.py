# SPDX-License-Identifier: Apache-2.0
"""Pooled vectors that were made where their table is, sent to the ranks whose samples they are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import communication, devices, runtime


def equal_shares(batch: tf.Tensor, num_ranks: int) -> tf.Tensor:
    """[num_ranks] int64 in host memory: the samples of each rank, of `batch` together, a scalar there."""
    message = f"Global batchsize not divisible workers count {num_ranks}."
    with devices.on_host():
        left = tf.math.floormod(batch, num_ranks)
        with tf.control_dependencies([tf.debugging.assert_equal(left, tf.zeros_like(left), message)]):
            return tf.fill([num_ranks], batch // num_ranks)


def send_back(
    outputs: Sequence[tf.Tensor],
    rank_widths: Sequence[Sequence[int]],
    shares: tf.Tensor,
    dtype: Any,
    table: tf.Variable | None = None,
) -> list[tf.Tensor]:
    """Each rank's samples of all outputs of all ranks.

    Args:
      outputs: this rank's, [B, width] each, or of a shape that holds as many elements.
      rank_widths: for each rank the width of each of its outputs.
      shares: [num_ranks] int64 in host memory, which add up to B: the samples of each rank.
      dtype: of the outputs, on all ranks.
      table: beside which they travel; None: as `communication` has it.

    Returns:
      [b, width] for each output, rank by rank.

    Raises:
      ValueError: eagerly, when ranks have batches of different sizes.
      tf.errors.InvalidArgumentError: the same in a function; an output that has not one vector a sample.
    """
    state = runtime.get()
    totals = [sum(widths) for widths in rank_widths]
    with devices.on_host():
        mine, samples = shares[state.rank], tf.reduce_sum(shares)
        shapes = [tf.stack([samples, width]) for width in rank_widths[state.rank]]
        sent, received = shares * totals[state.rank], mine * tf.constant(totals, tf.int64)
    with contextlib.nullcontext() if table is None else devices.beside(table):
        flat = [tf.reshape(output, shape) for output, shape in zip(outputs, shapes, strict=True)]
        joined = tf.reshape(tf.concat(flat, 1), [-1]) if flat else tf.zeros([0], dtype)
    came = communication.alltoall(joined, sent, name="sok_outputs")
    if tf.executing_eagerly() and int(tf.size(came)) != int(mine) * sum(totals):
        raise ValueError(
            f"All input need to have same batchsize. Rank {state.rank} has {int(samples)} samples, another one "
            "another number."
        )
    results: list[tf.Tensor] = []
    messages = tf.split(came, received, num=len(totals))
    for message, total, widths in zip(messages, totals, rank_widths, strict=True):
        if widths:  # sample by sample, its vectors one after another
            results += tf.split(tf.reshape(message, [-1, total]), widths, 1)
    return results
