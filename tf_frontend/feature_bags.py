# SPDX-License-Identifier: Apache-2.0
"""The ids of the features of an EmbeddingBagCollection as lookup_sparse takes them, those of a stack flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sparse_operation_kit.arguments import ids_of
from sparse_operation_kit.tensorflow import devices
from sparse_operation_kit.tensorflow.lookup import message_unless


def as_bags(ids: Any) -> Any:
    """Dense ids [batch] or [batch, k] as ragged ones; anything else as it is."""
    if ids is None or isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        return ids
    dense = tf.convert_to_tensor(ids)
    if dense.shape.rank not in (1, 2):
        raise ValueError(f"dense ids must be [batch] or [batch, k], got the shape {dense.shape}")
    if dense.shape.rank == 1:
        return tf.RaggedTensor.from_uniform_row_length(dense, 1, validate=False)
    shape = tf.shape(dense, tf.int64)
    length = shape[1] if dense.shape[1] is None else dense.shape[1]
    return tf.RaggedTensor.from_uniform_row_length(tf.reshape(dense, [-1]), length, nrows=shape[0], validate=False)


class FlatBags(NamedTuple):
    """What a lookup of some features takes. sizes: how many bags each has, where they differ; then those that have
    fewer get empty ones after their own.
    """

    ids: Any
    weights: Any
    sizes: Sequence[int | tf.Tensor] | None = None


def flat_bags(ids: Mapping[str, Any], weights: Mapping[str, Any], features: Sequence[str]) -> FlatBags:
    """The ids and weights of a lookup of these features, those of several flat."""
    given = list(map(as_bags, ids_of(ids, features)))
    of_ids = [as_bags(weights.get(feature)) for feature in features]
    if len(features) == 1:
        return FlatBags(given[0], of_ids[0])
    for feature, each, w in zip(features, given, of_ids, strict=True):
        _check(f"feature '{feature}'", each, w)
    flat, sizes = _joined(given, tf.int64)
    if all(each is None for each in of_ids):
        return FlatBags(flat, None, sizes)
    ones = [
        each.with_values(tf.ones_like(each.values, tf.float32)) if w is None else w
        for each, w in zip(given, of_ids, strict=True)
    ]
    return FlatBags(flat, _joined(ones, tf.float32)[0], sizes)


def _check(where: str, ids: Any, weights: Any) -> None:
    """Raises what lookup_sparse raises for these alone: in a stack another feature's would be what they are made to."""
    if ids is None:
        raise TypeError(
            f"{where}: sp_ids must be a tf.SparseTensor or tf.RaggedTensor of two dimensions, got a NoneType"
        )
    if ids.dtype not in (tf.int32, tf.int64):
        raise TypeError(f"{where}: sp_ids must be int32 or int64, got {ids.dtype.name}")
    if ids.shape.rank not in (2, None) or getattr(ids, "ragged_rank", 1) != 1:
        raise ValueError(f"{where}: sp_ids must have two dimensions [batch, ids], got the shape {ids.shape}")
    if weights is None:
        return
    if not weights.dtype.is_floating:
        raise TypeError(f"{where}: sp_weights must be floating, got {weights.dtype.name}")
    if type(weights) is not type(ids):
        raise TypeError(f"{where}: sp_weights must be a {type(ids).__name__} as the ids are")


def _joined(batches: Sequence[Any], dtype: tf.DType) -> tuple[Any, Sequence[int | tf.Tensor] | None]:
    """The rows of all batches, one after another, and how many each has where they differ. dtype: of all of them, where
    they are of several. Where it is not known before it runs they have to be as many.
    """
    if len({batch.dtype for batch in batches}) > 1:
        batches = [tf.cast(batch, dtype) for batch in batches]
    if len(set(map(type, batches))) > 1:
        batches = [batch.to_sparse() if isinstance(batch, tf.RaggedTensor) else batch for batch in batches]
    known = [batch.shape[0] for batch in batches]
    sizes = None
    if len(set(known) - {None}) > 1:
        sizes = [tf.shape(batch, tf.int64)[0] if n is None else n for batch, n in zip(batches, known, strict=True)]
        most = tf.reduce_max(tf.stack([tf.cast(n, tf.int64) for n in sizes])) if None in known else max(known)
        batches = [_with_rows(batch, most) for batch in batches]
    join = _joined_sparse if isinstance(batches[0], tf.SparseTensor) else _joined_ragged
    return join(batches), sizes


def _with_rows(batch: Any, rows: int | tf.Tensor) -> Any:
    """The batch with empty rows after its own, `rows` in all."""
    if isinstance(batch, tf.SparseTensor):
        shape = tf.stack([tf.cast(rows, tf.int64), batch.dense_shape[1]])
        return tf.SparseTensor(batch.indices, batch.values, shape)
    splits = batch.row_splits
    more = tf.fill([rows + 1 - tf.size(splits, tf.int64)], splits[-1])
    return tf.RaggedTensor.from_row_splits(batch.values, tf.concat([splits, more], axis=0), validate=False)


def _joined_ragged(batches: Sequence[tf.RaggedTensor]) -> tf.RaggedTensor:
    values = tf.concat([batch.values for batch in batches], axis=0)
    splits = tf.stack([tf.cast(batch.row_splits, tf.int64) for batch in batches])
    ends = tf.cumsum(tf.stack([tf.size(batch.values, tf.int64) for batch in batches]))
    begins = tf.concat([tf.zeros([1], tf.int64), ends[:-1]], axis=0)
    row_splits = tf.concat([tf.zeros([1], tf.int64), tf.reshape(splits[:, 1:] + begins[:, tf.newaxis], [-1])], axis=0)
    return tf.RaggedTensor.from_row_splits(values, row_splits, validate=False)


def _joined_sparse(batches: Sequence[tf.SparseTensor]) -> tf.SparseTensor:
    shapes = tf.stack([batch.dense_shape for batch in batches])
    begins = tf.cumsum(shapes[:, 0], exclusive=True)
    indices = [batch.indices + tf.stack([begins[i], 0]) for i, batch in enumerate(batches)]
    total = tf.reduce_sum(shapes[:, 0])
    # Where not all have as many rows the lookup refuses them together, on all ranks: so many are no multiple.
    uneven = tf.reduce_any(shapes[:, 0] != shapes[0, 0]) & (total % len(batches) == 0)
    rows = total + tf.cast(uneven, tf.int64)
    values = tf.concat([batch.values for batch in batches], axis=0)
    return tf.SparseTensor(tf.concat(indices, axis=0), values, tf.stack([rows, tf.reduce_max(shapes[:, 1])]))


def keyed_bags(ids: Any, features: Sequence[str]) -> FlatBags:
    """The ids and weights of these features among those of an object like TorchRec's KeyedJaggedTensor.

    Raises:
      TypeError: it is none. KeyError: a feature is not in it. ValueError: offsets that do not fit its keys.
    """
    try:
        names, values, offsets = list(ids.keys()), ids.values(), tf.cast(ids.offsets(), tf.int64)
    except (AttributeError, TypeError):
        raise TypeError(
            "ids must be a mapping from features to ids, or an object with keys(), values() and offsets(), got "
            f"{type(ids).__name__}"
        ) from None
    weights = next((getattr(ids, name)() for name in ("weights_or_none", "weights") if hasattr(ids, name)), None)
    every = tf.RaggedTensor.from_row_splits(values, offsets, validate=False)
    of_all = None if weights is None else every.with_values(weights)
    if names == list(features):
        return FlatBags(every, of_all)
    count = offsets.shape[0]
    if not names or (count is not None and (count - 1) % len(names) != 0):
        raise ValueError("".join(_not_fitting(names, str(count))))
    batch = every.nrows() // len(names)
    places = {name: place for place, name in enumerate(names)}
    slices = [slice(place * batch, (place + 1) * batch) for place in ids_of(places, features)]
    chosen = tf.concat([every[each] for each in slices], axis=0)
    return FlatBags(chosen, None if of_all is None else tf.concat([of_all[each] for each in slices], axis=0))


def fitting(ids: Any) -> list[tf.Tensor]:
    """The message, for the lookup of `keyed_bags`, about offsets whose number a tf.function does not know."""
    names, offsets = list(ids.keys()), tf.convert_to_tensor(ids.offsets())
    if offsets.shape[0] is not None:
        return []
    with devices.on_host():
        entries = tf.shape(offsets)[0]
        fits = tf.equal((entries - 1) % len(names), 0)
    return [message_unless(fits, lambda: tf.strings.join(_not_fitting(names, tf.strings.as_string(entries))))]


def _not_fitting(names: Sequence[str], entries: Any) -> list[Any]:
    return ["offsets of ", entries, f" entries are not those of as many bags for each of {list(names)}"]
