# SPDX-License-Identifier: Apache-2.0
"""Where ops and variables go when tables lie on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from sparse_operation_kit import core, dynamic

HOST = "CPU:0"
"""Where numbers are that ops take in host memory: made on a GPU they would be copied back at every step."""


def beside(variable: Any) -> contextlib.AbstractContextManager[Any]:
    """A scope that places ops and new variables where a variable is.

    Ops that take the variable itself need none: TensorFlow places them with it. In a tf.compat.v1 graph a variable may
    have no device yet; then they are placed with it whenever it gets one.
    """
    handle = variable.handle
    if handle.device:
        return tf.device(handle.device)
    return handle.graph.colocate_with(handle.op)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """A scope that places ops on the host, also where those around are placed with a variable on a GPU."""
    with ops.colocate_with(None, ignore_existing=True), tf.device(HOST):
        yield


def is_on_gpu(value: Any) -> bool:
    """Whether `value` is a variable that lies on a GPU, as far as that is known."""
    handle = getattr(value, "handle", None)
    return isinstance(value, tf.Variable) and handle is not None and "GPU:" in handle.device


def is_in_xla() -> bool:
    """Whether XLA compiles what is traced now."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def memory_bytes(variable: Any) -> int:
    """All memory of the device that a variable is on, in bytes: of the GPU, or of the host."""
    if not is_on_gpu(variable):
        return dynamic.host_memory_bytes()
    gpu = gpu_of(tf.DeviceSpec.from_string(variable.device).device_index)
    return gpu.total_memory if gpu is not None else 0


def gpu_of(logical: int = 0) -> core.DeviceProperties | None:
    """A GPU that TensorFlow uses; None where it uses none."""
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return None
    return core.device_properties(int(visible[min(logical, len(visible) - 1)].name.rsplit(":", 1)[1]))


def check_together(tables: Sequence[Any]) -> None:
    """Raises ValueError unless the tables of one call lie on one device."""
    known: tuple[str, str] | None = None
    for table in tables:
        device = table.handle.device  # "" in a tf.compat.v1 graph that leaves it to TensorFlow
        if not device:
            continue
        if known is None:
            known = (table.table_name, device)
        elif device != known[1]:
            raise ValueError(
                f"tables of one call must be on one device, but '{known[0]}' is on {known[1]} and "
                f"'{table.table_name}' on {device}: look them up in calls of their own"
            )
