# SPDX-License-Identifier: Apache-2.0
"""Loads libsok_tensorflow.so, once, after the core that it needs."""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from sparse_operation_kit.core import _library

PATH = pathlib.Path(__file__).resolve().parent / "libsok_tensorflow.so"

_READERS = (
    "SokRoute",
    "SokGatherCombine",
    "SokGather",
    "SokWeightGradient",
    "SokReduce",
    "SokCheckUpdates",
    "SokTableCounts",
    "SokHeld",
    "SokFind",
    "SokScores",
    "SokExport",
    "SokReadNumber",
    "SokOutside",
    "SokInside",
)


ops: Any = _library.load_ops(PATH, "TensorFlow", tf.__version__, tf.load_op_library, (tf.errors.OpError, OSError))
"""The functions of the ops: sok_gather_combine, sok_route, ..."""

# tf.function may run lookups of one table at the same time, since they do not write to it.
for _name in _READERS:
    auto_control_deps_utils.register_read_only_resource_op(_name)
