# SPDX-License-Identifier: Apache-2.0
"""Bags from coordinates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer


def bags_from_coordinates(
    rows: npt.ArrayLike, num_bags: int, *, context: Context | None = None
) -> tuple[Array, Array, bool]:
    """Entries that name their bag by number, in any order -> (row_splits, order, sorted).

    Args:
      rows: [n] or [n, k] int64: the bag of each entry; of a rank-2 array column 0 is read.
      num_bags: bags of the batch.

    Returns:
      row_splits: [num_bags + 1] int64.
      order: [n] int64: the entries by bag; those of a bag in their given order.
      sorted: True when the entries were in order already, so that `order` is 0, 1, ..., n - 1.

    Raises:
      IndexError: a bag outside [0, num_bags).
    """
    row_array = _arrays.read(rows, "rows")
    assert row_array is not None
    n = row_array.shape[0] if row_array.ndim else 0
    splits, order = empty(context, max(num_bags, 0) + 1, np.int64), empty(context, n, np.int64)
    is_sorted = empty(context, 1, np.int32)
    views = [_arrays.view(array) for array in (splits, order, is_sorted)]
    _library.check(
        _abi.library().sok_bags_from_coordinates(pointer(context), _arrays.view(row_array), num_bags, *views)
    )
    return splits, order, bool(is_sorted[0])
