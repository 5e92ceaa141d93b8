# SPDX-License-Identifier: Apache-2.0
"""plan() of what a DistributedEmbedding takes, and what a report measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparse_operation_kit import core, hybrid
from sparse_operation_kit.hybrid import Plan
from sparse_operation_kit.hybrid.plans import plan_together
from sparse_operation_kit.torch.dist_model_parallel.embedding import config_of
from sparse_operation_kit.torch.dist_model_parallel.setup import ensure_initialised
from sparse_operation_kit.torch.group import Group


def plan(
    embeddings: Sequence[Any],
    world_size: int | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> Plan:
    """Plans where the tables of a DistributedEmbedding lie; give it the result as `strategy`.

    Args:
      embeddings: as of DistributedEmbedding.
      world_size: a number of ranks to plan for, by this process alone. None: the ranks that init() found, all of which
        call it: the first one plans for all.
      device: with world_size None, where tables will live; None: PyTorch's default device.
      **options: of `sparse_operation_kit.hybrid.plan`, which says what it raises. With world_size None the topology is
        that of these ranks unless one is given.
    """
    configs = [config_of(embedding) for embedding in embeddings]
    if world_size is not None:
        return hybrid.plan(configs, world_size, **options)
    ensure_initialised()
    return plan_together(configs, Group(), gpu=gpu_of(device), **options)


def gpu_of(device: torch.device | str | None) -> core.DeviceProperties | None:
    """A GPU, PyTorch's default device for None; None for any other device."""
    where = torch.empty(0).device if device is None else torch.device(device)
    if where.type != "cuda":
        return None
    return core.device_properties(torch.cuda.current_device() if where.index is None else where.index)


def wait_for(outputs: Sequence[torch.Tensor]) -> None:
    """Waits for the GPU that outputs are on."""
    for device in {output.device for output in outputs if output.is_cuda}:
        torch.cuda.synchronize(device)
