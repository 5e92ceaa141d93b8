# SPDX-License-Identifier: Apache-2.0
"""The differentiable stages: gather_combine, gather, combine. Each one's gradient is its mirror: that of gather_combine
and gather is a pending gradient of each table, that of combine is spread.

They are autograd functions around the ops rather than formulas registered with torch.library: those cost 0.45 ms a step
for 26 tables, for the lists of tensors in the schemas (PyTorch 2.13), as much as a tenth of the work itself. That of a
process alone is in C++ (csrc/lookup_function.cc). Gradients of rows cannot be differentiated again: that is an error,
not a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.call import Call, Lookups
from sparse_operation_kit.torch.delivery import ExchangedDelivery, deliver
from sparse_operation_kit.torch.exchange import Exchange


def _first_order_only(gradients: Sequence[Tensor | None]) -> None:
    if torch.is_grad_enabled():
        ops.first_order_only(gradients)


# --- one process ----------------------------------------------------------------------------------------------------


def gather_combine(call: Call) -> list[Tensor]:
    """[bags, dimension] of each lookup, where all tables are whole in this process."""
    described = call.described
    if described.handle is None:
        tables = (call.tables, described.names, described.owners, described.num_rows)
        outputs: list[Tensor] = ops.gather_combine(*tables, *call.lookups.arguments())
    else:
        lookups = call.lookups
        bags = (lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted)
        outputs = described.handle.lookup(lookups.keys, lookups.combiners, *bags)
    return outputs


# --- several processes ----------------------------------------------------------------------------------------------


def gather(call: Call, ranks: tuple[int, int], counts: list[int], keys: Tensor, slots: Tensor) -> Tensor:
    """The rows that all ranks asked for, [elements] float32, in the order of keys."""
    arguments = (call.names(), call.owners(), call.num_rows(), *ranks, counts, keys, slots)
    result: Tensor = _Gather.apply(call, arguments, *call.tables)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, arguments: tuple[Any, ...], *tables: Tensor) -> Tensor:
        ctx.tables, ctx.described, ctx.counts = call.tables, call.described, arguments[5]
        ctx.save_for_backward(arguments[-1])
        return ops.gather(tables, *arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _first_order_only([gradient])
        (slots,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        scale = runtime.get().gradient_scale
        delivery = ExchangedDelivery(slots, gradient, ctx.counts, ctx.described, scale)
        return (None, None, *deliver(delivery, ctx.tables, ctx.needs_input_grad[2:]))


class _ExchangeRows(torch.autograd.Function):
    """all_to_all whose gradient travels the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, send: list[int], receive: list[int]) -> Tensor:
        ctx.exchange, ctx.send, ctx.receive = exchange, send, receive
        return exchange.all_to_all(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _first_order_only([gradient])
        return ctx.exchange.all_to_all(gradient.contiguous(), ctx.receive, ctx.send), None, None, None


def exchange_rows(rows: Tensor, exchange: Exchange, send: list[int], receive: list[int]) -> Tensor:
    """Differentiable Exchange.all_to_all."""
    result: Tensor = _ExchangeRows.apply(rows, exchange, send, receive)
    return result


def combine(
    call: Call, ranks: tuple[int, int], rows: Tensor, counts: list[int], routing: tuple[Tensor, Tensor, Tensor, Tensor]
) -> list[Tensor]:
    """[bags, dimension] of each lookup from the exchanged rows.

    routing: what route returned without counts: keys, inverse, order, unique_splits; counts: its counts as a list.
    """
    placement = (call.names(), call.owners(), call.num_rows(), call.dimensions(), *ranks)
    return list(_Combine.apply(placement, call.lookups, counts, routing, rows, *call.lookups.weights))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        placement: tuple[Any, ...],
        lookups: Lookups,
        counts: list[int],
        routing: tuple[Tensor, Tensor, Tensor, Tensor],
        rows: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.placement, ctx.counts, ctx.lookups = placement, counts, lookups.without_tensors()
        kept = (rows,) if any(weight.requires_grad for weight in weights) else ()
        ctx.save_for_backward(*lookups.tensors(), *routing, *kept)
        keys, inverse, order, unique_splits = routing
        routed = (keys, counts, inverse, order, unique_splits)
        return tuple(ops.combine(rows, *placement, *lookups.arguments(), *routed))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _first_order_only(gradients)
        saved = ctx.saved_tensors
        lookups = ctx.lookups.with_tensors(saved)
        first = lookups.num_tensors
        keys, inverse, order, unique_splits = saved[first : first + 4]
        rows = None
        if ctx.needs_input_grad[4]:
            routed = (keys, ctx.counts, inverse, order, unique_splits)
            rows = ops.spread(gradients, *ctx.placement, *lookups.arguments(), *routed)
        weights: list[Tensor | None] = [None] * len(lookups.weights)
        if any(ctx.needs_input_grad[5:]):
            weights = ops.weight_gradient(
                gradients, [], *ctx.placement, *lookups.arguments(), inverse, saved[first + 4]
            )
        return (None, None, None, None, rows, *weights)
