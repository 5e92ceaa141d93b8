# SPDX-License-Identifier: Apache-2.0
"""Pooling at the owner: route_bags, combine_bags, spread_bags (core/include/sok/owner_pooling.h); the owner sums the
parts with `gather_combine`.

Sums of rows travel instead of rows. Each bag is cut into parts, one for each rank that its table lives on; "here(r, i)"
says that the table of lookup i lives on rank r. Errors are those of `sparse_operation_kit.core.lookup`.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer
from sparse_operation_kit.core.gradient import output_gradient_arrays
from sparse_operation_kit.core.lookup import Batch, Lookup
from sparse_operation_kit.core.table import Table


@dataclasses.dataclass(eq=False)
class BagRouting:
    """What `route_bags` makes of a batch of n keys.

    Attributes:
      keys: [n] int64 in send order: by owning rank, then lookup, those of a lookup as they came.
      counts: [num_ranks, num_lookups] int64: how many keys go to each rank for each lookup.
      splits: int64: for each rank, for each lookup with here(r, i), the row splits of its parts [bags + 1].
      scales: [bags of the call] float32: what the combiner multiplies the sum of a bag with.
    """

    keys: Array
    counts: Array
    splits: Array
    scales: Array

    def struct(self) -> _abi.BagRouting:
        """The sok_bag_routing; self must outlive it."""
        arrays = (self.keys, self.counts, self.splits, self.scales)
        return _abi.BagRouting(ctypes.sizeof(_abi.BagRouting), *map(_arrays.view, arrays))


def _num_elements(tables: Sequence[Table], lookups: Sequence[Lookup]) -> int:
    """Of the sums of all parts of a call."""
    return sum(
        _num_bags(lookup) * max(tables[lookup.table].shape[1], 0) * _num_parts(tables, lookup) for lookup in lookups
    )


def _num_parts(tables: Sequence[Table], lookup: Lookup) -> int:
    if not 0 <= lookup.table < len(tables):
        return 0  # the core reports it
    table = tables[lookup.table]
    return 1 if table.owner >= 0 else max(table.num_ranks, 0)


def _num_bags(lookup: Lookup) -> int:
    if lookup.row_splits is None:
        return _arrays.read(lookup.keys, "keys").size  # type: ignore[union-attr]
    return max(_arrays.read(lookup.row_splits, "row_splits").size - 1, 0)  # type: ignore[union-attr]


def choose_pooling(tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[bool]:
    """For each lookup whether it is better pooled at the owner, by the bytes that would travel; SOK_POOLING=owner or
    requester decides instead, where it is possible.

    Raises:
      ValueError: another value of SOK_POOLING.
    """
    batch = Batch(tables, lookups)
    pooled = (ctypes.c_int32 * len(lookups))()
    _library.check(_abi.library().sok_choose_pooling(pointer(None), *batch.arguments, pooled))
    return [bool(value) for value in pooled]


def route_bags(tables: Sequence[Table], lookups: Sequence[Lookup], *, context: Context | None = None) -> BagRouting:
    """Checks the keys and cuts the bags of lookups without weights into parts.

    Raises:
      IndexError: a key is outside its table.
      ValueError: a lookup has weights.
    """
    batch = Batch(tables, lookups)
    n = batch.num_entries
    num_ranks = max(tables[0].num_ranks, 0) if tables else 1
    routing = BagRouting(
        keys=empty(context, n, np.int64),
        counts=empty(context, (num_ranks, len(lookups)), np.int64),
        splits=empty(context, sum((_num_bags(x) + 1) * _num_parts(tables, x) for x in lookups), np.int64),
        scales=empty(context, sum(map(_num_bags, lookups)), np.float32),
    )
    struct = routing.struct()
    _library.check(_abi.library().sok_route_bags(pointer(context), *batch.arguments, ctypes.byref(struct)))
    return routing


def combine_bags(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    scales: npt.ArrayLike,
    sums: npt.ArrayLike,
    *,
    out: Sequence[Array] | None = None,
    context: Context | None = None,
) -> list[Array]:
    """Exchanged sums -> one pooled vector a bag: for each lookup [bags, dimension] float32.

    Args:
      scales: as `route_bags` gave them.
      sums: rank 1, float32: for each rank r and lookup with here(r, i) [bags, dimension].
      out: as of `combine`.
    """
    batch = Batch(tables, lookups, outputs=True, context=context, out=out)
    arrays = (_arrays.read(scales, "scales"), _arrays.read(sums, "sums"))
    _library.check(_abi.library().sok_combine_bags(pointer(context), *batch.arguments, *map(_arrays.view, arrays)))
    return batch.outputs


def spread_bags(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    output_gradients: Sequence[npt.ArrayLike | None],
    scales: npt.ArrayLike,
    *,
    context: Context | None = None,
) -> Array:
    """Output gradients -> the gradients of the sums of the parts, laid out as those: rank 1, float32.

    Args:
      output_gradients: for each lookup [bags, dimension] float32, or None for zeros.
      scales: as `route_bags` gave them.
    """
    batch = Batch(tables, lookups)
    incoming = output_gradient_arrays(output_gradients, len(lookups))
    factors = _arrays.read(scales, "scales")
    gradients = empty(context, _num_elements(tables, lookups), np.float32)
    _library.check(
        _abi.library().sok_spread_bags(
            pointer(context), *batch.arguments, _arrays.views(incoming), _arrays.view(factors), _arrays.view(gradients)
        )
    )
    return gradients


def copy(sources: Sequence[npt.ArrayLike], targets: Sequence[Array], *, context: Context | None = None) -> None:
    """targets[i][:] = sources[i] for arrays of rank 1, of one dtype and size each pair.

    Raises:
      ValueError: they do not fit.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
    read = [_arrays.read(source, f"source {i}") for i, source in enumerate(sources)]
    written = [_arrays.written(target, f"target {i}") for i, target in enumerate(targets)]
    _library.check(_abi.library().sok_copy(pointer(context), len(read), _arrays.views(read), _arrays.views(written)))
