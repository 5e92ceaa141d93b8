# SPDX-License-Identifier: Apache-2.0
"""Lookups in a graph of torch.compile that do more than read tables of this rank: two operators.

`sok::lookup` runs a call as it runs outside of graphs, function of autograd and all. What it gives to the graph is
detached from that function, which a ticket keeps for `sok::lookup_backward`: a backward() within that of the graph. It
leaves the tables their gradients; to the graph they have none.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sparse_operation_kit.torch import _ops, runtime
from sparse_operation_kit.torch.call import described_again

_library = torch.library.Library("sok", "FRAGMENT")
# Tables as the graph has them, which are the parameters. counts, members: as `described_again` takes them; learned: the
# positions of weights that have a gradient; recorded: whether autograd is to know of the call. Otherwise as
# csrc/lookup_function.h has it. -> outputs, and a ticket
_library.define(
    "lookup(Tensor[] tables, int[] positions, int[] counts, str[] members, Tensor[] keys, int[] combiners, "
    "Tensor[] row_splits, int[] bagged, Tensor[] weights, int[] weighted, int[] learned, bool concat, int training, "
    "float gradient_scale, bool recorded) -> Tensor[]"
)
# -> the gradients of these weights, those with one
_library.define("lookup_backward(Tensor?[] gradients, Tensor ticket, Tensor[] weights) -> Tensor[]")


class _Ticket(np.ndarray[Any, Any]):
    """The memory of the tensor that stands for a call: it lives as long as the graph may want to go back."""

    edges: list[Any]
    """Of the outputs, in the call's function of autograd; empty where it has none."""
    tables: list[tuple[Tensor, Any]]
    """With their nodes in autograd."""
    weights: list[Tensor]


_numbers = itertools.count()
_tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()


def _lookup(  # type: ignore[no-untyped-def]
    tables, positions, counts, members, keys, combiners, row_splits, bagged, weights, weighted, learned, *options
) -> list[Tensor]:
    concat, training, gradient_scale, recorded = options
    exchange = runtime.get().exchange
    if recorded:  # a graph writes to the memory of what it computed once it has passed it on
        with torch.no_grad():
            keys, row_splits, weights = ([each.clone() for each in given] for given in (keys, row_splits, weights))
        for i in learned:
            weights[i].requires_grad_()
    bags = (row_splits, bagged, weights, weighted)
    number = None if exchange is None else exchange.number
    with torch.set_grad_enabled(recorded):
        handle = described_again(tables, positions, counts, members).handle
        outputs = handle.lookup(keys, combiners, *bags, concat, training, number, gradient_scale)
    ticket = np.array([next(_numbers)]).view(_Ticket)
    if recorded:
        ticket.edges = list(map(get_gradient_edge, outputs)) if outputs[0].requires_grad else []
        ticket.tables = list(zip(tables, outputs[0].grad_fn.next_functions, strict=False)) if ticket.edges else []
        ticket.weights = [weights[i] for i in learned]
        _tickets[int(ticket[0])] = ticket
    return [*(output.detach() for output in outputs), torch.as_tensor(ticket, device="cpu")]


def _lookup_backward(gradients: Sequence[Tensor | None], ticket: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    kept = _tickets.get(int(ticket))
    if kept is None:
        raise RuntimeError(
            "the graph has a copy of what a lookup keeps for backward(), as hooks of saved tensors make one: leave "
            "such hooks out, or the lookup out of torch.compile (torch.compiler.disable)"
        )
    given = [
        (edge, gradient.clone())  # as above
        for edge, gradient in zip(kept.edges, gradients, strict=False)
        if gradient is not None
    ]
    tables = [(table, node) for table, (node, _) in kept.tables if node is not None]
    inputs = kept.weights + [table for table, node in tables if _is_wanted(node)]
    if given and inputs:
        every = len(inputs) == len(kept.weights) + len(tables)
        edges, values = zip(*given, strict=True)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        with torch._dynamo.compiled_autograd._disable():
            torch.autograd.backward(edges, values, retain_graph=keep, inputs=None if every else inputs)
    result = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in kept.weights]
    for weight in kept.weights:
        weight.grad = None
    return result


def _is_wanted(leaf: Any) -> bool:
    """Whether the running backward() is to give it a gradient. RuntimeError where that would be autograd.grad()."""
    return torch._C._current_graph_task_id() < 0 or torch._C._will_engine_execute_node(leaf)


for _name, _kernel in (("lookup", _lookup), ("lookup_backward", _lookup_backward)):
    _library.impl(_name, torch.compiler.disable(_kernel), "CompositeExplicitAutograd")


@torch.library.register_fake("sok::lookup")
def _fake_lookup(  # type: ignore[no-untyped-def]
    tables, positions, counts, members, keys, combiners, row_splits, bagged, weights, weighted, learned, *options
) -> list[Tensor]:
    dimensions = [table.shape[1] for table in tables]
    outputs = _ops._pooled(tables[0], dimensions, keys, positions, row_splits, bagged, options[0], counts)
    return [*outputs, torch.empty(1, dtype=torch.int64, device="cpu")]


@torch.library.register_fake("sok::lookup_backward")
def _fake_lookup_backward(gradients, ticket, weights) -> list[Tensor]:  # type: ignore[no-untyped-def]
    return [torch.empty_like(weight) for weight in weights]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, learned = inputs[8], inputs[10]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], *(weights[i] for i in learned))
    ctx.learned = learned
    ctx.shape = [
        [None] * len(given) if isinstance(given, list) and all(isinstance(each, Tensor) for each in given) else None
        for given in inputs
    ]


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    ticket, *weights = ctx.saved_tensors
    result: list[Any] = [None if each is None else list(each) for each in ctx.shape]
    for i, gradient in zip(ctx.learned, _ops.ops.lookup_backward(gradients[:-1], ticket, weights), strict=True):
        result[8][i] = gradient
    return tuple(result)


torch.library.register_autograd("sok::lookup", _backward, setup_context=_setup_context)
for _operator in (_ops.ops.lookup.default, _ops.ops.lookup_backward.default):
    torch.fx.node.has_side_effect(_operator)  # it stays in a graph that makes no use of its outputs
