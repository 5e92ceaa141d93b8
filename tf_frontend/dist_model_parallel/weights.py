# SPDX-License-Identifier: Apache-2.0
"""Whole tables in and out of the variables of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit.checkpoint.group import agree
from sparse_operation_kit.hybrid.layout import chunks
from sparse_operation_kit.hybrid.transfer import Transfer, as_floats
from sparse_operation_kit.tensorflow import communication, keras_compat, runtime
from sparse_operation_kit.tensorflow.dist_model_parallel.planned import Planned
from sparse_operation_kit.tensorflow.group import Group, check_between_steps
from sparse_operation_kit.tensorflow.saving import ShardedVariable


def get_weights(planned: Planned, all_ranks: bool) -> list[Any]:
    """See DistributedEmbedding.get_weights."""
    check_between_steps("get_weights")
    state = runtime.get()
    transfer = Transfer(planned.strategy, planned.layout, state.rank)
    wanted = all_ranks or state.rank == 0
    tables: list[Any] = []
    if wanted:
        for config in planned.strategy.global_configs:
            dtype = tf.as_dtype(keras_compat.variable_dtype(config.get("dtype"))).as_numpy_dtype
            tables.append(np.empty((config["input_dim"], config["output_dim"]), dtype))
        for place, table in enumerate(planned.strategy.table_groups[0]):
            tables[table] = planned.replicated.weight(place).numpy()
    for batch in transfer.batches():
        pieces = []
        for segment in batch:
            slots = transfer.own(segment)
            if slots.start < slots.stop:
                where = tf.range(slots.start, slots.stop, dtype=tf.int64)
                rows = tf.gather(planned.variable(segment.variable), where)
                pieces.append(tf.reshape(tf.cast(rows, tf.float32), [-1]))
        flat = tf.concat([tf.zeros([0], tf.float32), *pieces], 0)
        if all_ranks:
            came = communication.allgather(flat, name="sok_get_weights")
        else:
            splits = [int(tf.size(flat)), *[0] * (state.num_ranks - 1)]
            came = communication.alltoall(flat, splits, name="sok_get_weights")
        if wanted:
            transfer.put(tables, batch, came.numpy())
    return tables


def set_weights(planned: Planned, weights: Sequence[Any], chunk: int, use_lock: bool) -> None:
    """See DistributedEmbedding.set_weights."""
    check_between_steps("set_weights")
    state = runtime.get()
    group = Group()
    transfer = Transfer(planned.strategy, planned.layout, state.rank)
    given: list[Any] = []
    agree(group, lambda: given.extend(transfer.check(weights, chunk)))
    for turn in range(state.num_ranks if use_lock else 1):
        if turn == state.rank or not use_lock:
            for place, table in enumerate(planned.strategy.table_groups[0]):
                for first, count in chunks(len(given[table]), given[table].shape[1], chunk):
                    _assign(planned.replicated.weight(place), first, given[table][first : first + count])
            for number, first, rows in transfer.writes(given, chunk):
                _assign(planned.variable(number), first, rows)
        if use_lock:
            group.allgather(b"")


def _assign(variable: Any, first: int, rows: Any) -> None:
    slots = tf.range(first, first + len(rows), dtype=tf.int64)
    new = tf.cast(tf.constant(as_floats(rows)), variable.dtype)
    if isinstance(variable, ShardedVariable):
        variable.write_slots(slots, new)
    else:
        variable.scatter_update(tf.IndexedSlices(new, slots))
