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
      As :func:`lookup_sparse`; RuntimeError while a CUDA graph is being captured.
    """
    state = runtime.get()
    listed = isinstance(params, (list, tuple))
    if not listed:
        params, sp_ids = [params], [sp_ids]
    _, described, device = _call.distinct(params)
    _call.check_ranks(described, state.num_ranks)
    checked = check_lookup(params, sp_ids, None, None)
    tables, keys = [], []
    for i, (table, ids) in enumerate(zip(checked.params, checked.ids, strict=True)):
        has_store, has_tiers = stored.has_store(table), table.device_rows and table.is_cuda
        if not has_store and not has_tiers:
            continue
        found = _ids.parse(ids, None, f"prefetch {i} (table '{table._sok_name}')", device).keys
        if state.num_ranks > 1:
            found = stored.sent_to_owners(found, table, state.num_ranks)
        if has_store:
            stored.fetch_ahead(table, found)
        if has_tiers:
            tables.append(table)
            keys.append(found)
    with torch.no_grad():
        ops.prefetch([table.detach() for table in tables], keys)
