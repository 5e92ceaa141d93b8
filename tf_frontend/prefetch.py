# SPDX-License-Identifier: Apache-2.0
"""prefetch: rows of the next batch come to the device while a step runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparse_operation_kit.arguments import check_lookup
from sparse_operation_kit.tensorflow import devices, runtime
from sparse_operation_kit.tensorflow import ids as _ids
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Tables
from sparse_operation_kit.tensorflow.exchange import Exchange
from sparse_operation_kit.tensorflow.table_stack import table_of
from sparse_operation_kit.tensorflow.table_variable import TableVariable


@as_written
def prefetch(params: Any, sp_ids: Any) -> Any:
    """Brings rows that a later `lookup_sparse` will look up from the host's memory to that of the GPU.

    For dynamic tables with `max_hbm_for_vectors` on a GPU; others are passed over, so any model may call it. Rows of
    such tables that a lookup asks for come to the GPU anyway; called after the forward pass of a batch, with the ids
    of the next one, they come while backward and the step of this one run. Rows that this step uses do not move. Keys
    that a table lacks get no row.

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
    checked = check_lookup(params, sp_ids, None, None)
    started = []
    with tf.name_scope("sok_prefetch"):
        for param, ids in zip(checked.params, checked.ids, strict=True):
            table = table_of(param)
            if not table.device_rows or not devices.is_on_gpu(table):
                continue
            (batch,), _ = _ids.prepare([table], [ids], [None], defer_errors=False)
            with devices.beside(table):
                keys = batch.keys
                if state.exchange is not None:
                    keys = _sent_to_owners(keys, table, state.exchange, state.num_ranks)
                started.append(ops.sok_prefetch(tables=[table.handle], keys=keys, **Tables.of([table]).attributes()))
    return None if tf.executing_eagerly() or tf.inside_function() or not started else tf.group(*started)


def _sent_to_owners(keys: tf.Tensor, table: TableVariable, exchange: Exchange, num_ranks: int) -> tf.Tensor:
    """The keys of all ranks that this one holds rows of."""
    owners = tf.cast(table.placement.owner_of(keys), tf.int32)
    counts = tf.math.bincount(owners, minlength=num_ranks, maxlength=num_ranks, dtype=tf.int64)
    name = f"sok_prefetch_{table.table_name}"
    # The last column is for ranks that fail.
    sent, received = exchange.swap_counts(tf.stack([counts, tf.zeros_like(counts)], axis=1), name=f"{name}_counts")
    keys = tf.gather(keys, tf.argsort(owners, stable=True))
    return exchange.all_to_all(keys, sent[:, 0], received[:, 0], name=f"{name}_keys")
