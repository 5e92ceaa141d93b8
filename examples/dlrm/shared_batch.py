# SPDX-License-Identifier: Apache-2.0
"""Batches in memory that processes share."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np

from .reader import Reader

ALIGNMENT = 64
"""Of arrays, in bytes: what frameworks want of memory that they use as it is."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What to read, and file descriptor and slots of the memory that it goes to."""

    reader: Reader[Any, Any]
    memory: int
    slots: int
    slot_bytes: int


@dataclasses.dataclass(frozen=True)
class Message:
    """A batch, pickled: its arrays are `places` (first byte, bytes) of a slot, or, where they do not fit, in `pickled`
    (slot None)."""

    pickled: bytes
    slot: int | None = None
    places: tuple[tuple[int, int], ...] = ()


def pack(batch: Any, slot: int, memory: memoryview) -> Message:
    """Puts the arrays of a batch into the memory of a slot."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    places, end = [], 0
    for array in arrays:
        places.append((end, array.size))
        end += -(-array.size // ALIGNMENT) * ALIGNMENT
    if end > len(memory):
        return Message(pickle.dumps(batch, protocol=5))
    target = np.frombuffer(memory, np.uint8)
    for (first, size), array in zip(places, arrays, strict=True):
        target[first : first + size] = array
    return Message(pickled, slot, tuple(places))


def unpack(message: Message, memory: memoryview) -> Any:
    """The batch. Its arrays lie in the memory, where there is a slot."""
    return pickle.loads(message.pickled, buffers=[memory[first : first + size] for first, size in message.places])
