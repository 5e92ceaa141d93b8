# SPDX-License-Identifier: Apache-2.0
"""plan() of what a DistributedEmbedding takes, and what a report measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit import hybrid
from sparse_operation_kit.hybrid import Plan
from sparse_operation_kit.hybrid.plans import plan_together
from sparse_operation_kit.hybrid.strategy import Config, config_of
from sparse_operation_kit.tensorflow import devices
from sparse_operation_kit.tensorflow.dist_model_parallel.config import is_custom
from sparse_operation_kit.tensorflow.dist_model_parallel.setup import ensure_initialised
from sparse_operation_kit.tensorflow.group import Group


def plan(embeddings: Sequence[Any], world_size: int | None = None, **options: Any) -> Plan:
    """Plans where the tables of a DistributedEmbedding lie; give it the result as `strategy`.

    Args:
      embeddings: as of DistributedEmbedding.
      world_size: a number of ranks to plan for, by this process alone. None: the ranks that init() found, all of which
        call it: the first one plans for all.
      **options: of `sparse_operation_kit.hybrid.plan`, which says what it raises. With world_size None the topology is
        that of these ranks unless one is given. Tables of classes that look up by themselves are not cut by rows, those
        with an embeddings_constraint are replicated.
    """
    configs = [config_of(embedding) for embedding in embeddings]
    options["constraints"] = {**constraints_of(configs), **(options.get("constraints") or {})}
    if world_size is not None:
        return hybrid.plan(configs, world_size, **options)
    ensure_initialised()
    return plan_together(configs, Group(), gpu=devices.gpu_of(), **options)


def constraints_of(configs: Sequence[Config]) -> dict[int | str, Mapping[str, Any]]:
    """What a plan may do with tables of which it may not do everything."""
    found: dict[int | str, Mapping[str, Any]] = {}
    for table, config in enumerate(configs):
        if is_custom(config):
            found[table] = {"choices": ("replicated", "whole", "columns"), "on_host": False}
        elif config.get("embeddings_constraint"):
            found[table] = {"choices": ("replicated",)}
    return found


def wait_for(outputs: Sequence[Any]) -> None:
    """Waits for outputs that are on a GPU."""
    for output in outputs:
        values = output.flat_values if isinstance(output, tf.RaggedTensor) else output
        tf.reduce_sum(tf.cast(values[:1], tf.float32)).numpy()
