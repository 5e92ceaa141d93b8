# SPDX-License-Identifier: Apache-2.0
"""Any accepted kind of ids -> keys, row splits and weights, as every stage takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch._ops import ops

_KINDS = (
    "a 2-D sparse COO tensor, a jagged nested tensor (torch.nested, layout=torch.jagged), a pair (values, offsets), or "
    "an object with values() and offsets()"
)


@dataclasses.dataclass(frozen=True)
class Bags:
    """One batch of bags for one table.

    keys: [n] int32 or int64. row_splits: [batch + 1] int64, or None when every key is a bag of its own.
    weights: [n] float32, or None when all are 1.
    """

    keys: Tensor
    row_splits: Tensor | None
    weights: Tensor | None

    def to(self, device: torch.device | None) -> Bags:
        """These bags on `device`; None: where they are. A copy to a GPU from page-locked memory does not wait."""
        if device is None or (
            self.keys.device == device
            and (self.row_splits is None or self.row_splits.device == device)
            and (self.weights is None or self.weights.device == device)
        ):
            return self
        no_wait = device.type != "cpu"  # what comes to the CPU is read at once
        moved = [
            None if tensor is None else tensor.to(device, non_blocking=no_wait)
            for tensor in (self.keys, self.row_splits, self.weights)
        ]
        assert moved[0] is not None
        return Bags(moved[0], moved[1], moved[2])


def parse(ids: Any, weights: Any, where: str, device: torch.device | None) -> Bags:
    """Reads ids and weights as lookup_sparse takes them.

    weights may be of the same kind as the ids, or a 1-D tensor with one weight an id, in the order of the ids' values
    (for a sparse COO tensor: the order in which it holds its entries). None: those of a JaggedTensor, if it has some.

    Args:
      where: names the lookup in messages.
      device: where the bags are wanted; ids and weights from elsewhere are copied there. None: as they are.

    Raises:
      TypeError: another kind of object; ids that are not int32 or int64; weights that are not floating point.
      ValueError: not two dimensions; weights that are not as many as the ids.
    """
    if isinstance(ids, Tensor) and ids.layout == torch.sparse_coo:
        return _from_coordinates(ids, weights, where).to(device)
    values, offsets = _values_and_offsets(ids, "ids", where)
    _check_keys(values, where)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: the offsets of ids must be int32 or int64, not {_text(offsets.dtype)}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{where}: the offsets of ids must be 1-D with batch + 1 entries, not {list(offsets.shape)}")
    row_splits = offsets if offsets.dtype is torch.int64 else offsets.to(torch.int64)
    if weights is None and callable(getattr(ids, "weights_or_none", None)):
        weights = ids.weights_or_none()  # a JaggedTensor's own
    flat = None if weights is None else _weights_of(weights, values, offsets, where)
    return Bags(values, row_splits, flat).to(device)


def pairs(ids: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]] | None:
    """([values], [offsets]) of ids that are all pairs of plain tensors; None where some are otherwise.

    If `plain_pairs` of csrc agrees they are keys and row splits, as `parse` would give them for ten times the time.
    """
    if not {tuple, list}.issuperset(map(type, ids)) or set(map(len, ids)) != {2}:
        return None
    values, offsets = map(list, zip(*ids, strict=True))
    return (values, offsets) if set(map(type, values)) == {Tensor} == set(map(type, offsets)) else None


def _values_and_offsets(ids: Any, what: str, where: str) -> tuple[Tensor, Tensor]:
    if isinstance(ids, Tensor):
        if not ids.is_nested:
            if ids.dim() != 2:
                raise ValueError(
                    f"{where}: {what} must be 2-D, got a tensor of shape {list(ids.shape)}; accepted: {_KINDS}"
                )
            kind = "dense" if ids.layout == torch.strided else str(ids.layout)
            raise TypeError(f"{where}: {what} are a {kind} tensor of shape {list(ids.shape)}; accepted: {_KINDS}")
        if ids.layout != torch.jagged:
            raise TypeError(f"{where}: {what} are a nested tensor of layout {ids.layout}, must be torch.jagged")
        if ids.dim() != 2:
            raise ValueError(f"{where}: {what} must be 2-D, got a nested tensor with {ids.dim()} dimensions")
        if not ids.is_contiguous():
            ids = ids.contiguous()  # a nested tensor with holes between its rows
        return ids.values(), ids.offsets()
    if isinstance(ids, (tuple, list)) and len(ids) == 2:
        values, offsets = ids
    elif callable(getattr(ids, "values", None)) and callable(getattr(ids, "offsets", None)):
        values, offsets = ids.values(), ids.offsets()
    else:
        raise TypeError(f"{where}: {what} are {type(ids).__name__}; accepted: {_KINDS}")
    if not isinstance(values, Tensor) or not isinstance(offsets, Tensor):
        raise TypeError(
            f"{where}: values and offsets of {what} must be tensors, got {type(values).__name__} and "
            f"{type(offsets).__name__}"
        )
    return values, offsets


def _from_coordinates(ids: Tensor, weights: Any, where: str) -> Bags:
    if ids.sparse_dim() != 2 or ids.dense_dim() != 0:
        raise ValueError(f"{where}: ids must be 2-D, got a sparse tensor of shape {list(ids.shape)}")
    # Not coalesced: equal coordinates are further ids of the bag, coalescing would add them up.
    keys = ids._values()
    _check_keys(keys, where)
    if isinstance(weights, Tensor) and weights.layout == torch.sparse_coo:
        if weights.shape != ids.shape or weights._nnz() != ids._nnz():
            raise ValueError(
                f"{where}: weights have shape {list(weights.shape)} with {weights._nnz()} entries, ids have shape "
                f"{list(ids.shape)} with {ids._nnz()} entries"
            )
        own, given = ids._indices(), weights._indices()
        # Weights that were coalesced, as gradients want them, are in another order than ids that were not.
        if not own.is_set_to(given) and not torch.equal(own, given.to(own.device)):
            raise ValueError(f"{where}: weights must have the coordinates of ids, in the same order")
        if weights.requires_grad and not weights.is_coalesced():
            raise ValueError(
                f"{where}: PyTorch gives no gradient for the values of an uncoalesced sparse tensor; pass the weights "
                "as a 1-D tensor, one for each entry of ids"
            )
        weights = weights.values() if weights.requires_grad else weights._values()
    flat = _weights_of(weights, keys, None, where)
    try:
        row_splits, order, is_sorted = ops.bags(ids._indices()[0], ids.shape[0])
    except IndexError as error:
        raise IndexError(f"{where}: {error}") from None
    # On a GPU asking whether it is needed would wait for it.
    if keys.is_cuda or not is_sorted.item():
        keys = keys[order]
        flat = None if flat is None else flat[order]
    return Bags(keys, row_splits, flat)


def _weights_of(weights: Any, keys: Tensor, offsets: Tensor | None, where: str) -> Tensor | None:
    if weights is None:
        return None
    flat: Tensor
    if isinstance(weights, Tensor) and not weights.is_nested and weights.layout == torch.strided:
        flat = weights
    elif isinstance(weights, Tensor) and weights.layout == torch.sparse_coo:
        raise TypeError(f"{where}: weights are a sparse COO tensor and ids are not")
    else:
        flat, weight_offsets = _values_and_offsets(weights, "weights", where)
        same = offsets is weight_offsets or (
            offsets is not None
            and offsets.shape == weight_offsets.shape
            and (torch.compiler.is_compiling() or torch.equal(offsets, weight_offsets))
        )
        if not same:
            raise ValueError(f"{where}: the bags of weights are not those of ids (their offsets differ)")
    if not flat.dtype.is_floating_point:
        raise TypeError(f"{where}: weights must be floating point, not {_text(flat.dtype)}")
    if flat.dim() != 1 or flat.shape[0] != keys.shape[0]:
        raise ValueError(f"{where}: weights have shape {list(flat.shape)}, but there are {keys.shape[0]} ids")
    return flat.to(torch.float32)


def _check_keys(keys: Tensor, where: str) -> None:
    if keys.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: ids must be int32 or int64, not {_text(keys.dtype)}")
    if keys.dim() != 1:
        raise ValueError(f"{where}: the values of ids must be 1-D, got shape {list(keys.shape)}")


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
