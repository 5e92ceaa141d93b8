# SPDX-License-Identifier: Apache-2.0
"""`Init` of SparseOperationKit 1.x."""

from __future__ import annotations

import functools
import logging

import tensorflow as tf

from sparse_operation_kit.tensorflow import communication, runtime
from sparse_operation_kit.tensorflow._autograph import as_written

_log = logging.getLogger(__name__)
_init = functools.partial(runtime.init, use_legacy_optimizer=False)  # 1.x left tf.keras.optimizers alone
_STRATEGIES = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)


def ready() -> None:
    """init() with its defaults where nobody has called it."""
    if runtime.session.state is None:
        _init()


@as_written
def Init(*, global_batch_size: int | None = None, seed: int | None = None) -> tf.Tensor:
    """`sok.init()` under its name in SparseOperationKit 1.x. Call it on every rank, within the strategy's scope where
    there is one, or after hvd.init(). What `sok.init()` was told before stays.

    Args:
      global_batch_size: checked and otherwise without effect: a batch may have any size, on each rank another.
      seed: of initial rows, None: 0. Where ranks give different ones that of rank 0 counts, and a warning is logged; in
        a tf.compat.v1 graph all must give the same.

    Returns:
      The string tensor "OK"; `session.run` takes it.

    Raises:
      RuntimeError: within the scope of another strategy than MirroredStrategy and MultiWorkerMirroredStrategy.
      TypeError: another keyword.
      ValueError: a global_batch_size below the number of ranks or no multiple of it; as `sok.init`.
    """
    if tf.distribute.has_strategy() and not isinstance(strategy := tf.distribute.get_strategy(), _STRATEGIES):
        raise RuntimeError(
            f"Init works with MirroredStrategy and MultiWorkerMirroredStrategy, not with {type(strategy).__name__}"
        )
    before = runtime.session.state
    chosen = 0 if seed is None else seed
    if before is None:
        _init(seed=chosen)
    else:  # what init() was told is not to be refused now, nor is a seed of rank 0
        told = before.arguments
        _init(gradient=told.gradient, exchange=told.exchange, seed=told.seed if seed is None else chosen)
    ranks = runtime.num_ranks()
    if ranks > 1 and before is None and tf.executing_eagerly():
        seeds = communication.allgather(tf.constant([chosen], tf.int64), name="sok_seeds").numpy().tolist()
        if len(set(seeds)) > 1:
            _log.warning("Init was called with different seeds, %s: that of rank 0 counts", seeds)
            runtime.shutdown()
            _init(seed=seeds[0])
    if global_batch_size is not None and (global_batch_size < ranks or global_batch_size % ranks):
        raise ValueError(f"global_batch_size must be a multiple of the {ranks} ranks, got {global_batch_size}")
    return tf.constant("OK")
