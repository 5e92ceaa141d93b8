# SPDX-License-Identifier: Apache-2.0
"""What a status of the core becomes in PyTorch, and the error of the ranks that wait for one that failed.

The conversion itself is in csrc/status.cc, where the ops are; this table says the same for readers and tests.
"""

from __future__ import annotations

import torch

from sparse_operation_kit.core import _library
from sparse_operation_kit.torch._ops import ops

EXCEPTIONS: dict[int, type[Exception]] = {
    _library.INVALID_ARGUMENT: ValueError,
    _library.OUT_OF_RANGE: IndexError,
    _library.RESOURCE_EXHAUSTED: torch.OutOfMemoryError,
    _library.FAILED_PRECONDITION: RuntimeError,
    _library.UNIMPLEMENTED: NotImplementedError,
    _library.UNAVAILABLE: RuntimeError,
    _library.INTERNAL: RuntimeError,
}
"""The exception that an op raises for each status of the core but SOK_OK."""


def check_errors() -> None:
    """Waits for the GPUs and raises what they have found wrong in ids since the last check.

    A call on a GPU returns before its ids are looked at. An id outside its table is raised by the next call that uses
    tables there, at the latest before an optimizer changes one; this function raises it now. With several ranks lookups
    raise it themselves, on all ranks together.

    Raises IndexError or ValueError, as a call on the CPU does at once. Does nothing where no table is on a GPU.
    """
    for device in ops.error_devices():
        torch.cuda.synchronize(device)
        ops.check_errors(device)


class PeerError(RuntimeError):
    """Another rank refused its part of a call that all ranks make together; that rank's own error says why."""

    def __init__(self, ranks: list[int], what: str = "the lookup or the optimizer's step") -> None:
        self.ranks = ranks
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(
            f"{what} failed on {who}; its own error message says why. Nothing was looked up or changed here either."
        )
