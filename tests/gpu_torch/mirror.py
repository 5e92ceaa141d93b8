# SPDX-License-Identifier: Apache-2.0
"""Lets tests that were written for the CPU run on the GPU unchanged.

New tensors are on the GPU, results are copied to the CPU where a test turns them into arrays, and a call raises what
the GPU finds wrong in its ids before it returns.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily

import sparse_operation_kit.torch as sok

CALLS = ("lookup_sparse", "all2all_dense_embedding", "assign", "sparse_read_and_evict")


def _checked(call):
    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        result = call(*args, **kwargs)
        if not torch.compiler.is_compiling():
            sok.check_errors()
        return result

    return wrapped


class _Generator(torch.Generator):
    def __new__(cls, device="cuda"):
        return super().__new__(cls, device)  # type: ignore[call-arg]  # PyTorch declares __init__


def _without_the_mode(compile_):
    """torch.compile whose result runs outside the mode of the default device: Dynamo traces no tables within it."""

    @functools.wraps(compile_)
    def wrapped(model=None, **options):
        if model is None:
            return lambda each: wrapped(each, **options)
        compiled = compile_(model, **options)

        @functools.wraps(compiled)
        def run(*args, **kwargs):
            within = torch._C._len_torch_function_stack() > 0  # backward() has left it already
            with _pop_mode_temporarily() if within else contextlib.nullcontext():
                return compiled(*args, **kwargs)

        return run

    return wrapped


@contextlib.contextmanager
def installed():
    """The mirror, for the tests within."""
    library: Any = torch
    from_numpy, numpy, generator, compile_ = torch.from_numpy, torch.Tensor.numpy, torch.Generator, torch.compile
    calls = {name: getattr(sok, name) for name in CALLS}
    try:
        library.Generator, library.compile = _Generator, _without_the_mode(compile_)
        library.from_numpy = lambda array: from_numpy(array).cuda()
        torch.Tensor.numpy = lambda tensor, **options: numpy(tensor.cpu(), **options)
        for name, call in calls.items():
            setattr(sok, name, _checked(call))
        # Not set_default_device, which cannot be taken back: the mode that it leaves keeps Dynamo from tracing tables.
        with torch.device("cuda"):
            yield
    finally:
        library.from_numpy, torch.Tensor.numpy = from_numpy, numpy
        library.Generator, library.compile = generator, compile_
        for name, call in calls.items():
            setattr(sok, name, call)
