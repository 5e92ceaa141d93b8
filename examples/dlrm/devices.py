# SPDX-License-Identifier: Apache-2.0
"""Which GPU a rank computes on."""

from __future__ import annotations


def choose_gpu(device: str, local_rank: int, local_ranks: int, gpus: int) -> int | None:
    """The number of the rank's GPU among the `gpus` of its host; None for the CPU.

    device: "cpu", "gpu", or "auto" for a GPU where each of the host's ranks gets one. Raises ValueError where "gpu" is
    told and there are too few.
    """
    if device == "cpu" or (device == "auto" and gpus < local_ranks):
        return None
    if gpus < local_ranks:
        raise ValueError(f"--device gpu takes one for each rank: this host has {local_ranks} ranks and {gpus} GPUs")
    return local_rank
