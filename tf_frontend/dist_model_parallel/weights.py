# SPDX-License-Identifier: Apache-2.0
"""Whole tables in and out of the variables of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sparse_operation_kit.checkpoint.group import agree
from sparse_operation_kit.hybrid.layout import Member, chunks
from sparse_operation_kit.tensorflow import communication, runtime
from sparse_operation_kit.tensorflow.dist_model_parallel.planned import Planned
from sparse_operation_kit.tensorflow.group import Group, check_between_steps

_TOGETHER = 1 << 25
"""Elements that a rank sends at once."""


class _Segment(NamedTuple):
    """Rows of a variable: slots [first, first + count) from the first one of a member on."""

    variable: int
    member: Member
    first: int
    number: int


def get_weights(planned: Planned, all_ranks: bool) -> list[Any]:
    """See DistributedEmbedding.get_weights."""
    check_between_steps("get_weights")
    state = runtime.get()
    wanted = all_ranks or state.rank == 0
    tables: list[Any] = []
    if wanted:
        for config in planned.strategy.global_configs:
            tables.append(np.empty((config["input_dim"], config["output_dim"]), _dtype(config)))
        for place, table in enumerate(planned.strategy.table_groups[0]):
            tables[table] = planned.replicated.weight(place).numpy()
    for batch in _batches(planned):
        pieces = [_read(planned, segment, state.rank) for segment in batch]
        flat = tf.concat([tf.zeros([0], tf.float32), *(tf.reshape(piece, [-1]) for piece in pieces)], 0)
        if all_ranks:
            came = communication.allgather(flat, name="sok_get_weights")
        else:
            size = tf.size(flat)
            splits = tf.stack([size] + [tf.zeros_like(size)] * (state.num_ranks - 1))
            came = communication.alltoall(flat, splits, name="sok_get_weights")
        if wanted:
            _put(planned, tables, batch, came.numpy(), state.num_ranks)
    return tables


def _dtype(config: Any) -> Any:
    from sparse_operation_kit.tensorflow import keras_compat

    return tf.as_dtype(keras_compat.variable_dtype(config.get("dtype"))).as_numpy_dtype


def _batches(planned: Planned) -> Iterator[list[_Segment]]:
    """Segments of all variables, as many at a time as are sent together; the same on all ranks."""
    num_ranks = runtime.get().num_ranks
    batch: list[_Segment] = []
    total = 0
    for number, variable in enumerate(planned.layout.variables):
        place = variable.placement(num_ranks, 0)  # which has the most rows of a row-sliced table
        for member in variable.members:
            rows = member.rows if variable.owner >= 0 else place.local_rows
            for first, count in chunks(rows, member.columns, _TOGETHER):
                if batch and total + count * member.columns > _TOGETHER:
                    yield batch
                    batch, total = [], 0
                batch.append(_Segment(number, member, first, count))
                total += count * member.columns
    if batch:
        yield batch


def _rows(planned: Planned, segment: _Segment, rank: int) -> slice:
    """The rows of the table that a rank has in a segment."""
    variable = planned.layout.variables[segment.variable]
    first, last = segment.first, segment.first + segment.number
    if variable.owner >= 0:
        return slice(first, last) if variable.owner == rank else slice(0, 0)
    place = variable.placement(runtime.get().num_ranks, rank)
    last = min(last, place.local_rows)
    if first >= last:
        return slice(0, 0)
    keys = place.global_keys(first), place.global_keys(last - 1)
    return slice(keys[0], keys[1] + 1, place.key_stride)


def _read(planned: Planned, segment: _Segment, rank: int) -> tf.Tensor:
    rows = _rows(planned, segment, rank)
    count = len(range(rows.start, rows.stop, rows.step or 1))
    if not count:
        return tf.zeros([0], tf.float32)
    first = segment.member.first_row + segment.first
    found = tf.gather(planned.variable(segment.variable), tf.range(first, first + count, dtype=tf.int64))
    return tf.cast(found, tf.float32)


def _put(planned: Planned, tables: list[Any], batch: Sequence[_Segment], came: Any, num_ranks: int) -> None:
    """Puts what came, rank by rank, into the tables."""
    at = 0
    for rank in range(num_ranks):
        for segment in batch:
            rows = _rows(planned, segment, rank)
            member = segment.member
            size = len(range(rows.start, rows.stop, rows.step or 1)) * member.columns
            columns = slice(member.first_column, member.first_column + member.columns)
            tables[member.table][rows, columns] = came[at : at + size].reshape(-1, member.columns)
            at += size


def set_weights(planned: Planned, weights: Sequence[Any], chunk: int, use_lock: bool) -> None:
    """See DistributedEmbedding.set_weights."""
    check_between_steps("set_weights")
    state = runtime.get()
    group = Group()
    given: list[Any] = []
    agree(group, lambda: given.extend(_checked(planned, weights, chunk)))
    for turn in range(state.num_ranks if use_lock else 1):
        if turn == state.rank or not use_lock:
            _write(planned, given, chunk, state.rank)
        if use_lock:
            group.allgather(b"")


def _checked(planned: Planned, weights: Sequence[Any], chunk: int) -> list[Any]:
    """The tables as arrays, those of files mapped."""
    configs = planned.strategy.global_configs
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if len(weights) != len(configs):
        raise ValueError(
            f"You called `set_weights(weights)` with a weight list of length {len(weights)}, but the layer was "
            f"expecting {len(configs)} weights."
        )
    arrays = []
    for table, (value, config) in enumerate(zip(weights, configs, strict=True)):
        is_path = isinstance(value, (str, os.PathLike))
        array = np.load(value, mmap_mode="r") if is_path else np.asarray(value)
        what = f"weights[{table}]" + (f" ({os.fspath(value)})" if is_path else "")
        expected = (config["input_dim"], config["output_dim"])
        if array.shape != expected:
            raise ValueError(f"{what} has the shape {list(array.shape)}, table {table} has {list(expected)}")
        if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
            raise TypeError(f"{what} is {array.dtype}, which is no number that a table can hold")
        arrays.append(array)
    return arrays


def _write(planned: Planned, given: Sequence[Any], chunk: int, rank: int) -> None:
    for place, table in enumerate(planned.strategy.table_groups[0]):
        variable = planned.replicated.weight(place)
        for first, count in chunks(len(given[table]), given[table].shape[1], chunk):
            _assign(variable, first, given[table][first : first + count])
    for number in planned.layout.of_rank(rank):
        for member in planned.layout.variables[number].members:
            columns = slice(member.first_column, member.first_column + member.columns)
            for first, count in chunks(member.rows, member.columns, chunk):
                rows = _rows(planned, _Segment(number, member, first, count), rank)
                if rows.start < rows.stop:
                    new = given[member.table][rows, columns]
                    _assign(planned.variable(number), member.first_row + first, new)


def _assign(variable: Any, first: int, rows: Any) -> None:
    slots = tf.range(first, first + len(rows), dtype=tf.int64)
    new = tf.cast(tf.constant(np.ascontiguousarray(rows)), variable.dtype)
    variable.scatter_update(tf.IndexedSlices(new, slots))
