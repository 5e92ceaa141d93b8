# SPDX-License-Identifier: Apache-2.0
"""Shuffles the rows of batches that are in memory together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..dlrm.arrays import ArrayBatch, Ragged

Array = npt.NDArray[Any] | Ragged


def shuffled(
    batches: Iterator[ArrayBatch], most_bytes: float, most_batches: float, generator: np.random.Generator
) -> Iterator[ArrayBatch]:
    """As many batches of the same sizes, in which rows have changed places with those of the batches that were held
    together: as many as fit into both limits, but one at least."""
    held: list[ArrayBatch] = []
    size = 0
    for batch in batches:
        own = sum(_bytes(array) for array in batch.arrays.values())
        if held and (size + own > most_bytes or len(held) + 1 > most_batches):
            yield from _exchanged(held, generator)
            held, size = [], 0
        held.append(batch)
        size += own
    if held:
        yield from _exchanged(held, generator)


def _exchanged(batches: Sequence[ArrayBatch], generator: np.random.Generator) -> Iterator[ArrayBatch]:
    names = list(batches[0].arrays)
    columns = {name: _arrow([batch.arrays[name] for batch in batches]) for name in names}
    sizes = [_length(batch.arrays[names[0]]) for batch in batches]
    order = generator.permutation(sum(sizes))
    first = 0
    for batch, size in zip(batches, sizes, strict=True):
        rows = order[first : first + size]
        first += size
        yield ArrayBatch(
            batch.index,
            batch.global_rows,
            {name: _rows(columns[name], rows, batch.arrays[name]) for name in names},
        )


def _arrow(arrays: Sequence[Array]) -> npt.NDArray[Any] | pa.Array:
    """The rows of all arrays, ragged ones as lists of Arrow."""
    if not isinstance(arrays[0], Ragged):
        return np.concatenate([array for array in arrays if isinstance(array, np.ndarray)])
    return pa.concat_arrays([_nested(array) for array in arrays if isinstance(array, Ragged)])


def _nested(array: Ragged) -> pa.Array:
    nested = pa.array(array.values)
    for splits in reversed(array.splits):
        nested = pa.LargeListArray.from_arrays(splits, nested)
    return nested


def _rows(column: npt.NDArray[Any] | pa.Array, rows: npt.NDArray[np.int64], like: Array) -> Array:
    if not isinstance(like, Ragged):
        return column[rows]
    nested = column.take(pa.array(rows))
    splits = []
    for _ in like.splits:
        offsets = nested.offsets.to_numpy()
        splits.append(offsets - offsets[0])
        nested = nested.flatten()
    return Ragged(nested.to_numpy(zero_copy_only=False).astype(like.values.dtype, copy=False), tuple(splits))


def _length(array: Array) -> int:
    return len(array.splits[0]) - 1 if isinstance(array, Ragged) else len(array)


def _bytes(array: Array) -> int:
    if isinstance(array, Ragged):
        return int(array.values.nbytes) + sum(splits.nbytes for splits in array.splits)
    return array.nbytes
