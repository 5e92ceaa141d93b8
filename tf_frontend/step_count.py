# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step count where Keras keeps it on a GPU, known on the host without asking the GPU at every step.

`SokReadNumber` fetches a variable once and knows its number for as long as nobody writes to it. A step of Keras adds 1
to the count. In a tf.function this module looks at the operations that the step made: where exactly one of them writes
to the count, and adds 1 to what it was, `SokCountStep` tells this to the next `SokReadNumber`, which then fetches
nothing. Whatever else changes the count, an assignment, a checkpoint, another function, gives the variable memory that
is not known, and the number is fetched again. Eagerly there are no operations to look at, and it is fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import devices, keras_compat
from sparse_operation_kit.tensorflow._ops import ops

_READERS = ("ReadVariableOp", "SokReadNumber", "SokCountStep", "VariableShape", "VarIsInitializedOp")


@contextlib.contextmanager
def followed(counter: Any) -> Iterator[None]:
    """A scope for one step of an optimizer that counts it in `counter`."""
    variable = keras_compat.raw(counter)
    if not tf.inside_function() or not devices.is_on_gpu(variable) or variable.dtype != tf.int64:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    yield
    if counts_once(graph.capture(variable.handle), graph.get_operations()[first:]):
        ops.sok_count_step([variable.handle])


def counts_once(handle: Any, operations: Sequence[Any]) -> bool:
    """Whether operations, in the order in which they were made, ask for the number of a variable and then write to it
    once, by adding 1.
    """
    users = [op for op in operations if any(each is handle for each in op.inputs)]
    writers = [op for op in users if op.type not in _READERS]
    if len(writers) != 1 or not _adds_one(handle, writers[0], operations):
        return False
    return any(op.type == "SokReadNumber" for op in users[: users.index(writers[0])])


def _adds_one(handle: Any, writer: Any, operations: Sequence[Any]) -> bool:
    if writer.type == "AssignAddVariableOp":
        return _is_one(writer.inputs[1])
    if writer.type != "AssignVariableOp" or writer.inputs[1].op.type not in ("AddV2", "Add"):
        return False
    a, b = writer.inputs[1].op.inputs
    return any(_is_read(handle, x, operations) and _is_one(y) for x, y in ((a, b), (b, a)))


def _is_one(value: Any) -> bool:
    known = tf.get_static_value(value)
    return known is not None and known.ndim == 0 and known == 1


def _is_read(handle: Any, value: Any, operations: Sequence[Any]) -> bool:
    """Whether `value` is the variable as it was read among the operations."""
    while value.op.type == "Identity":
        value = value.op.inputs[0]
    if value.op.type != "ReadVariableOp" or value.op.inputs[0] is not handle:
        return False
    return any(value.op is op for op in operations)
