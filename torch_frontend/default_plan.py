# SPDX-License-Identifier: Apache-2.0
"""Tables under the planner that torch.distributed.checkpoint.load takes where it is given none.

That planner compares ``size()`` of a value with the size of the tensor in the checkpoint. A shard's is its own, as of
any tensor; what the plan is made from has that of the whole tensor in its place.
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_operation_kit.torch.saving import OTHER_RANKS, OTHERWISE, TableShard
from sparse_operation_kit.torch.variable import Variable
from sparse_operation_kit.torch.whole_modules import wrap


class _WholeSize(tuple[int, ...]):
    """Its text says what to do where another one was expected."""

    def __repr__(self) -> str:
        return f"{list(self)} (a table's rows on {self[1]} ranks; {OTHER_RANKS})"


class _Part:
    """A shard to who plans what is read for it."""

    def __init__(self, shard: TableShard) -> None:
        self._shard = shard
        self.of_layer = bool(shard.held.contents)

    def size(self) -> _WholeSize:
        return _WholeSize(self._shard.whole_size())

    def __create_chunk_list__(self) -> list[Any]:
        return self._shard.__create_chunk_list__()


def _of_parts(plan: Any) -> Any:
    def with_tables(state_dict: dict[str, Any], metadata: Any, strict: bool = True) -> Any:
        parts = {name: _as_part(value) for name, value in state_dict.items()}
        for name, part in parts.items():
            if strict and isinstance(part, _Part) and part.of_layer and name not in metadata.state_dict_metadata:
                raise RuntimeError(f"{name}: the checkpoint has no such table: {OTHERWISE}")
        return plan(parts, metadata, strict)

    return with_tables


def _as_part(value: Any) -> Any:
    shard = value.detach() if isinstance(value, Variable) else value
    return _Part(shard) if isinstance(shard, TableShard) else value


if torch.distributed.is_available():
    from torch.distributed.checkpoint import default_planner

    wrap(default_planner, "create_default_local_load_plan", _of_parts)
