# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a call send each other, and where everything lies in it (core/include/sok/messages.h)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer
from sparse_operation_kit.core.lookup import counts_pointer


@dataclasses.dataclass(frozen=True, eq=False)
class MessageLayout:
    """A count matrix read.

    Attributes:
      row_counts: [num_ranks, num_tables] int64 keys whose rows travel.
      sizes: [5, num_ranks] int64 elements of keys, keys of bags, row splits of bags, rows, sums.
      parts: [n] structured, with the fields of sok_message_part: by rank, rows by table, then bags by lookup.
    """

    row_counts: Array
    sizes: Array
    parts: Array

    @classmethod
    def read(
        cls, counts: npt.ArrayLike, dimensions: Sequence[int], lookup_tables: Sequence[int], *, row_stride: int = 0
    ) -> MessageLayout:
        """Reads counts [num_ranks, num_tables + 2 num_lookups] int64; ValueError for numbers that cannot be.

        row_stride: from a row to the next where counts has more columns; 0: it has none.
        """
        matrix = np.ascontiguousarray(counts, np.int64)
        if matrix.ndim != 2 or matrix.shape[1] < len(dimensions) + 2 * len(lookup_tables):
            raise ValueError(f"counts: shape {list(matrix.shape)} for {len(dimensions)} tables")
        num_ranks, widths, tables = len(matrix), np.array(dimensions, np.int64), np.array(lookup_tables, np.int64)
        row_counts = np.zeros((num_ranks, len(widths)), np.int64)
        sizes = np.zeros((_abi.NUM_SECTIONS, num_ranks), np.int64)
        parts = np.zeros(num_ranks * (len(widths) + len(tables)), np.dtype(_abi.MessagePart))
        struct = _abi.MessageLayout(ctypes.sizeof(_abi.MessageLayout), num_ranks, len(widths), len(tables))
        struct.row_stride = row_stride or matrix.shape[1]
        for field, array in zip(
            ("dimensions", "lookup_tables", "counts", "row_counts", "sizes"),
            (widths, tables, matrix, row_counts, sizes),
            strict=True,
        ):
            setattr(struct, field, counts_pointer(array))
        struct.parts = parts.ctypes.data_as(ctypes.POINTER(_abi.MessagePart))
        _library.check(_abi.library().sok_message_layout_read(ctypes.byref(struct)))
        return cls(row_counts, sizes, parts[: struct.num_parts])


def _sections(sizes: npt.ArrayLike, sections: Sequence[Array | None]) -> tuple[Array, Any]:
    numbers = np.ascontiguousarray(sizes, np.int64)
    if numbers.ndim != 2 or len(numbers) != len(sections):
        raise ValueError(f"sizes: shape {list(numbers.shape)} for {len(sections)} sections")
    return numbers, _arrays.views(sections)


def join_messages(
    sizes: npt.ArrayLike, sections: Sequence[npt.ArrayLike | None], *, context: Context | None = None
) -> Array:
    """The messages to all ranks, one after the other, of sections [n] int64 or float32; None where one has nothing.

    Args:
      sizes: [sections, num_ranks] elements for each rank. A section may be longer than these together.

    Raises:
      ValueError: a section is too short or of another dtype than the others.
    """
    read = [_arrays.read(section, f"sections[{i}]") for i, section in enumerate(sections)]
    numbers, views = _sections(sizes, read)
    dtype = next((array.dtype for array in read if array is not None and array.size), np.dtype(np.int64))
    messages = empty(context, int(numbers.sum()), dtype)
    _library.check(
        _abi.library().sok_messages_join(
            pointer(context), numbers.shape[1], len(numbers), counts_pointer(numbers), views, _arrays.view(messages)
        )
    )
    return messages


def split_messages(sizes: npt.ArrayLike, messages: npt.ArrayLike, *, context: Context | None = None) -> list[Array]:
    """The sections of messages that came, one after the other, from all ranks; the reverse of `join_messages`."""
    array = _arrays.read(messages, "messages")
    assert array is not None
    numbers = np.ascontiguousarray(sizes, np.int64)
    sections = [empty(context, int(own.sum()), array.dtype) for own in numbers]
    numbers, views = _sections(numbers, sections)
    _library.check(
        _abi.library().sok_messages_split(
            pointer(context), numbers.shape[1], len(numbers), counts_pointer(numbers), _arrays.view(array), views
        )
    )
    return sections
