# SPDX-License-Identifier: Apache-2.0
"""The backward stages: spread, reduce, apply, and the gradient of the weights of a lookup.

Every function raises ValueError for shapes, dtypes and options that do not fit, IndexError for slots outside their
table, and MemoryError; no row and no state is changed then.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer
from sparse_operation_kit.core.lookup import Batch, Lookup, Routing, combiner_number
from sparse_operation_kit.core.messages import Messages
from sparse_operation_kit.core.optimizer import Optimizer
from sparse_operation_kit.core.table import Table


@dataclasses.dataclass(eq=False)
class Gradient:
    """One summand of the gradient of a table on this rank.

    Attributes:
      slots: [n] int32 or int64: local row numbers.
      values: [m, dimension] float32. Without row_splits m == n and slot j has the gradient values[j]; with row_splits
        the values are output gradients, and slot j gets its bag's times w_j over the divisor of `combiner` (see
        `Lookup`).
      row_splits: [m + 1] int64, or None.
      weights: [n] float32, or None.
      combiner: of bags; without row_splits every entry is one, and the combiner counts only with weights.
      unique: the caller vouches that no slot occurs twice.
      generation: of a dynamic table: `DynamicTable.generation` when the slots were located. None: the caller vouches
        that no key of them was erased since.
      num_members: where the values are output gradients of a `Lookup` with members: how many. They are
        [m / num_members, num_members * dimension] then. 0: there are none.
    """

    slots: npt.ArrayLike
    values: npt.ArrayLike
    row_splits: npt.ArrayLike | None = None
    weights: npt.ArrayLike | None = None
    combiner: str = "sum"
    unique: bool = False
    generation: int | None = None
    num_members: int = 0


@dataclasses.dataclass(eq=False)
class Update:
    """One table's optimizer step.

    Attributes:
      table: its weight is changed in place.
      optimizer: the settings of this step.
      gradients: the summands of the gradient; slots may occur in many of them.
      states: the optimizer's arrays in the order of optimizer.h, float32, C-contiguous, changed in place: each
        [slots, dimension], or [slots] for row-wise Adagrad.
      gradient_scale: multiplies the summed gradient.
      stamps: [slots] int64, set to `stamp` for the rows that the gradients name; None: not kept.
      stamp: when this step is.
    """

    table: Table
    optimizer: Optimizer
    gradients: Sequence[Gradient]
    states: Sequence[Array] = ()
    gradient_scale: float = 1.0
    stamps: Array | None = None
    stamp: int = 0


class _Gradients:
    """The C array of summands of a gradient, and what keeps their memory alive."""

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self.array = (_abi.Gradient * len(gradients))()
        self.num_entries = 0
        self._alive: list[Array | None] = []
        for i, gradient in enumerate(gradients):
            names = ("slots", "values", "row_splits", "weights")
            arrays = [
                (_arrays.read_rows if name == "values" else _arrays.read)(
                    getattr(gradient, name), f"gradient {i}: {name}"
                )
                for name in names
            ]
            self._alive += arrays
            self.num_entries += 0 if arrays[0] is None else arrays[0].size
            self.array[i] = _abi.Gradient(
                ctypes.sizeof(_abi.Gradient),
                combiner_number(gradient.combiner),
                _abi.GRADIENT_UNIQUE if gradient.unique else 0,
                *map(_arrays.view, arrays),
                _abi.FOREVER if gradient.generation is None else gradient.generation,
                gradient.num_members,
            )


def output_gradient_arrays(arrays: Sequence[npt.ArrayLike | None], num_lookups: int) -> list[Array | None]:
    """One array a lookup, or None; ValueError when there are more or fewer."""
    if len(arrays) != num_lookups:
        raise ValueError(f"output_gradients: {len(arrays)} of them for {num_lookups} lookups")
    return [_arrays.read_rows(array, f"output gradient {i}") for i, array in enumerate(arrays)]


def spread(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    output_gradients: Sequence[npt.ArrayLike | None],
    routing: Routing,
    *,
    context: Context | None = None,
) -> Array:
    """Output gradients -> the gradients of what combine read, laid out as the messages of floats: rank 1, float32.

    Args:
      lookups: as given to `route`.
      output_gradients: for each lookup like its output, float32, or None for zeros.
      routing: what `route` returned.
    """
    messages, batch = routing.messages(tables), Batch(tables, lookups)
    incoming, struct = output_gradient_arrays(output_gradients, len(lookups)), routing.struct()
    gradients = empty(context, messages.num_floats, np.float32)
    structs = (ctypes.byref(messages.struct), ctypes.byref(struct))
    _library.check(
        _abi.library().sok_spread(
            pointer(context), *batch.arguments, _arrays.views(incoming), *structs, _arrays.view(gradients)
        )
    )
    return gradients


def owner_gradients(messages: Messages, keys: Array | None, slots: Array, floats: Array) -> list[list[Gradient]]:
    """The gradients that came, for each table.

    Args:
      messages: of what each rank asked of this one.
      keys, slots: as `locate` had and gave them; keys only where row splits are among them.
      floats: the messages of gradients.
    """
    structs, first = (_abi.Gradient * messages.struct.num_parts)(), np.zeros(messages.struct.num_tables + 1, np.int64)
    arrays = [_arrays.view(array) for array in (keys, slots, floats)]
    pointers = (structs, first.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
    _library.check(_abi.library().sok_owner_gradients(ctypes.byref(messages.struct), *arrays, *pointers))

    def part(array: Array | None, base: _abi.Tensor, tensor: _abi.Tensor) -> Array | None:
        if array is None or tensor.rank == 0:
            return None
        shape = tuple(tensor.shape[: tensor.rank])
        begin = ((tensor.data or 0) - (base.data or 0)) // array.itemsize
        return array[begin : begin + int(np.prod(shape))].reshape(shape)

    def gradient(struct: _abi.Gradient) -> Gradient:
        of_slots, values = part(slots, arrays[1], struct.slots), part(floats, arrays[2], struct.values)
        assert of_slots is not None and values is not None
        unique = bool(struct.flags & _abi.GRADIENT_UNIQUE)
        return Gradient(of_slots, values, part(keys, arrays[0], struct.row_splits), unique=unique)

    ends = first.tolist()
    return [[gradient(struct) for struct in structs[a:b]] for a, b in itertools.pairwise(ends)]


def weight_gradient(
    tables: Sequence[Table],
    lookups: Sequence[Lookup],
    output_gradients: Sequence[npt.ArrayLike | None],
    *,
    inverse: npt.ArrayLike | None = None,
    rows: npt.ArrayLike | None = None,
    messages: Messages | None = None,
    context: Context | None = None,
) -> list[Array | None]:
    """d loss / d weights: for each lookup that has weights [n] float32, None for the others.

    Args:
      output_gradients: for each lookup [bags, dimension] float32, or None for zeros.
      inverse, rows, messages: as given to `combine`; no rows: they are read from the tables, as `gather_combine` does.

    Raises:
      IndexError: a key is outside its table.
    """
    batch = Batch(tables, lookups, located=rows is None)
    incoming = output_gradient_arrays(output_gradients, len(lookups))
    inverse_array, row_array = _arrays.read(inverse, "inverse"), _arrays.read(rows, "rows")
    result = [
        empty(context, size, np.float32) if has else None
        for has, size in zip(batch.has_weights, batch.num_keys, strict=True)
    ]
    arguments = (pointer(context), *batch.arguments, _arrays.views(incoming))
    if row_array is None:
        _library.check(_abi.library().sok_weight_gradient(*arguments, _arrays.views(result)))
    else:
        struct = None if messages is None else ctypes.byref(messages.struct)
        exchanged = (struct, _arrays.view(inverse_array), _arrays.view(row_array))
        _library.check(_abi.library().sok_weight_gradient_of_rows(*arguments, *exchanged, _arrays.views(result)))
    return result


def reduce(table: Table, gradients: Sequence[Gradient], *, context: Context | None = None) -> tuple[Array, Array]:
    """The summands of one table's gradient -> (slots [u] int64, distinct and ascending; values [u, dimension] float32).

    Raises:
      IndexError: a slot is outside table.weight.
    """
    summands = _Gradients(gradients)
    struct = table.columns()
    slots = empty(context, summands.num_entries, np.int64)
    values = empty(context, (summands.num_entries, max(table.shape[1], 0)), np.float32)
    count = empty(context, 1, np.int64)
    views = [_arrays.view(array) for array in (slots, values, count)]
    _library.check(
        _abi.library().sok_reduce(pointer(context), ctypes.byref(struct), len(gradients), summands.array, *views)
    )
    size = int(count[0])
    return slots[:size], values[:size]


def apply(
    updates: Sequence[Update], *, context: Context | None = None, agree: Callable[[], object] | None = None
) -> None:
    """Sums each table's gradients a row and runs its optimizer on those rows and their states, in place.

    Other rows are not touched. A table may occur once in `updates`. Everything is checked before the first row changes.

    Args:
      agree: called then; what it raises is raised, and nothing has changed (sok/gradient.h).

    Raises:
      IndexError: a slot is outside its table.
      ValueError: a state or stamps whose shape does not fit, a table named twice.
    """
    structs = (_abi.Update * len(updates))()
    alive: list[Any] = []
    for i, update in enumerate(updates):
        if len(update.states) > _abi.MAX_STATES:
            raise ValueError(f"update {i}: {len(update.states)} states, at most {_abi.MAX_STATES} are used")
        table, optimizer, summands = update.table.columns(), update.optimizer.struct(), _Gradients(update.gradients)
        alive += [table, optimizer, summands]
        struct = structs[i]
        struct.struct_size = ctypes.sizeof(_abi.Update)
        struct.table, struct.optimizer = ctypes.pointer(table), ctypes.pointer(optimizer)
        struct.gradient_scale = update.gradient_scale
        struct.num_states, struct.num_gradients = len(update.states), len(update.gradients)
        for j, state in enumerate(update.states):
            struct.states[j] = _arrays.view(_arrays.written(state, f"update {i}: state {j}"))
        for j in range(len(update.states), _abi.MAX_STATES):
            struct.states[j] = _arrays.absent()
        struct.gradients = ctypes.cast(summands.array, ctypes.POINTER(_abi.Gradient))
        stamps = None if update.stamps is None else _arrays.written(update.stamps, f"update {i}: stamps")
        struct.stamps, struct.stamp = _arrays.view(stamps), update.stamp
    raised: list[BaseException] = []
    asked = _abi.AGREE()
    if agree is not None:

        def ask(_: object) -> int:
            try:
                agree()
            except BaseException as error:  # cannot cross the core
                raised.append(error)
            return len(raised)

        asked = _abi.AGREE(ask)
    try:
        _library.check(_abi.library().sok_apply(pointer(context), len(updates), structs, asked, None))
    except RuntimeError:
        if raised:
            raise raised[0] from None
        raise
