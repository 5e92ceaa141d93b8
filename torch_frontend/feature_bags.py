# SPDX-License-Identifier: Apache-2.0
"""The ids of the features of an EmbeddingBagCollection as lookup_sparse takes them, those of a stack flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_operation_kit.arguments import ids_of
from sparse_operation_kit.torch.ids import Bags, parse


def as_bags(ids: Any, weights: Any, feature: str) -> tuple[Any, Any]:
    """Dense ids [batch] or [batch, k], and weights of the same shape, as bags of k; anything else as it is."""
    if not _is_dense(ids) or ids.dim() not in (1, 2):
        return ids, weights
    if _is_dense(weights):
        if weights.shape != ids.shape:
            raise ValueError(
                f"feature '{feature}': weights have shape {list(weights.shape)}, ids have shape {list(ids.shape)}"
            )
        weights = weights.reshape(-1)
    batch, length = ids.shape[0], ids.shape[1] if ids.dim() == 2 else 1
    return (ids.reshape(-1), torch.arange(batch + 1, device=ids.device) * length), weights


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested


class FlatBags(NamedTuple):
    """What a lookup of some features takes. sizes: how many bags each has, where they differ; then those that have
    fewer get empty ones after their own.
    """

    ids: Any
    weights: Any
    sizes: Sequence[int] | None = None


def flat_bags(ids: Mapping[str, Any], weights: Mapping[str, Any], features: Sequence[str]) -> FlatBags:
    """The ids and weights of a lookup of these features, those of several flat."""
    if len(features) == 1:
        return FlatBags(*as_bags(ids_of(ids, features)[0], weights.get(features[0]), features[0]))
    given = ids_of(ids, features)
    weighted = any(weights.get(feature) is not None for feature in features)
    if not weighted and all(_is_dense(x) and x.dim() in (1, 2) and _are_alike(x, given[0]) for x in given):
        keys = torch.cat([x.reshape(-1) for x in given])
        length = given[0].shape[1] if given[0].dim() == 2 else 1
        splits = torch.arange(given[0].shape[0] * len(given) + 1, device=keys.device) * length
        return FlatBags((keys, splits), None)
    batches = []
    for feature, each in zip(features, given, strict=True):
        batches.append(parse(*as_bags(each, weights.get(feature), feature), f"feature '{feature}'", None))
    return _joined(batches)


def _are_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.device == b.device and a.dtype is b.dtype


def _joined(batches: Sequence[Bags]) -> FlatBags:
    batches = [batch.to(batches[0].keys.device) for batch in batches]
    splits = [batch.row_splits for batch in batches if batch.row_splits is not None]
    sizes = [each.shape[0] - 1 for each in splits]
    differ = any(size != sizes[0] for size in sizes)
    if differ:
        most = max(sizes)
        splits = [torch.cat([each, each[-1:].expand(most - n)]) for each, n in zip(splits, sizes, strict=True)]
    keys = torch.cat([batch.keys for batch in batches])
    # Nothing but shapes is asked of a device: the lengths of all bags, and their sums.
    of_each = torch.cat(splits).view(len(batches), -1)
    flat = keys, _splits_of((of_each[:, 1:] - of_each[:, :-1]).reshape(-1))
    if all(batch.weights is None for batch in batches):
        return FlatBags(flat, None, sizes if differ else None)
    ones = [torch.ones_like(batch.keys, dtype=torch.float32) for batch in batches if batch.weights is None]
    weights = torch.cat([ones.pop(0) if batch.weights is None else batch.weights for batch in batches])
    return FlatBags(flat, weights, sizes if differ else None)


def keyed_bags(ids: Any, features: Sequence[str]) -> FlatBags:
    """The ids and weights of these features among those of a KeyedJaggedTensor.

    Raises:
      TypeError: it is none. KeyError: a feature is not in it. ValueError: offsets that do not fit its keys; not as many
        bags for each key.
    """
    try:
        names, values, offsets = list(ids.keys()), ids.values(), ids.offsets()
    except (AttributeError, TypeError):
        raise TypeError(
            f"ids must be a mapping from features to ids, or an object with keys(), values() and offsets(), got "
            f"{type(ids).__name__}"
        ) from None
    _check_batch_sizes(ids, names)
    weights = _weights_of(ids)
    if names == list(features):
        return FlatBags((values, offsets), weights)
    if not names or (len(offsets) - 1) % len(names) != 0:
        raise ValueError(f"offsets of {len(offsets)} entries are not those of as many bags for each of {names}")
    batch = (len(offsets) - 1) // len(names)
    places = {name: place for place, name in enumerate(names)}
    chosen = ids_of(places, features)
    lengths = (offsets[1:] - offsets[:-1]).view(len(names), batch)[chosen].reshape(-1)
    splits = _splits_of(lengths)
    ends = getattr(ids, "offset_per_key", lambda: offsets[::batch].tolist() if batch else [0] * (len(names) + 1))()
    slices = [slice(ends[place], ends[place + 1]) for place in chosen]
    flat = torch.cat([values[each] for each in slices])
    return FlatBags((flat, splits), None if weights is None else torch.cat([weights[each] for each in slices]))


def _check_batch_sizes(ids: Any, names: Sequence[str]) -> None:
    """Raises ValueError for a TorchRec KeyedJaggedTensor that has a batch size per key."""
    varies = getattr(ids, "variable_stride_per_key", None)
    if varies is None or not varies():
        return
    sizes = list(ids.stride_per_key())
    if len(set(sizes)) > 1 or ids.inverse_indices_or_none() is not None:
        wrong = f"{sizes} bags for {list(names)}" if len(set(sizes)) > 1 else "inverse_indices"
        raise ValueError(
            f"ids in one tensor are of one batch size, a bag per sample, and this has {wrong}: give a dict from "
            "feature to (values, offsets)"
        )


def _splits_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))


def _weights_of(ids: Any) -> Tensor | None:
    for name in ("weights_or_none", "weights"):
        method = getattr(ids, name, None)
        if callable(method):
            weights: Tensor | None = method()
            return weights
    return None
