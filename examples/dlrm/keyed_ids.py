# SPDX-License-Identifier: Apache-2.0
"""The ids of all columns in two arrays, as an EmbeddingBagCollection takes them from TorchRec's KeyedJaggedTensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

A = TypeVar("A")


@dataclasses.dataclass(frozen=True)
class KeyedIds(Generic[A]):
    """Bags of ids, as many for each column, in arrays of NumPy or tensors of a framework.

    ids: [total] int64, those of the first column's bags, then those of the second's, ...; bag_offsets: int64
    [columns * n + 1], where each bag begins and the last one ends; column_offsets: the same of columns, where the host
    knows it.
    """

    columns: Sequence[str]
    ids: A
    bag_offsets: A
    column_offsets: list[int] = dataclasses.field(default_factory=list)

    def keys(self) -> list[str]:
        """The columns."""
        return list(self.columns)

    def values(self) -> A:
        """The ids."""
        return self.ids

    def offsets(self) -> A:
        """Those of the bags."""
        return self.bag_offsets

    def offset_per_key(self) -> list[int]:
        """Those of the columns."""
        return self.column_offsets

    def of(self, ids: Any, bag_offsets: Any) -> KeyedIds[Any]:
        """The same ids in other arrays."""
        return KeyedIds(self.columns, ids, bag_offsets, self.column_offsets)
