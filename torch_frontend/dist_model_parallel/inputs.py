# SPDX-License-Identifier: Apache-2.0
"""What an embedding is called with -> bags of ids, and the shape that its output gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import ids as _ids

COMBINERS = (None, "sum", "mean")


def check_combiner(combiner: Any) -> None:
    """Raises ValueError unless it is None, "sum" or "mean"."""
    if combiner not in COMBINERS:
        raise ValueError(f'combiner must be None, "sum" or "mean", got {combiner!r}')


@dataclasses.dataclass(frozen=True)
class Bags:
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


def as_bags(ids: Any, combiner: str | None, *, where: str, flat_single: bool = False) -> Bags:
    """ids: as of `Embedding`. flat_single: whether ids [b, 1] without a combiner give [b, width].

    Raises as `sok.lookup_sparse`; ValueError for sparse ids without a combiner.
    """
    if isinstance(ids, Tensor) and ids.layout == torch.strided and not ids.is_nested:
        return _dense(ids, combiner, where, flat_single)
    if isinstance(ids, Tensor) and ids.layout == torch.sparse_coo and combiner is None:
        raise ValueError(f"{where}: sparse ids take a combiner: without one a row of them has no shape")
    bags = _ids.parse(ids, None, where, None)
    splits = bags.row_splits
    assert splits is not None
    batch = splits.shape[0] - 1
    if combiner is not None:
        return Bags(bags.keys, splits, (), batch)
    return Bags(bags.keys, _each(bags.keys), (), batch, splits)


def _dense(ids: Tensor, combiner: str | None, where: str, flat_single: bool) -> Bags:
    if ids.dim() == 0:
        raise ValueError(f"{where}: ids must be [batch] or [batch, ...], got a scalar")
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.long()
    values = ids.reshape(-1)
    if ids.dim() == 1:
        return Bags(values, _each(values), (), len(ids))
    if combiner is None:
        inner = () if flat_single and ids.shape[1:] == (1,) else tuple(ids.shape[1:])
        return Bags(values, _each(values), inner, ids.shape[0])
    length = ids.shape[-1]
    bags = torch.arange(ids.shape[:-1].numel() + 1, device=ids.device) * length
    return Bags(values, bags, tuple(ids.shape[1:-1]), ids.shape[0])


def _each(values: Tensor) -> Tensor:
    return torch.arange(len(values) + 1, device=values.device)


def move_into(values: Tensor, first: int, rows: int, total: int) -> Tensor:
    """Ids of a table of `rows` as those of a variable of `total` that has it from row `first` on.

    An id that is not the table's becomes one that is not the variable's, so that it is an error and no other row.
    """
    if rows == total:
        return values
    moved = torch.where(values < rows, first, total - rows)  # so the first that is too large becomes `total`
    return values + torch.where(values < 0, 0, moved)


def check_batches(bags: Sequence[Bags], divisor: int = 1) -> None:
    """Raises ValueError where batches differ, or are no multiple of `divisor`."""
    sizes = {each.batch for each in bags}
    if len(sizes) > 1:
        raise ValueError(f"All input need to have same batchsize. got {sizes}.")
    for size in sizes:
        if size % divisor:
            raise ValueError(f"Global batchsize {size} not divisible workers count {divisor}.")
