# SPDX-License-Identifier: Apache-2.0
"""What an embedding is called with -> bags of ids for lookup_sparse, and the shape that its output gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import communication, runtime
from sparse_operation_kit.tensorflow._autograph import as_written

Ids = Any
"""A tf.RaggedTensor or tf.SparseTensor of two dimensions, whose rows are bags."""


@dataclasses.dataclass(frozen=True)
class Bags:
    """ids: what lookup_sparse takes. shaped: of its output [bags, width] what the layer gives for the input.

    per_sample: how many bags a sample has, None where samples differ. batch: samples as far as they are known.
    """

    ids: Ids
    shaped: Callable[[tf.Tensor], Any]
    batch: int | None
    per_sample: Any = 1


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


def _integer(dtype: tf.DType) -> tf.DType:
    return tf.int32 if dtype.is_integer and dtype.size < 4 else tf.int64


def static_batch(value: Any) -> int | None:
    """The samples of an input, as far as they are known before it runs."""
    size: int | None = value.shape[0] if value.shape.rank else None
    return size


def dynamic_batch(value: Any) -> tf.Tensor:
    """The samples of an input, int64."""
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[0]
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int64)
    return tf.shape(value, tf.int64)[0]


def as_bags(value: Any, combiner: str | None, width: int, *, flat_single: bool = False) -> Bags:
    """value: as `as_ids` gives it. flat_single: whether ids [b, 1] without a combiner give [b, width].

    Raises ValueError for ragged ids of more than two dimensions, and for sparse ones without a combiner.
    """
    batch = static_batch(value)
    if isinstance(value, tf.SparseTensor):
        if combiner is None:
            raise ValueError("sparse ids take a combiner: without one a row of them has no shape")
        return Bags(value, _as_they_are, batch)
    if isinstance(value, tf.RaggedTensor):
        if value.ragged_rank != 1 or value.values.shape.rank != 1:
            raise ValueError(f"Ragged input should be 2D. Got the shape {value.shape}")
        if combiner is not None:
            return Bags(value, _as_they_are, batch)
        return Bags(_singles(value.values), value.with_values, batch, None)
    if value.shape.rank is None or value.shape.rank == 0:
        raise ValueError(f"ids must be [batch] or [batch, ...], got the shape {value.shape}")
    if value.shape.rank == 1:
        return Bags(_singles(value), _as_they_are, batch)
    shape, known = tf.shape(value, tf.int64), value.shape
    inner, sizes = (shape, known) if combiner is None else (shape[:-1], known[:-1])
    per_sample = tf.reduce_prod(inner[1:])
    if combiner is None:
        bags = _singles(tf.reshape(value, [-1]))
        if flat_single and known.rank == 2 and known[1] == 1:
            return Bags(bags, _as_they_are, batch)
    else:
        length = shape[-1] if known[-1] is None else known[-1]
        bags = tf.RaggedTensor.from_uniform_row_length(
            tf.reshape(value, [-1]), length, nrows=tf.reduce_prod(inner), validate=False
        )
        if known.rank == 2:
            return Bags(bags, _as_they_are, batch)

    def shaped(output: tf.Tensor) -> tf.Tensor:
        # The first dimension follows from the output: with inputs of all samples there is a part of them here.
        result = tf.reshape(output, tf.concat([[-1], inner[1:], [width]], 0))
        result.set_shape([None, *sizes[1:], width])
        return result

    return Bags(bags, shaped, batch, per_sample)


def _as_they_are(output: tf.Tensor) -> tf.Tensor:
    return output


def _singles(ids: tf.Tensor) -> tf.RaggedTensor:
    """Each id as a bag of its own."""
    return tf.RaggedTensor.from_uniform_row_length(ids, 1, validate=False)


def nothing(dtype: tf.DType = tf.int64) -> tf.RaggedTensor:
    """No bags."""
    return _singles(tf.zeros([0], dtype))


def move_into(ids: Ids, first: int, rows: int, total: int) -> Ids:
    """Ids of a table of `rows` as those of a variable of `total` that has it from row `first` on.

    An id that is not the table's becomes one that is not the variable's, so that it is an error and no other row.
    """
    if rows == total:
        return ids
    values = ids.values
    beyond = tf.constant(total - rows, values.dtype)  # so the first that is too large becomes `total`
    inside = tf.where(values < rows, tf.constant(first, values.dtype), beyond)
    moved = values + tf.where(values < 0, tf.constant(0, values.dtype), inside)
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_values(moved)
    return tf.SparseTensor(ids.indices, moved, ids.dense_shape)


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
    if any(isinstance(value, tf.SparseTensor) for value in inputs.values()):
        raise ValueError("Sparse tensor data-parallel input is not supported")
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
        lengths.append(
            tf.concat([_arrangement(given[feature]) for feature in features] or [tf.zeros([0], tf.int64)], 0)
        )
    sizes = tf.stack([tf.size(each) for each in lengths])
    arranged = communication.alltoall(tf.concat(lengths, 0), sizes, name="sok_inputs_shapes")
    values = communication.alltoall(tf.concat(flat, 0), tf.stack(splits), name="sok_inputs")
    return _put_together(given, wanted[state.rank], arranged, values, state.num_ranks)


def _flat(value: Any) -> tf.Tensor:
    return value.values if isinstance(value, tf.RaggedTensor) else tf.reshape(value, [-1])


def _arrangement(value: Any) -> tf.Tensor:
    """[samples, ids of each sample ...] of a ragged feature, [samples, ids] of a dense one; int64."""
    number = tf.reshape(dynamic_batch(value), [1])
    if isinstance(value, tf.RaggedTensor):
        return tf.concat([number, tf.cast(value.row_lengths(), tf.int64)], 0)
    return tf.concat([number, tf.reshape(tf.size(value, tf.int64), [1])], 0)


def _put_together(
    given: Mapping[Any, Any], features: Sequence[Any], arranged: tf.Tensor, values: tf.Tensor, num_ranks: int
) -> dict[Any, Any]:
    """The features from the messages, in which they lie rank by rank."""
    pieces: dict[Any, list[Any]] = {feature: [] for feature in features}
    at, first = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    for _ in range(num_ranks):
        for feature in features:
            samples = arranged[at]
            if isinstance(given[feature], tf.RaggedTensor):
                lengths = arranged[at + 1 : at + 1 + samples]
                count, at = tf.reduce_sum(lengths), at + 1 + samples
                piece = tf.RaggedTensor.from_row_lengths(values[first : first + count], lengths, validate=False)
            else:
                count, at = arranged[at + 1], at + 2
                shape = tf.shape(given[feature], tf.int64)[1:]
                piece = tf.reshape(values[first : first + count], tf.concat([[samples], shape], 0))
                piece.set_shape([None, *given[feature].shape[1:]])
            pieces[feature].append(piece)
            first = first + count
    return {feature: tf.concat(parts, 0) for feature, parts in pieces.items()}
