# SPDX-License-Identifier: Apache-2.0
"""What runs between steps, on the host: values as NumPy has them, eagerly or by a session, and the ranks as a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.checkpoint.group import Array
from sparse_operation_kit.tensorflow import communication, runtime


def check_between_steps(what: str) -> None:
    """Raises RuntimeError inside a tf.function, and in a tf.compat.v1 graph without a default session."""
    if tf.inside_function():
        raise RuntimeError(f"{what} runs outside of tf.function: call it between steps")
    if not tf.executing_eagerly() and tf.compat.v1.get_default_session() is None:
        raise RuntimeError(
            f"{what} in a tf.compat.v1 graph takes a default session: call it within `with session.as_default()`"
        )


def on_host(key: Any, function: Callable[..., Any], *arrays: Any) -> Any:
    """function(*arrays) with tensors as NumPy arrays, and None where it returns None.

    In a tf.compat.v1 graph the default session runs it, and the nodes are made at its first call with this key.
    """
    if tf.executing_eagerly():
        results = function(*map(tf.convert_to_tensor, arrays))
        return tf.nest.map_structure(lambda value: None if value is None else value.numpy(), results)
    session = tf.compat.v1.get_default_session()
    nodes = vars(session).setdefault("_sok_host_nodes", {})
    if key not in nodes:
        inputs = [tf.compat.v1.placeholder(array.dtype, [None] * array.ndim) for array in map(np.asarray, arrays)]
        nodes[key] = inputs, function(*inputs)
    inputs, outputs = nodes[key]
    return session.run(outputs, dict(zip(inputs, arrays, strict=True)))


class Group:
    """The ranks that init() found, as sparse_operation_kit.checkpoint.Group wants them."""

    def __init__(self) -> None:
        state = runtime.get()
        self.rank, self.size = state.rank, state.num_ranks

    def allgather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, by rank."""
        if self.size == 1:
            return [data]
        lengths = on_host("lengths", _gather("sok_group_lengths"), np.array([len(data)], np.int64)).tolist()
        joined = on_host("bytes", _gather("sok_group_bytes"), np.frombuffer(data, np.uint8)).tobytes()
        ends = np.cumsum(lengths).tolist()
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def alltoall(self, values: Array, splits: Sequence[int]) -> Array:
        """Sends splits[r] of `values`, [n] float32, to each rank r; what came, by rank."""

        def sent(flat: Any, counts: Any) -> Any:
            return communication.alltoall(flat, counts, name="sok_group_values")

        return np.asarray(on_host("values", sent, np.ascontiguousarray(values), np.asarray(splits, np.int64)))


def _gather(name: str) -> Callable[[Any], Any]:
    return lambda tensor: communication.allgather(tensor, name=name)
