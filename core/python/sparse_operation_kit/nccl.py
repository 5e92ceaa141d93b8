# SPDX-License-Identifier: Apache-2.0
"""How both frontends make the core's NCCL communicator: all ranks decide together whether there will be one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from sparse_operation_kit import core

logger = logging.getLogger("sparse_operation_kit")

AllGather = Callable[[bytes], list[bytes]]
"""Called by every rank with as many bytes; returns each rank's, by rank."""

_SIZE = 512  # bytes of the messages of connect()
_SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable of NCCL 2.30 and newer that lets ranks share a GPU where it is 1."""
_ERRORS = (OSError, ValueError, RuntimeError, MemoryError, SystemError)


class NcclUnavailable(RuntimeError):
    """The ranks cannot exchange over NCCL; the message names a rank and its reason. Raised on all ranks alike."""


class SharedGpu(NcclUnavailable):
    """Two ranks share a GPU: the framework's own NCCL refuses that as well."""


def connect(device: int, num_ranks: int, rank: int, allgather: AllGather) -> core.Communicator:
    """Makes the communicator of all ranks, each with its CUDA device.

    Every rank calls it at the same place. What was enqueued on the devices before, other communicators' work for
    example, has to be done.

    Raises:
      NcclUnavailable: a rank has no NCCL or GPU that the core can use, two ranks share a GPU and NCCL has not been
        allowed that on both, or they did not connect.
    """

    def agree(action: Callable[[], bytes]) -> list[bytes]:
        try:
            reply = b"+" + action()
        except _ERRORS as error:
            reply = b"-" + str(error).encode("utf-8", "replace")[: _SIZE - 1]
        replies = [reply.rstrip(b"\0") for reply in allgather(reply.ljust(_SIZE, b"\0"))]
        for other, reply in enumerate(replies):
            if not reply.startswith(b"+"):
                raise NcclUnavailable(f"NCCL cannot be used on rank {other}: {reply[1:].decode('utf-8', 'replace')}")
        return [reply[1:] for reply in replies]

    def describe() -> bytes:
        core.nccl_properties()
        shares = os.environ.get(_SHARES_GPUS) == "1"
        return f"{core.device_uuid(device)} {shares}".encode()

    _check_gpus([reply.decode().split() for reply in agree(describe)])
    # As hexadecimal digits: the messages end at their last byte that is not 0.
    id = bytes.fromhex(agree(lambda: core.Communicator.make_id().hex().encode() if rank == 0 else b"")[0].decode())
    made: list[core.Communicator] = []

    def join() -> bytes:
        made.append(core.Communicator(device, id, num_ranks, rank))
        return b""

    try:
        agree(join)
    except NcclUnavailable:
        for communicator in made:  # others have none
            communicator.abort()
            communicator.close()
        raise
    if rank == 0:
        properties = core.nccl_properties()
        logger.info("GPU tensors are exchanged over NCCL %s (%s)", properties.version_text, properties.path)
    return made[0]


def _check_gpus(ranks: Sequence[Sequence[str]]) -> None:
    """Raises SharedGpu where two ranks share a GPU, unless both may; ranks: of each the GPU, and whether it may."""
    first_of: dict[str, int] = {}
    for rank, (gpu, may_share) in enumerate(ranks):
        first = first_of.setdefault(gpu, rank)
        if first != rank and not (may_share == ranks[first][1] == "True"):
            raise SharedGpu(
                f"NCCL cannot be used: ranks {first} and {rank} share a GPU. Give each rank one of its own "
                "(TensorFlow: tf.config.set_visible_devices, PyTorch: torch.cuda.set_device, with the local rank), or "
                f"set {_SHARES_GPUS}=1 on all ranks, which NCCL 2.30 and newer know"
            )
