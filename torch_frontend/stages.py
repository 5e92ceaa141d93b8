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

from sparse_operation_kit.torch import owner_pooling, runtime
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.call import Call
from sparse_operation_kit.torch.delivery import ExchangedDelivery, deliver
from sparse_operation_kit.torch.exchange import Exchange
from sparse_operation_kit.torch.owner_pooling import Asked, Counts, Routed


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


def gather(call: Call, ranks: tuple[int, int], asked: Asked) -> Tensor:
    """What all ranks asked for: the messages of rows, [elements] float32."""
    result: Tensor = _Gather.apply(call, ranks, asked, *call.tables)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, ranks: tuple[int, int], asked: Asked, *tables: Tensor) -> Tensor:
        ctx.tables, ctx.described, ctx.counts = call.tables, call.described, asked.counts
        ctx.save_for_backward(asked.slots, asked.part_slots, asked.splits)
        return owner_pooling.gather(call, ranks, tables, asked)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _first_order_only([gradient])
        scale = runtime.get().gradient_scale
        slots, part_slots, splits = ctx.saved_tensors
        delivery = ExchangedDelivery(gradient.contiguous(), ctx.counts, slots, part_slots, splits, ctx.described, scale)
        return (None, None, None, *deliver(delivery, ctx.tables, ctx.needs_input_grad[3:]))


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


def combine(call: Call, ranks: tuple[int, int], rows: Tensor, counts: Counts, routed: Routed) -> list[Tensor]:
    """[bags, dimension] of each lookup from the messages of rows that came; counts: of what this rank asked for."""
    placement = (call.names(), call.owners(), call.num_rows(), call.dimensions(), *ranks)
    return list(_Combine.apply(placement, routed, counts, rows, *call.lookups.weights))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, placement: tuple[Any, ...], routed: Routed, counts: Counts, rows: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.placement, ctx.routed, ctx.counts = placement, routed.without_tensors(), counts
        outputs, rows = owner_pooling.combine(placement, routed, counts, rows)
        kept = (rows,) if any(weight.requires_grad for weight in weights) else ()
        ctx.save_for_backward(*routed.tensors(), *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _first_order_only(gradients)
        saved = ctx.saved_tensors
        routed: Routed = ctx.routed.with_tensors(saved)
        rows = None
        if ctx.needs_input_grad[3]:
            rows = owner_pooling.spread(ctx.placement, routed, ctx.counts, gradients)
        weights: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 4)
        if any(ctx.needs_input_grad[4:]) and routed.rows is not None:  # lookups with weights are there
            of_rows, (_, inverse, _, _) = routed.by_kind(gradients)[0], routed.routing
            weights = ops.weight_gradient(of_rows, [], *ctx.placement, *routed.rows.arguments(), inverse, saved[-1])
        return (None, None, None, rows, *weights)
