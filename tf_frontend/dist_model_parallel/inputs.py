# SPDX-License-Identifier: Apache-2.0
"""What an embedding is called with -> bags of ids for lookup_sparse, and the shape that its output gets."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import communication, devices, runtime
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.lookup import checked_ids, message_unless

Ids = Any
"""A tf.RaggedTensor or tf.SparseTensor of two dimensions, whose rows are bags."""


@dataclasses.dataclass(frozen=True)
class Bags:
    """ids: what lookup_sparse takes. shaped: of its output [bags, width] what the layer gives for the input."""

    ids: Ids
    shaped: Callable[[tf.Tensor], Any]


def as_ids(value: Any) -> Any:
    """int32 and int64 as they are, anything else as one of them; a tensor, ragged or sparse where it is such."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        if value.dtype in (tf.int32, tf.int64):
            return value
        values = value.flat_values if isinstance(value, tf.RaggedTensor) else value.values
        values = tf.cast(values, _integer(value.dtype))
        return (
            value.with_flat_values(values)
            if isinstance(value, tf.RaggedTensor)
            else tf.SparseTensor(value.indices, values, value.dense_shape)
        )
    tensor = tf.convert_to_tensor(value)
    return tensor if tensor.dtype in (tf.int32, tf.int64) else tf.cast(tensor, _integer(tensor.dtype))


def flat_ids(value: Any) -> tf.Tensor:
    """All ids of an input, as `as_ids` gives it, one after another."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    return value.values if isinstance(value, tf.SparseTensor) else tf.reshape(value, [-1])


def within(value: Any, rows: int, table: str) -> tuple[Any, tf.Tensor]:
    """The ids, others in place of those outside [0, rows), and a message about these, which is empty without them."""
    ids, put = _taken_apart(value)
    held = tf.clip_by_value(ids, 0, rows - 1)
    same = tf.reshape(tf.equal(ids, held), [-1])  # in a graph of tf.compat.v1 `==` compares objects

    def told() -> tf.Tensor:
        key = tf.strings.as_string(tf.boolean_mask(tf.reshape(ids, [-1]), ~same)[0])
        return tf.strings.join([f"table '{table}': key ", key, f" is outside [0, {rows})"])

    return put(held), message_unless(tf.reduce_all(same), told)


def required(value: Any, rows: int, table: str) -> Any:
    """The ids; where one is outside [0, rows) tf.errors.InvalidArgumentError, on this rank alone."""
    ids, put = _taken_apart(value)
    with devices.on_host():
        return put(checked_ids(ids, rows, table))


def _taken_apart(value: Any) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
    """The ids of an input, and what makes the input of such."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values, value.with_flat_values
    if isinstance(value, tf.SparseTensor):
        return value.values, value.with_values
    return value, tf.identity


def _integer(dtype: tf.DType) -> tf.DType:
    return tf.int32 if dtype.is_integer and dtype.size < 4 else tf.int64


def static_batch(value: Any) -> int | None:
    """The samples of an input, as far as they are known before it runs."""
    size: int | None = value.shape[0] if value.shape.rank else None
    return size


def dynamic_batch(value: Any) -> tf.Tensor:
    """The samples of an input, int64 in host memory."""
    with devices.on_host():
        if isinstance(value, tf.SparseTensor):
            return value.dense_shape[0]
    size = _sizes(value.row_splits if isinstance(value, tf.RaggedTensor) else value)[0]
    with devices.on_host():
        return tf.cast(size - 1 if isinstance(value, tf.RaggedTensor) else size, tf.int64)


def as_bags(value: Any, combiner: str | None, width: int, *, flat_single: bool = False) -> Bags:
    """value: as `as_ids` gives it. flat_single: whether ids [b, 1] without a combiner give [b, width].

    Raises ValueError for ragged ids of more than two dimensions, and for sparse ones without a combiner.
    """
    if isinstance(value, tf.SparseTensor):
        if combiner is None:
            raise ValueError("sparse ids take a combiner: without one a row of them has no shape")
        return Bags(value, _as_they_are)
    if isinstance(value, tf.RaggedTensor):
        if value.ragged_rank != 1 or value.values.shape.rank != 1:
            raise ValueError(f"Ragged input should be 2D. Got the shape {value.shape}")
        if combiner is not None:
            return Bags(value, _as_they_are)
        return Bags(_uniform(value.values, 1, _sizes(value.values)), value.with_values)
    known = value.shape
    if known.rank is None or known.rank == 0:
        raise ValueError(f"ids must be [batch] or [batch, ...], got the shape {known}")
    pooled = combiner is not None and known.rank > 1
    sizes = _sizes(value)
    flat = tf.reshape(value, [-1])
    bags = _uniform(flat, sizes[-1], sizes[:-1]) if pooled else _uniform(flat, 1, sizes)
    inner = range(1, known.rank - pooled)
    if not inner or (flat_single and not pooled and known[1:] == [1]):
        return Bags(bags, _as_they_are)

    def shaped(output: tf.Tensor) -> tf.Tensor:
        # The first dimension follows from the output: with inputs of all samples there is a part of them here.
        with devices.on_host():
            shape = tf.stack([-1, *(sizes[i] for i in inner), width])
        result = tf.reshape(output, shape)
        result.set_shape([None, *(known[i] for i in inner), width])
        return result

    return Bags(bags, shaped)


def _as_they_are(output: tf.Tensor) -> tf.Tensor:
    return output


def _sizes(value: tf.Tensor) -> list[Any]:
    """Of each dimension, a number where it is known before it runs; else a scalar int64 in host memory, where such
    numbers are wanted: computed on a GPU they would be waited for.
    """
    known: list[Any] = value.shape.as_list()
    if None not in known:
        return known
    shape = tf.shape(value, tf.int64)  # its output is in host memory, wherever it runs
    with devices.on_host():
        return [shape[i] if size is None else size for i, size in enumerate(known)]


def _product(sizes: Sequence[Any]) -> tf.Tensor:
    return tf.cast(functools.reduce(operator.mul, sizes, 1), tf.int64)


def _uniform(ids: tf.Tensor, length: Any, outer: Sequence[Any]) -> tf.RaggedTensor:
    """Bags of as many ids each. length, and outer, the dimensions of the bags: as `_sizes` gives them."""
    with devices.on_host():
        number = _product(outer)
        if isinstance(length, int) and length == 1:  # lookup_sparse does not look at the row splits
            return tf.RaggedTensor.from_uniform_row_length(ids, tf.ones([], tf.int64), nrows=number, validate=False)
        end = number + 1
    return tf.RaggedTensor.from_row_splits(ids, tf.range(end) * length, validate=False)


def nothing(dtype: tf.DType = tf.int64) -> tf.RaggedTensor:
    """No bags."""
    return _uniform(tf.zeros([0], dtype), 1, [0])


def check_batches(inputs: Sequence[Any], divisor: int = 1) -> None:
    """Raises ValueError where batches are known to differ, or to be no multiple of `divisor`."""
    sizes = {size for size in map(static_batch, inputs) if size is not None}
    if len(sizes) > 1:
        raise ValueError(f"All input need to have same batchsize. got {sizes}.")
    for size in sizes:
        if size % divisor:
            raise ValueError(f"Global batchsize {size} not divisible workers count {divisor}.")


@as_written
def dp_to_mp_input(dp_inputs: Any, rank_to_local_features: Mapping[int, Sequence[Any]]) -> dict[Any, Any]:
    """Sends each rank the features that it is to have, of all ranks' samples, in the order of ranks.

    Args:
      dp_inputs: feature -> this rank's dense ids [b, ...] or `tf.RaggedTensor` [b, None]; or a list of them.
      rank_to_local_features: the features of each rank; a feature may go to several, or to none.

    Returns:
      This rank's features -> [B, ...], dense or ragged as they were.

    Raises:
      ValueError: sparse inputs; a feature that is not there.
    """
    inputs = dict(enumerate(dp_inputs)) if isinstance(dp_inputs, (list, tuple)) else dict(dp_inputs)
    state = runtime.get()
    wanted = [list(rank_to_local_features.get(rank, ())) for rank in range(state.num_ranks)]
    missing = {feature for features in wanted for feature in features if feature not in inputs}
    if missing:
        raise ValueError(f"rank_to_local_features names {sorted(missing, key=str)}, which are not among the inputs")
    refuse_sparse(*inputs.values())
    if state.num_ranks == 1:
        return {feature: inputs[feature] for feature in wanted[0]}
    given = {feature: as_ids(value) for feature, value in inputs.items()}
    dtype = tf.int64 if any(value.dtype == tf.int64 for value in given.values()) else tf.int32
    flat: list[tf.Tensor] = []
    lengths: list[tf.Tensor] = []
    splits: list[tf.Tensor] = []
    for features in wanted:
        sent = [tf.cast(_flat(given[feature]), dtype) for feature in features]
        flat += sent
        splits.append(tf.add_n([tf.size(each) for each in sent]) if sent else tf.constant(0))
        # For each feature of the rank: how many ids, and the samples, or row lengths, which say how they are arranged.
        with devices.on_host():
            none = [tf.zeros([0], tf.int64)]
            lengths.append(tf.concat([_arrangement(given[feature]) for feature in features] or none, 0))
    with devices.on_host():
        sizes = tf.stack([tf.size(each) for each in lengths])
        arranged = communication.alltoall(tf.concat(lengths, 0), sizes, name="sok_inputs_shapes")
    values = communication.alltoall(tf.concat(flat, 0), tf.stack(splits), name="sok_inputs")
    return _put_together(given, wanted[state.rank], arranged, values, state.num_ranks)


def refuse_sparse(*values: Any) -> None:
    """Raises ValueError for a tf.SparseTensor."""
    if any(isinstance(value, tf.SparseTensor) for value in values):
        raise ValueError("Sparse tensor data-parallel input is not supported")


def _flat(value: Any) -> tf.Tensor:
    return value.values if isinstance(value, tf.RaggedTensor) else tf.reshape(value, [-1])


def _arrangement(value: Any) -> tf.Tensor:
    """[samples, ids of each sample ...] of a ragged feature, [samples, ids] of a dense one; int64, on the host."""
    number = tf.reshape(dynamic_batch(value), [1])
    if isinstance(value, tf.RaggedTensor):
        return tf.concat([number, tf.cast(value.row_lengths(), tf.int64)], 0)
    return tf.concat([number, tf.reshape(_product(_sizes(value)), [1])], 0)


def _put_together(
    given: Mapping[Any, Any], features: Sequence[Any], arranged: tf.Tensor, values: tf.Tensor, num_ranks: int
) -> dict[Any, Any]:
    """The features from the messages, in which they lie rank by rank."""
    pieces: dict[Any, list[Any]] = {feature: [] for feature in features}
    with devices.on_host():
        at, first = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    for _ in range(num_ranks):
        for feature in features:
            value, ragged = given[feature], isinstance(given[feature], tf.RaggedTensor)
            inner = [] if ragged else _sizes(value)[1:]
            with devices.on_host():
                samples = arranged[at]
                lengths = arranged[at + 1 : at + 1 + samples] if ragged else arranged[at + 1 : at + 2]
                at, end = at + 1 + tf.size(lengths, tf.int64), first + tf.reduce_sum(lengths)
                shape = tf.stack([samples, *inner])
            piece = values[first:end]
            if ragged:
                piece = tf.RaggedTensor.from_row_lengths(piece, lengths, validate=False)
            else:
                piece = tf.reshape(piece, shape)
                piece.set_shape([None, *value.shape[1:]])
            pieces[feature].append(piece)
            first = end
    return {feature: tf.concat(parts, 0) for feature, parts in pieces.items()}
