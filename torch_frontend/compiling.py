# SPDX-License-Identifier: Apache-2.0
"""What differs between PyTorch's versions in torch.compile and torch.export."""

from __future__ import annotations

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

OPERATORS = ("sok::lookup", "sok::lookup_backward")
"""Those of graph_lookup.py."""

# Before, torch.compile takes torch.compiler.is_exporting() for true, and cannot be told from torch.export(strict=True).
_TELLS_EXPORTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def keep_order() -> None:
    """From now on graphs run `OPERATORS` in the order of the program, as exchanges between ranks must. On one rank it
    would be of no use, and compiled autograd and activation checkpointing of PyTorch 2.13 fail with it.
    """
    for name in OPERATORS:
        _register_effectful_op(name, _EffectType.ORDERED)


def is_exporting() -> bool:
    """Whether torch.export runs the caller; before PyTorch 2.13 only the export that is not strict, its default."""
    return torch.compiler.is_exporting() and (_TELLS_EXPORTS or not torch.compiler.is_dynamo_compiling())


@torch._dynamo.assume_constant_result
def may_break() -> bool:
    """Whether the graph that is being traced may have breaks, as without fullgraph=True."""
    tracer = InstructionTranslator.current_tx()
    return not (tracer.one_graph or tracer.error_on_graph_break)
