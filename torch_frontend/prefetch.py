# SPDX-License-Identifier: Apache-2.0
"""prefetch: rows of the next batch come to the device, or from a store, while a step runs."""

from __future__ import annotations

from typing import Any

import torch

from sparse_operation_kit.arguments import check_lookup
from sparse_operation_kit.torch import call as _call
from sparse_operation_kit.torch import ids as _ids
from sparse_operation_kit.torch import runtime, stored
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.table_parameter import TableParameter


def prefetch(params: Any, sp_ids: Any) -> None:
    """Brings rows that a later :func:`lookup_sparse` will look up from the host's memory to that of the GPU, and
    reads ahead what stores have of them.

    For dynamic tables with `max_hbm_for_vectors` on a GPU, or with a `store`; others are passed over, so any model may
    call it. A thread reads the store, and no row moves until a lookup trains it. Rows of tables with
    `max_hbm_for_vectors` that a lookup asks for come to the GPU anyway; called after the forward pass of a batch, with
    the ids of the next one, they come while backward and the step of this one run. Rows that this step uses do not
    move. Keys that a table lacks get no row. The call does not wait.

    With several ranks every rank must make the call, with the same tables in the same order, and its keys travel to
    the ranks that hold their rows, two exchanges a table, for which the host waits.

    Args:
      params, sp_ids: as of :func:`lookup_sparse`.

    Raises:
      As :func:`lookup_sparse`, PeerError where another rank refuses its arguments among them; RuntimeError while a CUDA
      graph is being captured.
    """
    state = runtime.get()
    listed = isinstance(params, (list, tuple))
    if not listed:
        params, sp_ids = [params], [sp_ids]
    try:
        _, described, device = _call.distinct(params)
        _call.check_ranks(described, state.num_ranks)
        checked = check_lookup(params, sp_ids, None, None)
        given = [
            (table, _ids.parse(ids, None, f"prefetch {i} (table '{table._sok_name}')", device).keys)
            for i, (table, ids) in enumerate(zip(checked.params, checked.ids, strict=True))
            if _is_for(table)
        ]
    except Exception:
        if state.exchange is not None and any(map(_is_for, params)):
            stored.tell_peers(state.exchange)
        raise
    if state.num_ranks > 1:
        given = [(table, stored.sent_to_owners(keys, table, state.num_ranks)) for table, keys in given]
    for table, keys in given:
        if stored.has_store(table):
            with stored.alone([table]):
                stored.fetch_ahead(table, keys)
    tiered = [(table, keys) for table, keys in given if _has_tiers(table)]
    with torch.no_grad():
        ops.prefetch([table.detach() for table, _ in tiered], [keys for _, keys in tiered])


def _is_for(table: Any) -> bool:
    return stored.has_store(table) or _has_tiers(table)


def _has_tiers(table: Any) -> bool:
    return isinstance(table, TableParameter) and bool(table.device_rows) and table.is_cuda
