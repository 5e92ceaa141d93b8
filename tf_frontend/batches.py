# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a GPU."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow._ops import ops


def copy_to_gpu(values: Any, device: str = "GPU:0") -> tf.Tensor:
    """A tensor on a GPU, copied from the host beside the steps that were queued before.

    TensorFlow's own copies begin when these steps are done, so that a batch that was read ahead comes late
    nevertheless. To be called eagerly, by a thread that prepares the next batches; from page-locked memory it is
    fastest.

    Args:
      values: a NumPy array, or what else `tf.convert_to_tensor` takes; may be changed when this returns.
      device: where the tensor is to be; "CPU:0" makes a copy there.

    Returns:
      The tensor, when it is there. Its memory is used again for a later batch when nothing holds it.

    Raises:
      tf.errors.ResourceExhaustedError: no memory on the GPU. tf.errors.InvalidArgumentError: strings.
    """
    with tf.device("CPU:0"):
        values = tf.convert_to_tensor(values)
    with tf.device(device):
        copied: tf.Tensor = ops.sok_copy_to_gpu(values=values)
    return copied


tf.no_gradient("SokCopyToGpu")
