# SPDX-License-Identifier: Apache-2.0
"""prefetch: rows of the next batch come to the device, or from a store, while a step runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit.arguments import check_lookup
from sparse_operation_kit.tensorflow import devices, runtime, stored
from sparse_operation_kit.tensorflow import ids as _ids
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Tables
from sparse_operation_kit.tensorflow.table_stack import table_of
from sparse_operation_kit.tensorflow.table_variable import is_table


def _is_for(param: Any) -> bool:
    return is_table(param) and (stored.has_store(table_of(param)) or _has_tiers(table_of(param)))


def _has_tiers(table: Any) -> bool:
    return bool(table.device_rows) and devices.is_on_gpu(table)


@as_written
def prefetch(params: Any, sp_ids: Any) -> Any:
    """Brings rows that a later `lookup_sparse` will look up from the host's memory to that of the GPU, and
    reads ahead what stores have of them.

    For dynamic tables with `max_hbm_for_vectors` on a GPU, or with a `store`; others are passed over, so any model may
    call it. A thread reads the store, and no row moves until a lookup trains it. Rows of tables with
    `max_hbm_for_vectors` that a lookup asks for come to the GPU anyway; called after the forward pass of a batch, with
    the ids of the next one, they come while backward and the step of this one run. Rows that this step uses do not
    move. Keys that a table lacks get no row.

    With several ranks every rank must make the call, with the same tables in the same order, and its keys travel to
    the ranks that hold their rows, two exchanges a table.

    Args:
      params, sp_ids: as of `lookup_sparse`.

    Returns:
      None; in a tf.compat.v1 graph the operation to run.

    Raises:
      As `lookup_sparse`.
    """
    state = runtime.get()
    started = []
    with tf.name_scope("sok_prefetch"):
        try:
            checked = check_lookup(params, sp_ids, None, None)
            given = [
                (table, _ids.prepare([table], [ids], [None], defer_errors=False)[0][0].keys)
                for table, ids in zip(map(table_of, checked.params), checked.ids, strict=True)
                if _is_for(table)
            ]
        except Exception:
            listed = list(filter(_is_for, params if isinstance(params, (list, tuple)) else [params]))
            if state.exchange is not None and tf.executing_eagerly() and listed:
                stored.tell_peers(state, table_of(listed[0]), "prefetch")
            raise
        if state.exchange is not None:
            for number, (table, keys) in enumerate(given):
                with devices.beside(table):
                    keys = tf.cast(keys, tf.int64)  # each rank may have ids of another dtype
                    keys = stored.sent_to_owners(keys, table, state.exchange, state.num_ranks)
                given[number] = table, keys
        for table, keys in given:
            if _has_tiers(table):
                with devices.beside(table):
                    attributes = Tables.of([table]).attributes()
                    started.append(ops.sok_prefetch(tables=[table.handle], keys=keys, **attributes))
            if stored.has_store(table):
                with stored.alone([table], keys):
                    stored.fetch_ahead(table, keys)
    return None if tf.executing_eagerly() or tf.inside_function() or not started else tf.group(*started)
