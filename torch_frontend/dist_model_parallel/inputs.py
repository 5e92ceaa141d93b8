# SPDX-License-Identifier: Apache-2.0
"""What an embedding is called with -> bags of ids, and the shape that its output gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_operation_kit.torch import ids as _ids
from sparse_operation_kit.torch._ops import ops

COMBINERS = (None, "sum", "mean")


def check_combiner(combiner: Any) -> None:
    """Raises ValueError unless it is None, "sum" or "mean"."""
    if combiner not in COMBINERS:
        raise ValueError(f'combiner must be None, "sum" or "mean", got {combiner!r}')


class Bags(NamedTuple):
    """values [n], offsets [bags + 1]: of the bags. inner: the shape of the output between batch and width.

    jagged: offsets of samples, where they have different numbers of vectors. batch: samples.
    """

    values: Tensor
    offsets: Tensor
    inner: tuple[int, ...]
    batch: int
    jagged: Tensor | None = None

    def shaped(self, output: Tensor) -> Tensor:
        """The output [bags, width] as it is to be; with another number of samples too."""
        if self.jagged is not None:
            return torch.nested.nested_tensor_from_jagged(output, self.jagged)
        return output.reshape(-1, *self.inner, output.shape[-1]) if self.inner else output


def as_bags(
    ids: Any,
    combiner: str | None,
    where: str,
    flat_single: bool = False,
    same: dict[Any, Tensor] | None = None,
) -> Bags:
    """ids: as of `Embedding`. flat_single: whether ids [b, 1] without a combiner give [b, width]. same: of a layer's
    call, the offsets of its dense inputs so far, which those alike share; its lookup checks pairs, in less time.

    Raises as `sok.lookup_sparse`; ValueError for sparse ids without a combiner.
    """
    if same is not None and combiner is not None and _is_pair(ids):
        return Bags(ids[0], ids[1], (), ids[1].shape[0] - 1)
    if isinstance(ids, Tensor) and ids.layout == torch.strided and not ids.is_nested:
        return _dense(ids, combiner, where, flat_single, {} if same is None else same)
    if isinstance(ids, Tensor) and ids.layout == torch.sparse_coo and combiner is None:
        raise ValueError(f"{where}: sparse ids take a combiner: without one a row of them has no shape")
    bags = _ids.parse(ids, None, where, None)
    splits = bags.row_splits
    assert splits is not None
    if bags.weights is not None:
        raise ValueError(f"{where}: the ids have weights, which embeddings do not take: use sok.lookup_sparse")
    batch = splits.shape[0] - 1
    if combiner is not None:
        return Bags(bags.keys, splits, (), batch)
    return Bags(bags.keys, _uniform(bags.keys, len(bags.keys), 1, {}), (), batch, splits)


def _is_pair(ids: Any) -> bool:
    return type(ids) is tuple and len(ids) == 2 and type(ids[0]) is type(ids[1]) is Tensor and ids[1].dim() == 1


def _dense(ids: Tensor, combiner: str | None, where: str, flat_single: bool, same: dict[Any, Tensor]) -> Bags:
    if ids.dim() == 0:
        raise ValueError(f"{where}: ids must be [batch] or [batch, ...], got a scalar")
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.long()
    values = ids.reshape(-1)
    if ids.dim() == 1 or combiner is None:
        inner = () if flat_single and ids.shape[1:] == (1,) else tuple(ids.shape[1:])
        return Bags(values, _uniform(values, len(values), 1, same), inner, len(ids))
    offsets = _uniform(values, ids.shape[:-1].numel(), ids.shape[-1], same)
    return Bags(values, offsets, tuple(ids.shape[1:-1]), len(ids))


def _uniform(values: Tensor, bags: int, length: int, same: dict[Any, Tensor]) -> Tensor:
    """The offsets of as many bags of one length."""
    key = bags, length, values.device
    if key not in same:
        same[key] = torch.arange(bags + 1, device=values.device) * length
    return same[key]


def within(ids: Tensor, rows: int, table: str) -> Tensor:
    """Ids in a table that PyTorch alone knows, int64. On a GPU 0 stands for those outside [0, rows), and the next call
    that uses tables raises what is wrong, or `check_errors`: PyTorch's own assertion would end CUDA for the process.

    Raises IndexError on the CPU.
    """
    slots: Tensor = ops.locate_members(ids, None, table, rows, [table], [0], [rows])
    return slots.clamp(min=0) if slots.is_cuda else slots


def check_batches(bags: Sequence[Bags], divisor: int = 1) -> None:
    """Raises ValueError where batches differ, or are no multiple of `divisor`."""
    sizes = {each.batch for each in bags}
    if len(sizes) > 1:
        raise ValueError(f"All input need to have same batchsize. got {sizes}.")
    for size in sizes:
        if size % divisor:
            raise ValueError(f"Global batchsize {size} not divisible workers count {divisor}.")
