# SPDX-License-Identifier: Apache-2.0
"""KeyedVectors: the vectors of all features in one tensor, with their names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class KeyedVectors:
    """Vectors of several features side by side, with the methods of TorchRec's KeyedTensor; what takes one of these, as
    ``KeyedTensor.regroup`` does, takes it too.

    Args:
      dimensions: feature -> how many columns are its, in order.
      values: [batch, sum of dimensions].

    Raises ValueError where the columns are not as many.
    """

    def __init__(self, dimensions: Mapping[str, int], values: Tensor) -> None:
        if values.dim() != 2 or values.shape[1] != sum(dimensions.values()):
            raise ValueError(
                f"values of {list(values.shape)} are not the vectors of {dict(dimensions)}: [batch, "
                f"{sum(dimensions.values())}]"
            )
        self._dimensions = dict(dimensions)
        self._values = values

    def keys(self) -> list[str]:
        """The features, in order."""
        return list(self._dimensions)

    def values(self) -> Tensor:
        """[batch, sum of dimensions]."""
        return self._values

    def key_dim(self) -> int:
        """The dimension in which features stand side by side: 1."""
        return 1

    def length_per_key(self) -> list[int]:
        """The dimension of each feature."""
        return list(self._dimensions.values())

    def offset_per_key(self) -> list[int]:
        """The first column of each feature, and the end."""
        return [0, *itertools.accumulate(self._dimensions.values())]

    def __getitem__(self, key: str) -> Tensor:
        """[batch, dimension] of a feature, a view. KeyError for another one."""
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Tensor]:
        """Feature -> [batch, dimension], views."""
        return dict(zip(self._dimensions, self._values.split(self.length_per_key(), dim=1), strict=True))

    def __repr__(self) -> str:
        return f"KeyedVectors({self._dimensions}, {self._values!r})"


def _flatten(vectors: KeyedVectors) -> tuple[list[Tensor], list[tuple[str, int]]]:
    return [vectors.values()], list(vectors._dimensions.items())


def _unflatten(values: Iterable[Any], dimensions: Any) -> KeyedVectors:
    result = KeyedVectors.__new__(KeyedVectors)  # what stands for tensors is no tensor at times
    result._dimensions, result._values = {name: int(size) for name, size in dimensions}, next(iter(values))
    return result


# For torch.export and the like.
pytree.register_pytree_node(
    KeyedVectors, _flatten, _unflatten, serialized_type_name="sparse_operation_kit.torch.KeyedVectors"
)
