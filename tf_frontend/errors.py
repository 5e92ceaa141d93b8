# SPDX-License-Identifier: Apache-2.0
"""What a status of the core becomes in TensorFlow, and check_errors.

The conversion itself is in csrc/support.cc, where the ops are; the table here says the same for readers and tests.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit.core import _library
from sparse_operation_kit.tensorflow._ops import ops

EXCEPTIONS: dict[int, type[Exception]] = {
    _library.INVALID_ARGUMENT: tf.errors.InvalidArgumentError,
    # Not tf.errors.OutOfRangeError: that means "end of the data", and Keras ends an epoch on it without a word.
    _library.OUT_OF_RANGE: tf.errors.InvalidArgumentError,
    _library.RESOURCE_EXHAUSTED: tf.errors.ResourceExhaustedError,
    _library.FAILED_PRECONDITION: tf.errors.FailedPreconditionError,
    _library.UNIMPLEMENTED: tf.errors.UnimplementedError,
    _library.UNAVAILABLE: tf.errors.UnavailableError,
    _library.INTERNAL: tf.errors.InternalError,
}
"""The exception that an op raises for each status of the core but SOK_OK."""


def check_errors() -> Any:
    """Waits for this process's GPUs and raises what lookups and updates there have found wrong.

    An op on a GPU returns before the GPU has looked at the keys. A key outside its table is raised by the next call
    that uses tables (with several ranks, by the next lookup, on all of them), before any of them changes; call this to
    know at once, for example after the last step. Tables on the CPU raise by themselves. It asks no other rank: what
    one has found in a lookup of a dynamic table, or in a step, it has told the others over NCCL by then.

    Returns:
      None; in a graph the operation to run, after the step that it checks.

    Raises:
      tf.errors.InvalidArgumentError: names the table, the key and the range, as the lookup on the CPU does.
    """
    checks = []
    with tf.init_scope(), tf.device("CPU:0"):
        here = tf.DeviceSpec.from_string(tf.constant(0).device)
    for gpu in tf.config.list_logical_devices("GPU"):
        where = tf.DeviceSpec.from_string(gpu.name)
        if where.job is not None and (where.job, where.task) != (here.job, here.task):
            continue  # of another worker of a cluster, which checks its own
        with tf.device(gpu.name):
            checks.append(ops.sok_check_errors())
    return None if tf.executing_eagerly() else tf.group(*checks)
