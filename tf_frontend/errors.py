# SPDX-License-Identifier: Apache-2.0
"""What a status of the core becomes in TensorFlow.

The conversion itself is in csrc/support.cc, where the ops are; this table says the same for readers and tests.
"""

from __future__ import annotations

import tensorflow as tf

from sparse_operation_kit.core import _library

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
