# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a dump or load talk: one small all-gather of bytes. Nothing is pickled."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from . import strict_json
from .errors import CheckpointError, PeerError

Array = np.ndarray[Any, Any]

_PIECE_BYTES = 256 << 20  # of a rank, in one all-gather


class Group(Protocol):
    """What a frontend gives: who this rank is, and `allgather`.

    allgather(data) is called by every rank in the same order; it returns each rank's bytes, by rank. Lengths may
    differ.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, data: bytes) -> list[bytes]: ...

    def alltoall(self, values: Array, splits: Sequence[int]) -> Array:
        """Sends splits[r] of `values`, [n] float32, to each rank r; what came, by rank."""


class SingleProcess:
    """The group of one process."""

    rank = 0
    size = 1

    def allgather(self, data: bytes) -> list[bytes]:
        return [data]

    def alltoall(self, values: Array, splits: Sequence[int]) -> Array:
        del splits
        return values


def agree(group: Group, action: Callable[[], Any]) -> list[Any]:
    """Runs `action` on every rank and returns what it returned on each, by rank; the values are JSON data.

    When it raises anywhere every rank raises: a rank that failed its own error, the others PeerError with the message
    of the first that failed. So no rank goes on, and none waits for a rank that is gone.
    """
    error: Exception | None = None
    try:
        reply = strict_json.dumps({"value": action()})
    except Exception as caught:
        error = caught
        reply = strict_json.dumps({"error": _message(caught)})
    replies = [strict_json.loads(data) for data in group.allgather(reply)]
    if error is not None:
        raise error
    for rank, other in enumerate(replies):
        if "error" in other:
            raise PeerError(f"rank {rank} failed: {other['error']}")
    return [other["value"] for other in replies]


def gathered(group: Group, array: Array, counts: Sequence[int]) -> Array:
    """The arrays of all ranks one after another, sent in pieces; they differ in their lengths alone, which are `counts`
    by rank.
    """
    if group.size == 1:
        return array
    array = np.ascontiguousarray(array)
    row_bytes = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    at_once = max(1, _PIECE_BYTES // max(1, row_bytes))
    parts: list[list[bytes]] = [[] for _ in counts]
    for first in range(0, max(counts), at_once):
        for part, data in zip(parts, group.allgather(array[first : first + at_once].tobytes()), strict=True):
            part.append(data)
    whole = b"".join(data for part in parts for data in part)
    return np.frombuffer(whole, array.dtype).reshape(sum(counts), *array.shape[1:])


def _message(error: Exception) -> str:
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "replace").decode("utf-8")[:2000]
