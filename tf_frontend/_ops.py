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
    "SokGatherCombine",
    "SokGather",
    "SokWeightGradient",
    "SokReduce",
    "SokTableCounts",
    "SokHeld",
    "SokFind",
    "SokScores",
    "SokExport",
    "SokReadNumber",
    "SokOutside",
    "SokInside",
)


def _load() -> Any:
    _library.load()  # libsok_tensorflow.so needs libsok_core.so and finds it by its SONAME
    if not PATH.is_file():
        raise ImportError(
            f"the TensorFlow ops of sparse_operation_kit are missing: no file {PATH}. Install the package with "
            "TensorFlow present (`SOK_WITH_TENSORFLOW=1 pip install --no-build-isolation .`) or, in a source checkout, "
            "run `python tools/build.py tensorflow`."
        )
    try:
        return tf.load_op_library(str(PATH))
    except (tf.errors.NotFoundError, tf.errors.OpError, OSError) as error:
        raise ImportError(
            f"{PATH} cannot be loaded by TensorFlow {tf.__version__}: {error}. It was probably built for another "
            "version of TensorFlow; build it again with `python tools/build.py tensorflow`."
        ) from error


ops: Any = _load()
"""The functions of the ops: sok_gather_combine, sok_route, ..."""

# tf.function may run lookups of one table at the same time, since they do not write to it.
for _name in _READERS:
    auto_control_deps_utils.register_read_only_resource_op(_name)
