# SPDX-License-Identifier: Apache-2.0
"""Loads the op library (csrc/) and gives each op its fake: the shapes and dtypes that torch.compile and export reason
with.

The ops are ``torch.ops.sok.*``; csrc/library.cc describes their arguments. One process may load them once.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_operation_kit.core import _library

LIBRARY = pathlib.Path(__file__).resolve().parent / "libsok_torch.so"

_library.load_ops(LIBRARY, "PyTorch", torch.__version__, torch.ops.load_library)
ops = torch.ops.sok


def _num_bags(keys: Tensor, index: int, row_splits: Sequence[Tensor], bagged: Sequence[int]) -> int | torch.SymInt:
    return row_splits[list(bagged).index(index)].shape[0] - 1 if index in bagged else keys.shape[0]


def _pooled(  # type: ignore[no-untyped-def]
    like, dimensions, keys, key_tables, row_splits, bagged, concat, members
) -> list[Tensor]:
    side_by_side = [max(1, count) for count in members] or [1] * len(keys)
    shapes = [
        (_num_bags(key, i, row_splits, bagged) // count, dimensions[table] * count)
        for i, (key, table, count) in enumerate(zip(keys, key_tables, side_by_side, strict=True))
    ]
    if concat:
        shapes = [(shapes[0][0], sum(width for _, width in shapes))]
    return [like.new_empty(shape, dtype=torch.float32) for shape in shapes]


@torch.library.register_fake("sok::gather_combine")
def _gather_combine(  # type: ignore[no-untyped-def]
    tables,
    names,
    keys,
    key_tables,
    combiners,
    row_splits,
    bagged,
    weights,
    weighted,
    concat=False,
    members=None,
    by_key=None,
):
    dimensions = [table.shape[1] for table in tables]
    return _pooled(tables[0], dimensions, keys, key_tables, row_splits or (), bagged or (), concat, members or ())


@torch.library.register_fake("sok::weight_gradient")
def _weight_gradient(  # type: ignore[no-untyped-def]
    output_gradients,
    tables,
    names,
    keys,
    key_tables,
    combiners,
    row_splits,
    bagged,
    weights,
    weighted,
    generations=(),
    members=(),
):
    return [torch.empty_like(weight) for weight in weights]


@torch.library.register_fake("sok::locate_members")
def _locate_members(keys, row_splits, stack, num_rows, names, first_keys, rows):  # type: ignore[no-untyped-def]
    return keys.new_empty((keys.shape[0],), dtype=torch.int64)


@torch.library.register_fake("sok::bags")
def _bags(rows, num_bags):  # type: ignore[no-untyped-def]
    return rows.new_empty((num_bags + 1,)), rows.new_empty((rows.shape[0],)), rows.new_empty((1,), dtype=torch.int32)


@torch.library.register_fake("sok::initialize")
def _initialize(rows, kind, seed, a, b, keys, first_key, key_stride):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sok::count_up")
def _count_up(numbers):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sok::error_flags")
def _error_flags(counts):  # type: ignore[no-untyped-def]
    return counts.new_empty((counts.shape[0],))


@torch.library.register_fake("sok::assign")
def _assign(target, name, owner, num_rows, num_ranks, rank, keys, values):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sok::all_to_all")
def _all_to_all(received, send, communicator, send_counts, receive_counts):  # type: ignore[no-untyped-def]
    return None
