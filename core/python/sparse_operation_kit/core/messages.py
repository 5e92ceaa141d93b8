# SPDX-License-Identifier: Apache-2.0
"""How a batch is split, and where everything lies in what the ranks send each other (core/include/sok/messages.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array


class Messages:
    """The messages of one direction, between this rank and all, as a count matrix says.

    Attributes:
      keys, floats: [num_ranks] int64: elements of the message of keys, and of floats, of each rank.
      num_keys, num_floats: of all ranks together.
      num_bag_splits: how many elements of the messages of keys are row splits.
    """

    def __init__(self, counts: npt.ArrayLike, dimensions: Sequence[int], lookup_tables: Sequence[int] = ()) -> None:
        """Reads counts [num_ranks, k] int64 of tables with these dimensions, and lookups of the tables at these
        positions; none: the matrix has no columns of lookups. Further columns are not read.

        Raises:
          ValueError: numbers that cannot be.
        """
        matrix = np.ascontiguousarray(counts, np.int64)
        if matrix.ndim != 2 or matrix.shape[1] < len(dimensions) + 2 * len(lookup_tables):
            raise ValueError(
                f"counts: shape {list(matrix.shape)} for {len(dimensions)} tables and {len(lookup_tables)} lookups"
            )
        self.keys, self.floats = np.zeros(len(matrix), np.int64), np.zeros(len(matrix), np.int64)
        self._alive = np.array(dimensions, np.int64), np.array(lookup_tables, np.int64), matrix
        self.struct = _abi.Messages(ctypes.sizeof(_abi.Messages), len(matrix), len(dimensions), len(lookup_tables))
        self.struct.dimensions, self.struct.lookup_tables, self.struct.counts = map(_pointer, self._alive)
        self.struct.row_stride = matrix.shape[1]
        _library.check(
            _abi.library().sok_messages_read(ctypes.byref(self.struct), _pointer(self.keys), _pointer(self.floats))
        )
        self.num_keys, self.num_floats = self.struct.num_keys, self.struct.num_floats
        self.num_bag_splits = self.struct.num_bag_splits

    def lookups(self, keys: Array | None, slots: Array, floats: Array | None) -> Any:
        """What came to an owner as an array of sok_lookup, of the messages and of slots [num_keys] like the keys."""
        lookups = (_abi.Lookup * self.struct.num_parts)()
        arrays = map(_arrays.view, (keys, slots, floats))
        status = _abi.library().sok_owner_lookups(ctypes.byref(self.struct), *arrays, lookups)
        if status:  # else the views are still to be used
            _library.check(status)
        return lookups


def _pointer(array: Array) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
