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

import sparse_operation_kit.torch as sok

CALLS = ("lookup_sparse", "all2all_dense_embedding", "assign")


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


@contextlib.contextmanager
def installed():
    """The mirror, for the tests within."""
    library: Any = torch
    from_numpy, numpy, generator = torch.from_numpy, torch.Tensor.numpy, torch.Generator
    calls = {name: getattr(sok, name) for name in CALLS}
    try:
        library.Generator = _Generator
        library.from_numpy = lambda array: from_numpy(array).cuda()
        torch.Tensor.numpy = lambda tensor, **options: numpy(tensor.cpu(), **options)
        for name, call in calls.items():
            setattr(sok, name, _checked(call))
        # Not set_default_device, which cannot be taken back: the mode that it leaves keeps Dynamo from tracing tables.
        with torch.device("cuda"):
            yield
    finally:
        library.from_numpy, torch.Tensor.numpy, library.Generator = from_numpy, numpy, generator
        for name, call in calls.items():
            setattr(sok, name, call)
