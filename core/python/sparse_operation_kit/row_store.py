# SPDX-License-Identifier: Apache-2.0
"""Where a dynamic table keeps the rows that its capacity has no room for: the interface."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class RowStore(abc.ABC):
    """Records by key, beside a table's memory: `sok.DynamicVariable(..., store=...)`. One table on one rank uses it.

    A record is the bytes of a row and of all that belongs to it. Records of a table are of one size, which changes when
    an optimizer makes its states; the table then reads and writes all of them once. Keys are any integers of 64 bits,
    each at most once in a call. Calls come one at a time, from any thread. What a method raises ends the call to the
    table, which is as it was before then; `load` alone has given up rows, and begins anew when it is called again.
    """

    table: str | None = None
    """The name of the table that uses it."""

    @abc.abstractmethod
    def read(self, keys: Array) -> tuple[Array, Array]:
        """([n] bool: which of the keys [n] int64 are there; their records [number of these, size] uint8)."""

    @abc.abstractmethod
    def write(self, keys: Array, records: Array) -> None:
        """Keeps records [n, size] uint8 of keys [n] int64, in place of those that are there: all of them, or none where
        it raises. The arrays are the caller's again when it returns.
        """

    @abc.abstractmethod
    def erase(self, keys: Array) -> None:
        """Gives up keys [n] int64, those that are there: all of them, or none where it raises."""

    @abc.abstractmethod
    def keys(self, size: int) -> Iterator[Array]:
        """All keys, int64, in pieces of at most `size`, in any order. The store is read meanwhile, but not changed."""

    @abc.abstractmethod
    def size(self) -> int:
        """How many keys there are."""

    def flush(self) -> None:  # noqa: B027  # a store that has nothing to do is whole
        """What was written is where the store keeps it when this returns."""

    def close(self) -> None:  # noqa: B027
        """Gives up what it holds open. The table cannot be used then."""

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
