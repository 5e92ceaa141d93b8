# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table, not materialised while nobody but the wrapped optimizer wants it.

A lookup's backward gives each table a PendingGradient: the output gradients as they are, with the keys, row splits and
weights that say which row takes which part of them. OptimizerWrapper hands these to one `apply`, which reduces them and
updates the rows in one pass. Whatever else touches the gradient sees a sparse COO tensor, made by `reduce` at that
moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparse_operation_kit.torch._ops import ops

aten = torch.ops.aten


@dataclasses.dataclass(slots=True)
class Part:
    """One summand: entry j adds scale(j) * values[bag of j] to the gradient of slots[j]
    (core/include/sok/gradient.h).
    """

    slots: Tensor
    values: Tensor
    combiner: int = 0
    row_splits: Tensor | None = None
    weights: Tensor | None = None
    unique: bool = False
    versions: tuple[int, ...] = ()
    """Version counters of the borrowed tensors when they were borrowed; _OWN for tensors of the gradient's own."""

    def __post_init__(self) -> None:
        if not self.versions:
            self.versions = self._current()

    def _current(self) -> tuple[int, ...]:
        tensors = (self.slots, self.values, self.row_splits, self.weights)
        return tuple([-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors])

    def check(self, name: str) -> None:
        """Raises RuntimeError when a borrowed tensor was changed in place since backward()."""
        if self.versions is not _OWN and self.versions != self._current():
            raise overwritten(name)


def overwritten(name: str) -> RuntimeError:
    """The error of a gradient of this table whose borrowed tensors changed."""
    return RuntimeError(
        f"the ids, weights or output gradient of a lookup in table '{name}' were modified in place between backward() "
        "and the use of the table's gradient, which is computed from them. Step the optimizer (or call "
        "table.grad.coalesce()) before reusing the memory, or pass a copy to lookup_sparse"
    )


_OWN = (-2,)


def _own(slots: Tensor, values: Tensor) -> Part:
    return Part(slots, values, unique=True, versions=_OWN)


@dataclasses.dataclass(slots=True)
class PartLists:
    """Parts of one or several gradients as the ops take them."""

    slots: list[Tensor] = dataclasses.field(default_factory=list)
    values: list[Tensor] = dataclasses.field(default_factory=list)
    combiners: list[int] = dataclasses.field(default_factory=list)
    row_splits: list[Tensor] = dataclasses.field(default_factory=list)
    bagged: list[int] = dataclasses.field(default_factory=list)
    weights: list[Tensor] = dataclasses.field(default_factory=list)
    weighted: list[int] = dataclasses.field(default_factory=list)
    unique: list[int] = dataclasses.field(default_factory=list)

    def add(self, part: Part) -> None:
        """Appends one part."""
        index = len(self.slots)
        self.slots.append(part.slots)
        self.values.append(part.values)
        self.combiners.append(part.combiner)
        if part.row_splits is not None:
            self.row_splits.append(part.row_splits)
            self.bagged.append(index)
        if part.weights is not None:
            self.weights.append(part.weights)
            self.weighted.append(index)
        if part.unique:
            self.unique.append(index)

    def arguments(self) -> tuple[Any, ...]:
        """In the order of the schemas."""
        return (
            self.slots,
            self.values,
            self.combiners,
            self.row_splits,
            self.bagged,
            self.weights,
            self.weighted,
            self.unique,
        )


class PendingGradient(Tensor):
    """The gradient of this rank's shard of a table, [local rows, dimension], as the sum of its parts.

    Its dtype is the table's, as autograd asks of gradients; parts are float32. Only a tensor made from it is rounded.

    To Python it looks like a sparse COO tensor (`is_sparse`, `coalesce()`, `indices()`, `values()`, `to_dense()`, ...)
    whose indices are slots, the row numbers of the shard; optimizers that take sparse gradients take it. Adding
    gradients joins their parts; scaling, clipping and the norm work on the summed rows; anything else is given the
    sparse tensor.
    """

    _parts: list[Part]
    _scale: float
    _table_name: str
    _dense: Tensor | None
    _rounded: tuple[Part, Tensor] | None
    """The only part, and its values in the table's narrow dtype, which were given away."""

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        parts: list[Part],
        name: str,
        scale: float = 1.0,
        dense: Tensor | None = None,
    ) -> PendingGradient:
        self: PendingGradient = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._parts = parts  # shared by aliases: replaced, never changed in place
        self._table_name = name
        self._scale = scale
        self._dense = dense
        self._rounded = None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # Python-level calls go to C++ as they are; what a sparse tensor answers otherwise is defined below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # --- what this package's optimizers use -------------------------------------------------------------------------

    @property
    def parts(self) -> list[Part]:
        """The summands, to be multiplied with :attr:`scale`. Raises RuntimeError when one was overwritten meanwhile."""
        self._take_rounded()
        for part in self._parts:
            part.check(self._table_name)
        return self._parts

    @property
    def scale(self) -> float:
        """A factor of the whole gradient."""
        return self._scale

    def consolidate(self) -> Part:
        """Reduces the parts, in place, to one of distinct ascending slots that is this gradient's own,
        and returns it.
        """
        self._take_rounded()
        if len(self._parts) == 1 and self._parts[0].versions is _OWN:
            return self._parts[0]
        num_slots, dimension = self.shape
        if not self._parts:
            slots = torch.empty(0, dtype=torch.int64, device=self.device)
            values = torch.empty((0, dimension), dtype=torch.float32, device=self.device)
        else:
            lists = PartLists()
            for part in self.parts:
                lists.add(part)
            with torch.no_grad():
                slots, values, count = ops.reduce(self._table_name, num_slots, dimension, *lists.arguments())
                number = int(count.item())
                slots, values = slots[:number], values[:number]
                if self._scale != 1.0:
                    values.mul_(self._scale)
        part = _own(slots, values)
        self._parts, self._scale = [part], 1.0
        return part

    def materialise(self) -> Tensor:
        """A coalesced sparse COO tensor, whose values are this gradient's: who changes them in place (GradScaler does)
        changes it. A dense one when a dense gradient was added.
        """
        part = self.consolidate()
        values = part.values.to(self.dtype) if self._rounded is None else self._rounded[1]
        if values is not part.values:
            self._rounded = (part, values)
        sparse = torch.sparse_coo_tensor(
            part.slots.unsqueeze(0), values, tuple(self.shape), is_coalesced=True, check_invariants=False
        )
        return sparse if self._dense is None else self._dense.add(sparse)

    def _take_rounded(self) -> None:
        """Takes over what was written into rounded values; other elements keep their float32."""
        if self._rounded is not None:
            part, given = self._rounded
            changed = given != part.values.to(given.dtype)
            part = _own(part.slots, torch.where(changed, given.float(), part.values))
            self._parts, self._rounded = [part], (part, given)

    def _take(self, value: Tensor) -> None:
        """Becomes the gradient that `materialise` returned, after something changed that."""
        self._scale, self._rounded = 1.0, None
        if value.layout == torch.strided:
            self._parts, self._dense = [], value
        else:
            value = value.coalesce()
            self._parts, self._dense = [_own(value._indices()[0], value._values().float())], None

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

    def coalesce(self) -> Tensor:
        return self.materialise().coalesce() if self.is_sparse else self.materialise()

    def is_coalesced(self) -> bool:
        return len(self._parts) == 1 and self._parts[0].versions is _OWN

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

    def norm(self, *args: Any, **kwargs: Any) -> Tensor:
        source = self.materialise() if self._dense is not None else self.consolidate().values
        return source.norm(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        entries = sum(part.slots.shape[0] for part in self._parts)
        return (
            f"PendingGradient(table '{self._table_name}', size={tuple(self.shape)}, {len(self._parts)} parts, "
            f"{entries} entries)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingGradient:
        memo[id(self)] = copied = self._copy()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialise().__reduce_ex__(protocol)

    # --- what C++ asks for ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DETACH:  # AccumulateGrad's, for each table of each step
            return args[0]._alias()
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

    def _like(self, parts: list[Part], scale: float, dense: Tensor | None) -> PendingGradient:
        return PendingGradient(self.shape, self.dtype, self.device, parts, self._table_name, scale, dense)

    def _alias(self) -> PendingGradient:
        self._take_rounded()
        return self._like(self._parts, self._scale, self._dense)

    def _copy(self) -> PendingGradient:
        part = self.consolidate()
        own = _own(part.slots.clone(), part.values.clone())
        return self._like([own], 1.0, None if self._dense is None else self._dense.clone())

    def _assign(self, other: PendingGradient) -> PendingGradient:
        self._parts, self._scale, self._dense, self._rounded = other._parts, other._scale, other._dense, None
        return self


def _writes(func: Any, args: Sequence[Any], kwargs: Any, tensor: Tensor) -> bool:
    """Whether the op changes this tensor among its arguments in place."""
    values = [*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :])]
    written = [value for value, to in zip(values, func._schema.arguments, strict=True) if to.is_write]
    return any(leaf is tensor for leaf in pytree.tree_leaves(written))


_DETACH = aten.detach.default


def _clone(gradient: PendingGradient, *, memory_format: Any = None) -> PendingGradient:
    return gradient._copy()


def _sum(a: Any, b: Any, alpha: float) -> Any:
    """a + alpha * b, one of which at least is pending; NotImplemented when the other is no gradient of the same
    table.
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return NotImplemented
    for gradient in (a, b):
        if isinstance(gradient, PendingGradient):
            gradient._take_rounded()
    if isinstance(b, PendingGradient) and alpha != 1:
        b = _scaled(b, alpha)
    if isinstance(a, PendingGradient) and isinstance(b, PendingGradient):
        if a._scale != b._scale:  # one was scaled or reduced already: so must the other be
            a, b = a._alias(), b._alias()
            a.consolidate(), b.consolidate()
        dense = a._dense if b._dense is None else b._dense if a._dense is None else a._dense + b._dense
        return a._like([*a._parts, *b._parts], a._scale, dense)
    if isinstance(a, PendingGradient):
        if b.layout != torch.strided:
            return NotImplemented
        return a._like(a._parts, a._scale, alpha * b if a._dense is None else torch.add(a._dense, b, alpha=alpha))
    if a.layout != torch.strided:
        return NotImplemented
    return torch.add(a, b.materialise())


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    result = _sum(a, b, alpha)
    if isinstance(result, PendingGradient) and result.is_dense() and not isinstance(a, PendingGradient):
        return result.materialise()
    return result


def _add_in_place(a: Any, b: Any, *, alpha: float = 1) -> Any:
    if not isinstance(a, PendingGradient):
        return NotImplemented  # dense += pending: the sparse tensor is added
    result = _sum(a, b, alpha)
    return result if result is NotImplemented else a._assign(result)


def _scaled(gradient: PendingGradient, factor: Any, operation: Callable[[Tensor, Any], Tensor] = torch.mul) -> Any:
    if isinstance(factor, Tensor) and factor.numel() != 1:
        return NotImplemented
    part = gradient.consolidate()
    own = _own(part.slots, operation(part.values, factor))
    dense = None if gradient._dense is None else operation(gradient._dense, factor)
    return gradient._like([own], 1.0, dense)


def _mul(a: Any, b: Any) -> Any:
    return _scaled(a, b) if isinstance(a, PendingGradient) else _scaled(b, a)


def _mul_in_place(a: Any, b: Any) -> Any:
    if not isinstance(a, PendingGradient) or isinstance(b, PendingGradient):
        return NotImplemented
    result = _scaled(a, b)
    return result if result is NotImplemented else a._assign(result)


def _div(a: Any, b: Any) -> Any:
    if not isinstance(a, PendingGradient) or isinstance(b, PendingGradient):
        return NotImplemented
    return _scaled(a, b, torch.div)


def _div_in_place(a: Any, b: Any) -> Any:
    result = _div(a, b)
    return result if result is NotImplemented else a._assign(result)


def _neg(gradient: PendingGradient) -> Any:
    return _scaled(gradient, -1)


def _clamp(gradient: PendingGradient, low: Any = None, high: Any = None) -> Any:
    # Rows that are not here are zero: they stay so only when zero is within the bounds.
    if isinstance(low, Tensor) or isinstance(high, Tensor) or (low or 0) > 0 or (high or 0) < 0:
        return NotImplemented
    return _scaled(gradient, 1, lambda values, _: torch.clamp(values, low, high))


def _clamp_in_place(gradient: PendingGradient, low: Any = None, high: Any = None) -> Any:
    result = _clamp(gradient, low, high)
    return result if result is NotImplemented else gradient._assign(result)


def _zero(gradient: PendingGradient) -> PendingGradient:
    gradient._parts, gradient._scale, gradient._dense, gradient._rounded = [], 1.0, None, None
    return gradient


def _zeros_like(gradient: PendingGradient, **kwargs: Any) -> PendingGradient:
    return gradient._like([], 1.0, None)


def _new_empty(gradient: PendingGradient, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    # AccumulateGrad copies a gradient that somebody else still holds with new_empty_strided(...).copy_(gradient).
    if tuple(size) != tuple(gradient.shape) or kwargs.get("dtype") not in (None, gradient.dtype):
        return NotImplemented
    return gradient._like([], 1.0, None)


def _copy_in_place(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, PendingGradient):
        if target.shape != source.shape or target.layout != torch.strided:
            return NotImplemented
        return target.copy_(source.to_dense())
    if not isinstance(source, PendingGradient):
        if source.layout != torch.strided:
            return NotImplemented
        return target._assign(target._like([], 1.0, source.to(target.dtype, copy=True)))
    # Not shared: one of the two may be scaled in place later.
    return target._assign(source._alias() if not source.is_coalesced() else source._copy())


def _vector_norm(gradient: PendingGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if dim is not None or gradient.is_dense() or ord <= 0:
        return NotImplemented
    values = gradient.consolidate().values
    if values.numel() == 0:
        values = values.new_zeros(1)
    return torch.linalg.vector_norm(values, ord, **kwargs)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: PendingGradient._alias,
    aten.clone.default: _clone,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_in_place,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.mul_.Tensor: _mul_in_place,
    aten.mul_.Scalar: _mul_in_place,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.div_.Tensor: _div_in_place,
    aten.div_.Scalar: _div_in_place,
    aten.neg.default: _neg,
    aten.clamp.default: _clamp,
    aten.clamp_.default: _clamp_in_place,
    aten.zero_.default: _zero,
    aten.zeros_like.default: _zeros_like,
    aten.new_empty_strided.default: _new_empty,
    aten.new_empty.default: _new_empty,
    aten.empty_like.default: _zeros_like,
    aten.copy_.default: _copy_in_place,
    aten.linalg_vector_norm.default: _vector_norm,
}
