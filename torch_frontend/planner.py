# SPDX-License-Identifier: Apache-2.0
"""Loads tables from a checkpoint of torch.distributed.checkpoint that another number of ranks saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from sparse_operation_kit.torch.saving import TableShard, is_pad
from sparse_operation_kit.torch.variable import Variable


class LoadPlanner(DefaultLoadPlanner):
    """PyTorch's own planner, which also knows tables, whatever number of ranks saved them and however they were placed.

        state = {"model": model.state_dict(), ...}
        torch.distributed.checkpoint.load(state, checkpoint_id=path, planner=LoadPlanner())
        model.load_state_dict(state["model"])

    Rows are read in the chunks in which they were saved (at most `saving.CHUNK_BYTES` each), and those of this rank are
    written to its tables in place. A rank reads each chunk that holds a row of its own: with as many ranks as saved
    them its own chunks, else up to the whole table.

    Raises ValueError for a table of another shape or dtype, on all ranks; where the number of rows alone is wrong by
    less than the number of ranks that saved them, this is found while rows are being written.
    """

    def create_local_plan(self) -> LoadPlan:
        """The plan of this rank."""
        assert self.metadata is not None
        others: dict[str, Any] = {}
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            shard = value.detach() if isinstance(value, Variable) else value
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(shard, TableShard) or stored is None:
                others[name] = value
                continue
            self.state_dict[name] = shard
            items += _read_items(name, shard, stored)
        plan = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        return LoadPlan([*plan.items, *items])

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the reader copies a chunk to."""
        shard = self._shard(read_item)
        if shard is None:
            return super().resolve_tensor(read_item)
        return torch.empty(tuple(read_item.lengths), dtype=shard.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Takes this rank's rows from a chunk."""
        shard = self._shard(read_item)
        if shard is None:
            super().commit_tensor(read_item, tensor)
            return
        assert self.metadata is not None and read_item.storage_index.offset is not None
        (first, column), count = read_item.storage_index.offset[:2], tensor.shape[0]
        place, rows = shard.held.placement, tensor[:, 0]
        stored: Any = self.metadata.state_dict_metadata[read_item.dest_index.fqn]
        columns = stored.size[1]
        keys = torch.arange(first, first + count) * columns + column
        # At most the last row of a chunk is none, and it is where the table ends.
        inside = place.num_rows - int(keys[0]) > (count - 1) * columns
        if inside == is_pad(rows[-1:]):
            raise ValueError(
                f"{read_item.dest_index.fqn}: the checkpoint has {'fewer' if inside else 'more'} than the "
                f"{place.num_rows} rows of table '{shard.held.table}'"
            )
        mine = (place.owner_of(keys) == place.rank) & (keys < place.num_rows)
        shard.plain[place.key_map(keys[mine]).to(shard.device)] = rows[mine].to(shard.device)

    def _shard(self, read_item: ReadItem) -> TableShard | None:
        value = self.state_dict[read_item.dest_index.fqn]
        return value if isinstance(value, TableShard) else None


def _read_items(name: str, shard: TableShard, stored: Any) -> list[ReadItem]:
    layout = shard.held
    if not isinstance(stored, TensorStorageMetadata) or len(stored.size) != len(shard.shape) + 1:
        raise ValueError(f"{name}: the checkpoint holds no table, but {stored}")
    slots, columns = stored.size[:2]
    rest = tuple(shard.shape[1:])
    if tuple(stored.size[2:]) != rest or -(-layout.num_rows // columns) != slots:
        raise ValueError(
            f"{name}: the checkpoint holds {slots} rows on each of {columns} ranks, of shape {list(stored.size[2:])}; "
            f"table '{layout.table}' has {layout.num_rows} rows of shape {list(rest)}"
        )
    if stored.properties.dtype != shard.dtype:
        raise ValueError(
            f"{name}: the checkpoint holds {stored.properties.dtype}, table '{layout.table}' {shard.dtype}"
        )
    return [
        ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(name, chunk.offsets, number),
            dest_offsets=torch.Size((0,) * len(chunk.sizes)),
            storage_index=MetadataIndex(name, chunk.offsets, number),
            storage_offsets=torch.Size((0,) * len(chunk.sizes)),
            lengths=chunk.sizes,
        )
        for number, chunk in enumerate(stored.chunks)
        if _needed(chunk, shard, columns, name)
    ]


def _needed(chunk: ChunkStorageMetadata, shard: TableShard, columns: int, name: str) -> bool:
    """Whether a chunk, rows of one column, holds keys of this rank, or is where the table ends."""
    if chunk.sizes[1] != 1 or tuple(chunk.sizes[2:]) != tuple(shard.shape[1:]):
        raise ValueError(f"{name}: the checkpoint's chunk {chunk} is not rows of a table")
    place = shard.held.placement
    first = chunk.offsets[0] * columns + chunk.offsets[1]
    last = first + (chunk.sizes[0] - 1) * columns
    if last >= place.num_rows:
        return True
    if place.owner >= 0:
        return place.owner == place.rank
    # The keys repeat themselves modulo the number of ranks.
    return any(
        key % place.num_ranks == place.rank
        for key in range(first, min(last, first + columns * place.num_ranks) + 1, columns)
    )
