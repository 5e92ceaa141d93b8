# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
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
    on_host = _on_host(values)
    with tf.device(device):
        copied: tf.Tensor = ops.sok_copy_to_gpu(values=on_host)
    return copied


def _on_host(values: Any) -> tf.Tensor:
    """A tensor in the host's memory, for ops that look at its bytes alone: of a NumPy array in the array's memory,
    where `tf.convert_to_tensor` would copy it, to memory that is not page-locked.
    """
    if (
        isinstance(values, np.ndarray)
        and values.dtype.kind in "biuf"
        and values.dtype.isnative
        and values.dtype.itemsize <= 8
        and values.flags.c_contiguous
        and values.flags.writeable  # NumPy gives no others
        and values.size
        and tf.executing_eagerly()  # else the memory would be read later
        and tf.config.experimental.get_synchronous_execution()
    ):
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(values)


tf.no_gradient("SokCopyToGpu")
