# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow calls in a backward pass: the gradient of each op of this package.

The ops that look up tables give each table a `PendingGradient` (gradient.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import devices, runtime
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Lookups, Tables
from sparse_operation_kit.tensorflow.gradient import Exchanged, Generation, GradientByKey, PendingGradient, Summand


def _generations(tables: Tables, given: Sequence[tf.Tensor]) -> tuple[Generation | None, ...]:
    """For each table; given: what the op took along, one vector for those with an index or nothing."""
    places = {table: place for place, table in enumerate(tables.indexed)}
    return tuple((given[0], places[i]) if given and i in places else None for i in range(len(tables.names)))


def _dense(gradients: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    return [
        tf.zeros_like(output) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, output in zip(gradients, like, strict=True)
    ]


def _table(handle: Any) -> Any:
    """The table itself, also where control_flow.py stands in between."""
    eager = isinstance(handle, tf.__internal__.EagerTensor)
    return handle if eager or handle.op.type != "SokInside" else handle.op.inputs[0]


@tf.RegisterGradient("SokGatherCombine")
def _gather_combine_gradient(op: Any, *output_gradients: Any) -> list[Any]:
    tables = Tables.of_op(op)
    count = len(tables.names)
    lookups = Lookups.of_op(op, count)
    gradients = _dense(output_gradients, op.outputs)
    side_by_side = len(gradients) < len(lookups.tables)
    first = count + lookups.num_inputs
    generations = _generations(tables, op.inputs[first:])
    summands: list[list[Summand]] = [[] for _ in range(count)]
    weights = iter(lookups.weights)
    column = 0
    for i, table in enumerate(lookups.tables):
        weight = next(weights) if lookups.weighted[i] else None
        where = (gradients[0], column) if side_by_side else (gradients[i], -1)
        members = lookups.members.of_lookup(i)
        column += tables.dimensions[table] * max(1, members)
        bags = (lookups.row_splits[i], weight, lookups.combiners[i])
        summand = Summand(
            *(lookups.keys[i], where[0], *bags), column=where[1], generation=generations[table], members=members
        )
        summands[table].append(summand)
    handles = [_table(handle) for handle in op.inputs[:count]]
    by_key = op.get_attr("by_key")
    read_only = tables.indexed if by_key else []
    pending = [
        None if i in read_only else PendingGradient(handle, tables.only(i), summands[i])
        for i, handle in enumerate(handles)
    ]
    weight_gradients: list[Any] = []
    if lookups.weights:
        with tf.device(devices.HOST):
            no_requests = tf.zeros([0, 0], tf.int64)
        weight_gradients = ops.sok_weight_gradient(
            variables=handles,
            output_gradients=gradients,
            rows=tf.constant([], tf.float32),
            inverse=tf.constant([], tf.int64),
            requests=no_requests,
            generations=list(op.inputs[first:]),
            by_key=by_key,
            **lookups.arguments(),
            **tables.counted_attributes(),
        )
    ids = [None] * (2 * len(lookups.keys))
    return [*pending, *ids, *weight_gradients, *[None] * (len(op.inputs) - first)]


@tf.RegisterGradient("SokReadAndEvict")
def _read_and_evict_gradient(op: Any, rows_gradient: Any, *_: Any) -> list[Any]:
    handle, keys = op.inputs
    values = tf.cast(tf.convert_to_tensor(rows_gradient), tf.float32)
    with tf.control_dependencies(op.outputs[:1]):  # a graph of TF 1 would look for the rows before they are inserted
        keys = tf.identity(keys)
    return [GradientByKey(_table(handle), Tables.of_op(op), keys, values), None]


@tf.RegisterGradient("SokGather")
def _gather_gradient(op: Any, rows_gradient: Any) -> list[Any]:
    tables = Tables.of_op(op)
    count = len(tables.names)
    slots, splits, counts, *generations = op.inputs[count:]
    group = Exchanged(
        *(slots, tf.convert_to_tensor(rows_gradient), splits, counts),
        dimensions=tables.dimensions,
        lookup_tables=tuple(op.get_attr("lookup_tables")),
        generations=_generations(tables, generations),
    )
    read_only = tables.indexed if op.get_attr("by_key") else []
    scale = runtime.get().gradient_scale
    pending = [
        None if i in read_only else PendingGradient(_table(handle), tables.only(i), [], [(group, i)], scale)
        for i, handle in enumerate(op.inputs[:count])
    ]
    return [*pending, *[None] * (len(op.inputs) - count)]


@tf.RegisterGradient("SokCombine")
def _combine_gradient(op: Any, *output_gradients: Any) -> list[Any]:
    tables = Tables.of_op(op)
    lookups = Lookups.of_op(op, 0)
    rows, inverse, order, unique_splits, requests = op.inputs[lookups.num_inputs :]
    gradients = _dense(output_gradients, op.outputs)
    weight_gradients: list[Any] = []
    with tf.device(op.outputs[0].device):
        rows_gradient = ops.sok_spread(
            output_gradients=gradients,
            inverse=inverse,
            order=order,
            unique_splits=unique_splits,
            requests=requests,
            **lookups.arguments(),
            **tables.counted_attributes(),
        )
        if lookups.weights:
            weight_gradients = ops.sok_weight_gradient(
                variables=[],
                output_gradients=gradients,
                rows=rows,
                inverse=inverse,
                requests=requests,
                generations=[],
                **lookups.arguments(),
                **tables.counted_attributes(),
            )
    return [None] * (2 * len(lookups.keys)) + list(weight_gradients) + [rows_gradient, None, None, None, None]


@tf.RegisterGradient("SokBags")
def _bags_gradient(op: Any, *output_gradients: Any) -> list[Any]:
    weighted = list(op.get_attr("weighted"))
    count, num_weighted = len(weighted), sum(weighted)
    if num_weighted == 0:
        return [None] * len(op.inputs)
    orders = op.outputs[2 * count + num_weighted : 2 * count + 2 * num_weighted]
    sorted_weights = op.outputs[2 * count : 2 * count + num_weighted]
    gradients = _dense(output_gradients[2 * count : 2 * count + num_weighted], sorted_weights)
    with tf.device(devices.HOST):
        restored = ops.sok_restore_order(values=gradients, orders=list(orders))
    before = 3 * count
    after = len(op.inputs) - before - num_weighted
    return [None] * before + list(restored) + [None] * after


# Ops of the backward pass (SokSpread, SokReduce, SokWeightGradient) are not here: without an entry TensorFlow refuses
# second derivatives with an error; with one they would silently be None.
for _name in (
    "SokRoute",
    "SokExchangeSizes",
    "SokLocate",
    "SokInsert",
    "SokAgreed",
    "SokApply",
    "SokCheckUpdates",
    "SokRaiseTogether",
    "SokStamps",
    "SokRestoreOrder",
    "SokInitialize",
    "SokAssign",
    "SokDynamicTable",
    "SokColumn",
    "SokTableCounts",
    "SokHeld",
    "SokFind",
    "SokExport",
    "SokErase",
    "SokClear",
    "SokScores",
    "SokSetScores",
    "SokSetEpoch",
    "SokEndStep",
    "SokFail",
    "SokCheckErrors",
    "SokReadNumber",
    "SokCountStep",
):
    tf.no_gradient(_name)
