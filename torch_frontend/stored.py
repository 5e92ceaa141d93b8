# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables with a store (`sparse_operation_kit.stored_rows`) before they are looked up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_operation_kit import dynamic, stored_rows
from sparse_operation_kit.torch import communication
from sparse_operation_kit.torch.exchange import Exchange
from sparse_operation_kit.torch.table_parameter import TableParameter


def alone(tables: Iterable[Any]) -> AbstractContextManager[None]:
    """While it is open no other thread uses those of the tables that have a store."""
    return stored_rows.alone(getattr(table, "_stored", None) for table in tables)


Given = list[tuple[Any, Tensor]]
"""Tables that have a store, each once, and what is looked up there of the rows that this rank holds."""


def given(tables: Sequence[Any], keys: Sequence[Tensor], num_ranks: int) -> Given:
    """Of a lookup of `keys`, of each of `tables`. Every rank calls it, with the same tables in order."""
    found: Given = []
    for table in dict(zip(map(id, tables), tables, strict=True)).values():
        if has_store(table):
            own = torch.cat([each for of, each in zip(tables, keys, strict=True) if of is table])
            found.append((table, sent_to_owners(own.to(table.device), table, num_ranks) if num_ranks > 1 else own))
    return found


def prepare(looked_up: Given, training: bool) -> Mapping[int, Any]:
    """Before a lookup: tables that are trained get what their stores have of the keys, and of others, by id(), what is
    to be read in their place.
    """
    instead: dict[int, Any] = {}
    for table, keys in looked_up:
        if training and table.requires_grad and torch.is_grad_enabled():
            bring(table, keys)
        elif (values := table._stored.values(table.held(), _numbers(keys), False)) is not None:
            instead[id(table)] = _rows_of(table, *values)
    return instead


def has_store(table: Any) -> bool:
    """Whether some of its rows may be in a store."""
    return getattr(table, "_stored", None) is not None


@torch.no_grad()
def _rows_of(table: Any, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> Any:
    """A table of these rows alone, which has the initial rows of `table` for other keys, to be read in its place."""
    options = dynamic.DynamicOptions("hbm", evict_strategy=None, max_capacity=max(1, len(keys)))
    made = dataclasses.replace(
        table._made,
        capacity=max(1, len(keys)),
        init_capacity=0,
        evict_strategy=None,
        most_candidates=0,
        policy=options.policy(table.dimension * table.dtype.itemsize),
    )
    reader = type(table)._begin(made, table._placement, table._sok_name, False, table.device)
    slots = reader._core.locate(torch.from_numpy(keys).to(table.device), True)
    Tensor.detach(reader)[slots] = torch.from_numpy(rows).to(table.device, table.dtype)
    return reader


def bring(table: Any, keys: Tensor) -> None:
    """Before keys, which belong to this rank, are inserted."""
    if has_store(table):
        with torch.no_grad():
            table._stored.bring(table.held(), _numbers(keys))


def with_stored(table: Any, keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """With those that are in the table's store, in host memory."""
    if not has_store(table):
        return keys, rows
    stored_keys, stored_rows = table._stored.everything(table.held())
    stored_keys = torch.as_tensor(stored_keys, device=keys.device)
    return torch.cat([keys, stored_keys]), torch.cat([rows, torch.as_tensor(stored_rows).to(rows)])


def fetch_ahead(table: Any, keys: Tensor) -> None:
    """See StoredRows; keys belong to this rank."""
    table._stored.fetch_ahead(table.held(), _numbers(keys))


def sent_to_owners(keys: Tensor, table: TableParameter, num_ranks: int) -> Tensor:
    """The keys of all ranks that this one holds rows of, int64: each rank may have ids of another dtype."""
    keys = keys.to(torch.int64)
    owners = table.placement.owner_of(keys)
    order = torch.argsort(owners)
    counts = torch.bincount(owners, minlength=num_ranks)
    return communication.alltoall(keys[order], counts.cpu())


def tell_peers(exchange: Exchange) -> None:
    """Takes part in the first exchange of `sent_to_owners` as the rank that failed."""
    exchange.swap_counts(torch.ones((exchange.num_ranks, 2), dtype=torch.int64, device="cpu"), failed=True)


def _numbers(keys: Tensor) -> np.ndarray[Any, Any]:
    return keys.detach().to("cpu", torch.int64).numpy().reshape(-1)
