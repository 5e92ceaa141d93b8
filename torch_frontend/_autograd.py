# SPDX-License-Identifier: Apache-2.0
"""Autograd formulas of the ops: each stage's gradient is its mirror. gather_combine and gather give pending gradients,
combine's gradient is spread. The gradients of rows cannot be differentiated again: that is an error, not a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.gradient import Part, PendingGradient


class _LookupState:
    """Lookup arguments kept between forward and backward; the tensors are saved by autograd, the rest here."""

    def __init__(self, keys: Any, key_tables: Any, combiners: Any, bagged: Any, weighted: Any) -> None:
        self.num_keys = len(keys)
        self.key_tables, self.combiners = list(key_tables), list(combiners)
        self.bagged, self.weighted = list(bagged), list(weighted)

    @property
    def num_tensors(self) -> int:
        return self.num_keys + len(self.bagged) + len(self.weighted)

    def arguments(self, saved: Sequence[Tensor]) -> tuple[Any, ...]:
        """keys, key_tables, combiners, row_splits, bagged, weights, weighted, as the schemas have them."""
        first, second = self.num_keys, self.num_keys + len(self.bagged)
        return (
            list(saved[:first]),
            self.key_tables,
            self.combiners,
            list(saved[first:second]),
            self.bagged,
            list(saved[second : self.num_tensors]),
            self.weighted,
        )


def _first_order_only(ctx: Any, gradients: Sequence[Tensor | None]) -> None:
    if torch.is_grad_enabled() and any(gradient is not None and gradient.requires_grad for gradient in gradients):
        raise NotImplementedError(
            "the gradient of a lookup cannot be differentiated again (create_graph=True goes through lookup_sparse); "
            "detach the looked-up vectors, or take second derivatives of the other inputs only"
        )


def _nothing(items: Sequence[Any]) -> Any:
    """The gradient of an argument that has none, in the form that torch.library expects for a list."""
    return [None] * len(items) if all(isinstance(item, Tensor) for item in items) else None


# --- gather_combine -----------------------------------------------------------------------------------------------------


def _setup_gather_combine(ctx: Any, inputs: Any, output: Any) -> None:
    tables, names, owners, num_rows, keys, key_tables, combiners, row_splits, bagged, weights, weighted = inputs
    ctx.set_materialize_grads(False)
    ctx.state = _LookupState(keys, key_tables, combiners, bagged, weighted)
    ctx.placement = (list(names), list(owners), list(num_rows), [table.shape[1] for table in tables])
    ctx.shapes = [(table.shape, table.device) for table in tables]
    # Rows are read again for the gradient of the weights alone; otherwise the table may change before backward().
    kept = list(tables) if any(weight.requires_grad for weight in weights) else []
    ctx.save_for_backward(*keys, *row_splits, *weights, *kept)


def _backward_gather_combine(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    _first_order_only(ctx, gradients)
    saved = ctx.saved_tensors
    arguments = ctx.state.arguments(saved)
    keys, key_tables, combiners, row_splits, bagged, weights, weighted = arguments
    names, owners, num_rows, dimensions = ctx.placement
    splits_of, weights_of = dict(zip(bagged, row_splits, strict=True)), dict(zip(weighted, weights, strict=True))
    parts: list[list[Part]] = [[] for _ in names]
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            part = Part(_kept(keys[i]), gradient, combiners[i], splits_of.get(i), weights_of.get(i))
            parts[key_tables[i]].append(part)
    needs_tables, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[9]
    tables = [
        PendingGradient(*shape, table_parts, name, runtime.get().gradient_scale) if wanted and table_parts else None
        for wanted, table_parts, shape, name in zip(needs_tables, parts, ctx.shapes, names, strict=True)
    ]
    weight_gradients = _nothing(weights)
    if any(needs_weights):
        kept = list(saved[ctx.state.num_tensors :])
        found = ops.weight_gradient(gradients, kept, names, owners, num_rows, dimensions, 1, 0, *arguments, None, None)
        weight_gradients = [value if wanted else None for value, wanted in zip(found, needs_weights, strict=True)]
    lookups = (_nothing(keys), None, None, _nothing(row_splits), _nothing(bagged), weight_gradients, _nothing(weighted))
    return (tables, None, None, None, *lookups)


def _kept(keys: Tensor) -> Tensor:
    # Keys that were written in place are likely a buffer that the next batch will be written into, perhaps before the
    # optimizer steps (gradient accumulation). Keys that never were are borrowed, and checked when they are used.
    return keys.clone() if not keys.is_inference() and keys._version != 0 else keys


# --- gather -------------------------------------------------------------------------------------------------------------


def _setup_gather(ctx: Any, inputs: Any, output: Any) -> None:
    tables, names, owners, num_rows, num_ranks, rank, counts, keys, slots = inputs
    ctx.counts, ctx.names = list(counts), list(names)
    ctx.shapes = [(table.shape, table.device) for table in tables]
    ctx.save_for_backward(slots)


def _backward_gather(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    _first_order_only(ctx, [gradient])
    (slots,) = ctx.saved_tensors
    gradient = gradient.contiguous()
    parts: list[list[Part]] = [[] for _ in ctx.names]
    first_slot = first_element = 0
    for i, count in enumerate(ctx.counts):
        table = i % len(parts)
        if count == 0:
            continue
        dimension = ctx.shapes[table][0][1]
        values = gradient[first_element : first_element + count * dimension].view(count, dimension)
        parts[table].append(Part(slots[first_slot : first_slot + count], values, unique=True))
        first_slot += count
        first_element += count * dimension
    tables = [
        PendingGradient(*shape, table_parts, name, runtime.get().gradient_scale) if wanted else None
        for wanted, table_parts, shape, name in zip(ctx.needs_input_grad[0], parts, ctx.shapes, ctx.names, strict=True)
    ]
    return tables, None, None, None, None, None, None, None, None


# --- combine ------------------------------------------------------------------------------------------------------------


def _setup_combine(ctx: Any, inputs: Any, output: Any) -> None:
    rows, names, owners, num_rows, dimensions, num_ranks, rank = inputs[:7]
    keys, key_tables, combiners, row_splits, bagged, weights, weighted = inputs[7:14]
    routed_keys, counts, inverse, order, unique_splits = inputs[14:]
    ctx.set_materialize_grads(False)
    ctx.state = _LookupState(keys, key_tables, combiners, bagged, weighted)
    ctx.placement = (list(names), list(owners), list(num_rows), list(dimensions), num_ranks, rank)
    ctx.counts = list(counts)
    kept = [rows] if any(weight.requires_grad for weight in weights) else []
    ctx.save_for_backward(*keys, *row_splits, *weights, routed_keys, inverse, order, unique_splits, *kept)


def _backward_combine(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    _first_order_only(ctx, gradients)
    saved = ctx.saved_tensors
    arguments = ctx.state.arguments(saved)
    keys, _, _, row_splits, bagged, weights, weighted = arguments
    first = ctx.state.num_tensors
    routed_keys, inverse, order, unique_splits = saved[first : first + 4]
    rows = None
    if ctx.needs_input_grad[0]:
        routing = (routed_keys, ctx.counts, inverse, order, unique_splits)
        rows = ops.spread(gradients, *ctx.placement, *arguments, *routing)
    weight_gradients = _nothing(weights)
    if any(ctx.needs_input_grad[12]):
        found = ops.weight_gradient(gradients, [], *ctx.placement, *arguments, inverse, saved[first + 4])
        weight_gradients = [
            value if wanted else None for value, wanted in zip(found, ctx.needs_input_grad[12], strict=True)
        ]
    placement = (None,) * 6
    lookups = (_nothing(keys), None, None, _nothing(row_splits), _nothing(bagged), weight_gradients, _nothing(weighted))
    return (rows, *placement, *lookups, None, None, None, None, None)


torch.library.register_autograd(
    "sok::gather_combine", _backward_gather_combine, setup_context=_setup_gather_combine
)
torch.library.register_autograd("sok::gather", _backward_gather, setup_context=_setup_gather)
torch.library.register_autograd("sok::combine", _backward_combine, setup_context=_setup_combine)
