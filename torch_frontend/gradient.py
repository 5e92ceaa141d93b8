# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table as PyTorch's users see it.

A lookup's backward() leaves one object for all tables of the call (csrc/call_gradient.h): output gradients as they are,
with the keys, row splits and weights that say which row takes which part of them. Each table has a list of these
(csrc/table_gradient.h), from which OptimizerWrapper updates its rows (table_step.py). Who reads `table.grad` is given
that list in a PendingGradient, which looks like a sparse COO tensor and is made one, by `reduce`, where somebody needs
its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_TableGradient: Any = torch.classes.sok.TableGradient


class Rows(NamedTuple):
    """Distinct ascending slots [n] int64 and their gradients [n, dimension] float32."""

    slots: Tensor
    values: Tensor


class PendingGradient(Tensor):
    """The gradient of this rank's shard of a table, [local rows, dimension], as the sum of what lookups left for it.

    Its dtype is the table's, as autograd asks of gradients; it is computed in float32. Only a tensor made from it is
    rounded.

    To Python it looks like a sparse COO tensor (`is_sparse`, `coalesce()`, `indices()`, `values()`, `to_dense()`, ...)
    whose indices are slots, the row numbers of the shard; optimizers that take sparse gradients take it. Adding and
    scaling gradients needs no rows; clipping and the norm work on the summed rows; anything else is given the sparse
    tensor.
    """

    handle: Any
    """torch.classes.sok.TableGradient of the lookups, or of rows."""
    _table_name: str
    _index: Any
    """torch.classes.sok.IndexedTable of a table that has an index, else None."""
    _dense: Tensor | None
    """A dense gradient to be added, so that every row has one."""
    _rounded: Tensor | None
    """The values in the table's narrow dtype, where they were given away."""

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        handle: Any,
        name: str,
        dense: Tensor | None = None,
        index: Any = None,
    ) -> PendingGradient:
        self: PendingGradient = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.handle = handle
        self._table_name = name
        self._dense = dense
        self._rounded = None
        self._index = index
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # Python-level calls go to C++ as they are; what a sparse tensor answers otherwise is defined below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def rows(self) -> Rows:
        """The summed rows, without a dense gradient that was added. They are this gradient's: who changes the values in
        place changes it. Raises RuntimeError when the ids, weights or an output gradient of a lookup were overwritten.
        """
        num_slots, dimension = self.shape
        rows = Rows(*self.handle.reduce(self._table_name, num_slots, dimension, self.device, self._index))
        if self._rounded is not None:  # what was written there; other elements keep their float32
            given = self._rounded
            changed = given != rows.values.to(given.dtype)
            rows.values.copy_(torch.where(changed, given.float(), rows.values))
        return rows

    def materialise(self) -> Tensor:
        """A coalesced sparse COO tensor, whose values are this gradient's: who changes them in place (GradScaler does)
        changes it. A dense one when a dense gradient was added.
        """
        rows = self.rows()
        values = rows.values
        if self.dtype != values.dtype:
            if self._rounded is None:
                self._rounded = values.to(self.dtype)
            values = self._rounded
        sparse = torch.sparse_coo_tensor(
            rows.slots.unsqueeze(0), values, tuple(self.shape), is_coalesced=True, check_invariants=False
        )
        return sparse if self._dense is None else self._dense.add(sparse)

    def settled(self) -> Any:
        """The handle, with everything in it that was written to tensors made from this gradient."""
        if self._rounded is not None:
            self.rows()
        return self.handle

    def is_dense(self) -> bool:
        """Whether a dense gradient was added, so that every row has one."""
        return self._dense is not None

    # --- the face of a sparse tensor --------------------------------------------------------------------------------

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self._dense is None

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.sparse_coo if self._dense is None else torch.strided

    @property
    def data(self) -> PendingGradient:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:
            return
        if value.shape != self.shape:
            raise ValueError(f"the gradient of table '{self._table_name}' has shape {list(self.shape)}")
        with torch.no_grad():
            _copy_in_place(self, value) if isinstance(value, PendingGradient) else self._take(value)

    def coalesce(self) -> Tensor:
        return self.materialise().coalesce() if self.is_sparse else self.materialise()

    def is_coalesced(self) -> bool:
        return bool(self.handle.is_reduced())

    def indices(self) -> Tensor:
        return self.materialise().indices()

    def values(self) -> Tensor:
        return self.materialise().values()

    def _indices(self) -> Tensor:
        return self.materialise()._indices()

    def _values(self) -> Tensor:
        return self.materialise()._values()

    def _nnz(self) -> int:
        return self.materialise()._nnz()

    def sparse_dim(self) -> int:
        return 1

    def dense_dim(self) -> int:
        return 1

    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.materialise().to_dense(*args, **kwargs)

    def to_sparse(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.materialise().to_sparse(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("cannot assign to elements of the gradient of a table, as of a sparse tensor")

    def norm(self, p: Any = "fro", dim: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        # Rows that are not here are zero, which a norm of all elements does not see.
        counts_them = self._dense is not None or dim is not None or (isinstance(p, (int, float)) and p < 0)
        source = self.to_dense() if counts_them else self.rows().values
        if dim is None and source.numel() == 0:  # of no elements there is no largest one
            source = source.new_zeros((1, self.shape[1]))
        return source.norm(p, dim, *args, **kwargs)

    def share_memory_(self) -> PendingGradient:
        """Moves what it holds to memory that processes share, as module.share_memory() asks of gradients too."""
        slots, values = self.rows()  # clones: the handle has pointers to these
        handle = self._of(slots.clone().share_memory_(), values.clone().share_memory_())
        return self._become(handle, None if self._dense is None else self._dense.share_memory_())

    def is_shared(self) -> bool:
        return bool(self.rows().values.is_shared() and (self._dense is None or self._dense.is_shared()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        summands, entries = self.handle.sizes()
        sizes = f"size={tuple(self.shape)}, {summands} summands, {entries} entries"
        return f"PendingGradient(table '{self._table_name}', {sizes})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingGradient:
        memo[id(self)] = copied = _clone(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialise().__reduce_ex__(protocol)

    # --- what C++ asks for ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        given: dict[int, tuple[PendingGradient, Tensor]] = {}

        def materialise(gradient: PendingGradient) -> Tensor:
            return given.setdefault(id(gradient), (gradient, gradient.materialise()))[1]

        args, kwargs = pytree.tree_map_only(PendingGradient, materialise, (tuple(args), kwargs or {}))
        result = func(*args, **kwargs)
        for gradient, value in given.values() if func._schema.is_mutable else ():
            if _writes(func, args, kwargs, value):
                gradient._take(value)
                result = gradient if result is value else result
        return result

    def _like(self, handle: Any, dense: Tensor | None = None) -> PendingGradient:
        return PendingGradient(self.shape, self.dtype, self.device, handle, self._table_name, dense, self._index)

    def _alias(self) -> PendingGradient:
        """Another one of the same lookups: what is done to one of the two later does not change the other."""
        return self._like(self.settled().copy(), self._dense)

    def _of(self, slots: Tensor, values: Tensor, unique: bool = True) -> Any:
        return of_rows(self._table_name, slots, values, unique, self._index)

    def _take(self, value: Tensor) -> None:
        """Becomes this gradient."""
        if value.layout == torch.strided:
            self._become(self._of(*self._no_rows()), value)
        else:
            value = value.coalesce()
            self._become(self._of(value._indices()[0], value._values().float()), None)

    def _become(self, handle: Any, dense: Tensor | None) -> PendingGradient:
        self.handle, self._dense, self._rounded = handle, dense, None
        return self

    def grown(self, num_slots: int) -> PendingGradient:
        """This gradient of a table that has more slots by now."""
        shape, handle = (num_slots, self.shape[1]), self.settled().copy()
        result = PendingGradient(shape, self.dtype, self.device, handle, self._table_name, index=self._index)
        if self._dense is not None:
            result._dense = self._dense.new_zeros(result.shape)
            result._dense[: self.shape[0]] = self._dense
        return result

    def _no_rows(self) -> Rows:
        slots = torch.empty(0, dtype=torch.int64, device=self.device)
        return Rows(slots, torch.empty((0, self.shape[1]), dtype=torch.float32, device=self.device))


def of_rows(name: str, slots: Tensor, values: Tensor, unique: bool, index: Any = None) -> Any:
    """torch.classes.sok.TableGradient of rows: slots [n], values [n, dimension] float32; unique: the slots ascend, and
    none occurs twice; index: torch.classes.sok.IndexedTable of a table that has an index.
    """
    return _TableGradient.of_rows(name, slots, values, unique, index)


def _carry(handles: list[Any], tables: list[Tensor], names: list[str]) -> list[Tensor]:
    """The op `carry` (csrc/library.cc). Gradients that are there already get the tables' shapes of now."""
    for table in tables:
        grow: Any = getattr(table, "_grow_gradient", None)
        if grow is not None:
            grow()
    return [
        PendingGradient(table.shape, table.dtype, table.device, handle, name, index=getattr(table, "_index", None))
        for handle, table, name in zip(handles, tables, names, strict=True)
    ]


torch.library.impl("sok::carry", "CompositeExplicitAutograd")(_carry)


def _writes(func: Any, args: Sequence[Any], kwargs: Any, tensor: Tensor) -> bool:
    """Whether the op changes this tensor among its arguments in place."""
    values = [*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :])]
    written = [value for value, to in zip(values, func._schema.arguments, strict=True) if to.is_write]
    return any(leaf is tensor for leaf in pytree.tree_leaves(written))


# Handlers of ops. NotImplemented: they take the sparse tensor. Those that change a gradient in place are made of those
# that do not.


def _clone(gradient: PendingGradient, *, memory_format: Any = None) -> PendingGradient:
    slots, values = gradient.rows()
    dense = None if gradient._dense is None else gradient._dense.clone()
    return gradient._like(gradient._of(slots.clone(), values.clone()), dense)


def _sum(a: Any, b: Any, alpha: float) -> Any:
    """a + alpha * b, one of which at least is pending; NotImplemented when the other is no gradient of the same
    table.
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return NotImplemented
    if isinstance(a, PendingGradient) and isinstance(b, PendingGradient) and a.shape[1:] == b.shape[1:]:
        slots = max(a.shape[0], b.shape[0])  # a dynamic table may have grown between them
        a, b = (x if x.shape[0] == slots else x.grown(slots) for x in (a, b))
    if a.shape != b.shape:
        return NotImplemented
    if isinstance(a, PendingGradient) and isinstance(b, PendingGradient):
        result = a._alias()
        result.handle.add(b.settled().number(), alpha)
        if b._dense is not None:
            added = alpha * b._dense
            result._dense = added if a._dense is None else a._dense + added
        return result
    if isinstance(a, PendingGradient):
        if b.layout != torch.strided:
            return NotImplemented
        return a._like(a.settled().copy(), alpha * b if a._dense is None else torch.add(a._dense, b, alpha=alpha))
    if not isinstance(b, PendingGradient) or a.layout != torch.strided:
        return NotImplemented
    return torch.add(a, b.materialise(), alpha=alpha)


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    return _sum(a, b, alpha)


def _number(factor: Any) -> float | None:
    """A factor that is known without waiting for a GPU."""
    if isinstance(factor, Tensor):
        return float(factor.item()) if factor.numel() == 1 and factor.is_cpu else None
    return float(factor)


def _scaled(gradient: Any, factor: Any) -> Any:
    """The gradient times `factor`, a number or a tensor of one."""
    if not isinstance(gradient, PendingGradient) or isinstance(factor, PendingGradient):
        return NotImplemented
    dense = None if gradient._dense is None else gradient._dense * factor
    number = _number(factor)
    if number is not None:
        result = gradient._like(gradient.settled().copy(), dense)
        result.handle.scale(number)
        return result
    if factor.numel() != 1:
        return NotImplemented
    slots, values = gradient.rows()
    return gradient._like(gradient._of(slots, values * factor), dense)


def _mul(a: Any, b: Any) -> Any:
    return _scaled(a, b) if isinstance(a, PendingGradient) else _scaled(b, a)


def _mul_in_place(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, PendingGradient) and gradient._dense is None and not isinstance(factor, PendingGradient):
        number = _number(factor)
        if number is not None:  # as GradScaler and clipping do it, for each table
            gradient.settled().scale(number)
            gradient._rounded = None
            return gradient
    return _in_place(_mul)(gradient, factor)


def _div(a: Any, b: Any) -> Any:
    if isinstance(b, PendingGradient):
        return NotImplemented
    given = b if isinstance(b, Tensor) else torch.tensor(b, dtype=torch.float64, device="cpu")
    return _scaled(a, given.reciprocal())


def _neg(gradient: PendingGradient) -> Any:
    return _scaled(gradient, -1)


def _clamp(gradient: PendingGradient, low: Any = None, high: Any = None) -> Any:
    # Rows that are not here are zero: they stay so only when zero is within the bounds.
    if isinstance(low, Tensor) or isinstance(high, Tensor) or (low or 0) > 0 or (high or 0) < 0 or gradient.is_dense():
        return NotImplemented
    slots, values = gradient.rows()
    return gradient._like(gradient._of(slots, torch.clamp(values, low, high)))


def _zeros_like(gradient: PendingGradient, **kwargs: Any) -> PendingGradient:
    return gradient._like(gradient._of(*gradient._no_rows()))


def _new_empty(gradient: PendingGradient, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    # AccumulateGrad copies a gradient that somebody else still holds with new_empty_strided(...).copy_(gradient).
    if tuple(size) != tuple(gradient.shape) or kwargs.get("dtype") not in (None, gradient.dtype):
        return NotImplemented
    return _zeros_like(gradient)


def _copy_in_place(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, PendingGradient):
        if target.shape != source.shape or target.layout != torch.strided:
            return NotImplemented
        return target.copy_(source.to_dense())
    if not isinstance(source, PendingGradient):
        if source.layout != torch.strided:
            return NotImplemented
        return target._become(_zeros_like(target).handle, source.to(target.dtype, copy=True))
    # Not shared: the values of one of the two may be changed in place later.
    other = _clone(source) if source.is_coalesced() else source._alias()
    return target._become(other.handle, other._dense)


def _vector_norm(gradient: PendingGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if dim is not None or gradient.is_dense() or ord <= 0:
        return NotImplemented
    values = gradient.rows().values
    if values.numel() == 0:
        values = values.new_zeros(1)
    return torch.linalg.vector_norm(values, ord, **kwargs)


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def change(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(gradient, PendingGradient):
            return NotImplemented  # dense += pending: the sparse tensor is added
        result = function(gradient, *args, **kwargs)
        return result if result is NotImplemented else gradient._become(result.handle, result._dense)

    return change


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: PendingGradient._alias,
    aten.alias.default: PendingGradient._alias,
    aten.clone.default: _clone,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _in_place(_add),
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.mul_.Tensor: _mul_in_place,
    aten.mul_.Scalar: _mul_in_place,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.div_.Tensor: _in_place(_div),
    aten.div_.Scalar: _in_place(_div),
    aten.neg.default: _neg,
    aten.clamp.default: _clamp,
    aten.clamp_.default: _in_place(_clamp),
    aten.zero_.default: _in_place(_zeros_like),
    aten.zeros_like.default: _zeros_like,
    aten.new_empty_strided.default: _new_empty,
    aten.new_empty.default: _new_empty,
    aten.empty_like.default: _zeros_like,
    aten.copy_.default: _copy_in_place,
    aten.linalg_vector_norm.default: _vector_norm,
}
