# SPDX-License-Identifier: Apache-2.0
"""The stages of a call as one differentiable function, of a process alone and of several. The gradient of a table is a
pending one, and comes in one piece with those of the call's other tables (delivery.py).

Formulas registered with torch.library would cost 0.45 ms a step for 26 tables, for the lists of tensors in the schemas
(PyTorch 2.13), as much as a tenth of the work itself. What a process alone does is in C++ (csrc/lookup_function.cc); of
several ranks the stages are (csrc/sharded_lookup.h), and the exchanges between them are here. Gradients of rows cannot
be differentiated again: that is an error, not a zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.call import Call
from sparse_operation_kit.torch.delivery import ExchangedDelivery, deliver
from sparse_operation_kit.torch.exchange import CountMessage, Exchange

# --- one process ----------------------------------------------------------------------------------------------------


def gather_combine(call: Call) -> list[Tensor]:
    """[bags, dimension] of each lookup, or all side by side in one; all tables are whole in this process."""
    described = call.described
    if described.handle is None:
        tables = (call.tables, described.names, described.owners, described.num_rows)
        outputs: list[Tensor] = ops.gather_combine(*tables, *call.lookups.arguments(), call.concat)
    else:
        lookups = call.lookups
        bags = (lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted)
        outputs = described.handle.lookup(lookups.keys, lookups.combiners, *bags, call.concat)
    return outputs


# --- several processes ----------------------------------------------------------------------------------------------


def route(call: Call, ranks: tuple[int, int]) -> Any:
    """Chooses how each lookup of a call is pooled, and routes all: torch.classes.sok.ShardedLookup, whose methods are
    the stages between the exchanges (csrc/sharded_lookup.h).

    Args:
      ranks: (how many, which this is).

    Raises:
      IndexError: a key is outside its table.
      ValueError: row splits that are none, or another value of SOK_POOLING than those there are.
    """
    lookups = call.lookups
    bags = (lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted)
    return call.described.handle.route(lookups.keys, lookups.combiners, *bags, *ranks)


def lookup(call: Call, exchange: Exchange, routed: Any) -> list[Tensor]:
    """As `gather_combine`, of a call that was routed. Raises PeerError, and what the device has found wrong."""
    with torch.no_grad():
        known, counts, columns = routed.message()
        sent, received = exchange.swap_counts(CountMessage(call.tables[0].device, known, counts, columns))
        keys, send_keys, receive_keys, *of_rows = routed.keys(sent, received)
        keys = exchange.all_to_all(keys, send_keys, receive_keys)
    return list(_Lookup.apply(call, exchange, routed, keys, of_rows, *call.tables, *call.lookups.weights))


class _Lookup(torch.autograd.Function):
    """From the keys that came to the pooled vectors; its gradient goes the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        exchange: Exchange,
        routed: Any,
        keys: Tensor,
        of_rows: list[list[int]],
        *tables_and_weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tables, ctx.ids = call.tables, call.described.ids
        ctx.exchange, ctx.routed, ctx.of_rows = exchange, routed, of_rows
        rows = exchange.all_to_all(routed.gather(keys), *of_rows)
        return tuple(routed.combine(rows, call.concat))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        first, second = 5, 5 + len(ctx.tables)
        needed = ctx.needs_input_grad
        rows, weights = ctx.routed.spread(list(gradients))
        tables: list[Tensor | None] = [None] * len(ctx.tables)
        if rows is not None:
            send, receive = ctx.of_rows
            handle = ctx.routed.gradients(ctx.exchange.all_to_all(rows, receive, send))
            delivery = ExchangedDelivery(handle, ctx.ids, runtime.get().gradient_scale)
            tables = deliver(delivery, ctx.tables, needed[first:second])
        ctx.routed.release()
        return (*[None] * first, *tables, *(weights or [None] * (len(needed) - second)))
