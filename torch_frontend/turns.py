# SPDX-License-Identifier: Apache-2.0
"""Threads that use tables take turns: each call has one, and so has a block of several calls here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sparse_operation_kit.torch import stored


@contextlib.contextmanager
def alone(tables: Iterable[Any]) -> Iterator[None]:
    """While it is open no other thread uses the tables; calls of this thread go on. Waits for its turn.

    Tables without an index are passed over: their rows stay where they are. What another thread waits for with other
    ranks must not be waited for in here.
    """
    given = list(tables)
    with stored.alone(given):
        turn = torch.classes.sok.Turn(given)
        try:
            yield
        finally:
            turn.end()
