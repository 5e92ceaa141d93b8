# SPDX-License-Identifier: Apache-2.0
"""The ids of the features of an EmbeddingBagCollection as lookup_sparse takes them, those of a stack flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sparse_operation_kit.arguments import ids_of
from sparse_operation_kit.tensorflow import devices, runtime
from sparse_operation_kit.tensorflow.ids import Batch, num_bags, prepare
from sparse_operation_kit.tensorflow.lookup import message_unless
from sparse_operation_kit.tensorflow.table_variable import TableVariable


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
    fewer get empty ones after their own. messages: of `message_unless`, for the lookup.
    """

    ids: Any
    weights: Any
    sizes: Sequence[int] | None = None
    messages: Sequence[tf.Tensor] = ()


def flat_bags(
    table: TableVariable, ids: Mapping[str, Any], weights: Mapping[str, Any], features: Sequence[str]
) -> FlatBags:
    """The ids and weights of a lookup of these features, those of several flat. table: the stack that these are in."""
    given, of_ids = ids_of(ids, features), [weights.get(feature) for feature in features]
    if len(features) > 1 and all(each is None for each in of_ids) and _are_dense_alike(given):
        return FlatBags(as_bags(tf.reshape(tf.stack(given), [-1, *given[0].shape[1:]])), None)
    given, of_ids = list(map(as_bags, given)), list(map(as_bags, of_ids))
    if len(features) == 1:
        return FlatBags(given[0], of_ids[0])
    alone = runtime.get().exchange is None
    names = [f"feature '{feature}'" for feature in features]
    batches, message = prepare([table] * len(features), given, of_ids, defer_errors=not alone, names=names)
    flat = _joined(features, batches)
    return flat if alone or message is None else flat._replace(messages=[message, *flat.messages])


def _are_dense_alike(ids: Sequence[Any]) -> bool:
    """Whether they are dense ids of one dtype and one shape, which is known: joining them costs next to nothing."""
    first = ids[0]
    if not isinstance(first, tf.Tensor) or first.dtype not in (tf.int32, tf.int64) or first.shape.rank not in (1, 2):
        return False
    alike = all(isinstance(each, tf.Tensor) and each.dtype == first.dtype and each.shape == first.shape for each in ids)
    return alike and bool(first.shape.is_fully_defined())


def _joined(features: Sequence[str], batches: Sequence[Batch]) -> FlatBags:
    keys = [batch.keys for batch in batches]
    if len({each.dtype for each in keys}) > 1:
        keys = [tf.cast(each, tf.int64) for each in keys]
    values = tf.concat(keys, axis=0)
    sizes = [num_bags(batch) for batch in batches]
    known = [size for size in sizes if size is not None]
    are_known = len(known) == len(sizes)
    differ = are_known and len(set(known)) > 1
    messages = [] if are_known else [_unless_as_many(features, batches)]
    if not differ and all(batch.row_splits.shape[0] == 0 for batch in batches):  # of each feature a key a bag
        ids = tf.RaggedTensor.from_uniform_row_length(values, 1, validate=False)
    else:
        splits = [_splits_of(batch) for batch in batches]
        if differ:
            most = max(known)
            splits = [tf.concat([s, tf.fill([most - n], s[-1])], 0) for s, n in zip(splits, known, strict=True)]
        ids = tf.RaggedTensor.from_row_splits(values, _row_splits(splits, keys, are_known), validate=False)
    of_ids = None
    if any(batch.weights is not None for batch in batches):
        ones = [tf.ones_like(b.keys, tf.float32) if b.weights is None else b.weights for b in batches]
        of_ids = ids.with_values(tf.concat(ones, axis=0))
    return FlatBags(ids, of_ids, known if differ else None, messages)


def _splits_of(batch: Batch) -> tf.Tensor:
    return tf.range(tf.size(batch.keys, tf.int64) + 1) if batch.row_splits.shape[0] == 0 else batch.row_splits


def _row_splits(splits: Sequence[tf.Tensor], keys: Sequence[tf.Tensor], are_as_many: bool) -> tf.Tensor:
    """Those of all features' bags, from the row splits of each."""
    if are_as_many:
        table = tf.stack(splits)
    else:  # the lookup refuses others, but not before these are computed
        least = tf.reduce_min(tf.stack([tf.size(each) for each in splits]))
        table = tf.reshape(tf.concat(splits, axis=0)[: len(splits) * least], [len(splits), least])
    ends = tf.stack([tf.size(each, tf.int64) for each in keys])
    # Row splits that do not fit a feature's ids would give it another's: the lookup refuses those that begin at -1.
    fits = tf.reduce_all((table[:, 0] == 0) & (table[:, -1] == ends))
    first = tf.reshape(tf.cast(fits, tf.int64) - 1, [1])
    begins = tf.cumsum(ends, exclusive=True)
    return tf.concat([first, tf.reshape(table[:, 1:] + begins[:, tf.newaxis], [-1])], axis=0)


def _unless_as_many(features: Sequence[str], batches: Sequence[Batch]) -> tf.Tensor:
    """The message about features that have batches of different sizes, which only the running function knows."""
    with devices.on_host():
        ends = [tf.size(b.keys) if b.row_splits.shape[0] == 0 else tf.size(b.row_splits) - 1 for b in batches]
        sizes = tf.stack(ends)
        even = tf.reduce_all(sizes == sizes[0])

    def wrong() -> tf.Tensor:
        told = tf.strings.reduce_join(tf.strings.as_string(sizes), separator=", ")
        why = f"] bags: in a tf.function that does not know how many, features {list(features)} need as many each"
        return tf.strings.join(["there are [", told, why])

    return message_unless(even, wrong)


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
    count = offsets.shape[0]
    if names == list(features):
        return FlatBags(every, of_all, messages=_unless_fitting(names, offsets))
    if not names or (count is not None and (count - 1) % len(names) != 0):
        raise ValueError("".join(_not_fitting(names, str(count))))
    batch = every.nrows() // len(names)
    places = {name: place for place, name in enumerate(names)}
    slices = [slice(place * batch, (place + 1) * batch) for place in ids_of(places, features)]
    chosen = tf.concat([every[each] for each in slices], axis=0)
    weights = None if of_all is None else tf.concat([of_all[each] for each in slices], axis=0)
    return FlatBags(chosen, weights, messages=_unless_fitting(names, offsets))


def _unless_fitting(names: Sequence[str], offsets: tf.Tensor) -> list[tf.Tensor]:
    """The message about offsets whose number only the running function knows."""
    if offsets.shape[0] is not None:
        return []
    with devices.on_host():
        entries = tf.shape(offsets)[0]
        fits = tf.equal((entries - 1) % len(names), 0)
    return [message_unless(fits, lambda: tf.strings.join(_not_fitting(names, tf.strings.as_string(entries))))]


def _not_fitting(names: Sequence[str], entries: Any) -> list[Any]:
    return ["offsets of ", entries, f" entries are not those of as many bags for each of {list(names)}"]
