# SPDX-License-Identifier: Apache-2.0
"""Training helpers whose tables are divided by the number of ranks, as everything else is averaged over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import distributed, keras_compat, runtime
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.dist_model_parallel.setup import ensure_initialised


@as_written
def broadcast_variables(model_vars: Iterable[Any], root_rank: int = 0) -> Any:
    """Gives the replicated variables of all ranks the values of `root_rank`; those with `de_local` stay.

    As `sok.broadcast_variables`, but init() is called where nobody has.
    """
    ensure_initialised()
    return distributed.broadcast_variables(model_vars, root_rank)


class DistributedGradientTape(distributed.DistributedGradientTape):
    """A `tf.GradientTape` whose gradients are those of the mean of the ranks' losses.

    Gradients of replicated variables are averaged over the ranks. Those of tables, which are sums over all ranks, are
    divided by the number of ranks, once, whatever `init(gradient=...)` says; nothing is sent for them.

    Args:
      gradtape: the tape to wrap; None makes one.
      persistent, watch_accessed_variables: of a tape that is made.
      scale_local_gradients: False: tables are not divided.
      **hints: as of `hvd.DistributedGradientTape`, which change how it works and not what comes out (device_dense,
        device_sparse, num_groups, groups, ...); ignored.

    Raises:
      TypeError: an unknown option, or sparse_as_dense: sparse gradients stay sparse.
    """

    _HINTS = ("device_dense", "device_sparse", "compression", "gradient_predivide_factor", "num_groups", "groups")

    def __init__(
        self,
        gradtape: tf.GradientTape | None = None,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
        scale_local_gradients: bool = True,
        **hints: Any,
    ) -> None:
        unknown = [name for name in hints if name not in self._HINTS]
        if unknown:
            raise TypeError(f"unknown options {unknown}; there are {', '.join(self._HINTS)}")
        ensure_initialised()
        super().__init__(gradtape, persistent, watch_accessed_variables)
        self._sok_divides = scale_local_gradients


def DistributedOptimizer(optimizer: Any, **options: Any) -> Any:
    """A new optimizer, made of the config of `optimizer`, for `compile` and `fit` or own loops.

    As `sok.DistributedOptimizer`: replicated variables are averaged and tables are updated by the fused op. Gradients
    of tables are divided by the number of ranks, once, whatever `init(gradient=...)` says.

    Args:
      optimizer: of Keras 3 or tf_keras (new or legacy).
      **options: as of `DistributedGradientTape`.

    Raises:
      TypeError: no such optimizer; an unknown option.
    """
    unknown = [name for name in options if name not in DistributedGradientTape._HINTS]
    if unknown:
        raise TypeError(f"unknown options {unknown}; there are {', '.join(DistributedGradientTape._HINTS)}")
    ensure_initialised()
    if keras_compat.family(optimizer) in (None, keras_compat.TF1):
        raise TypeError(f"DistributedOptimizer takes optimizers of Keras and tf_keras, got {type(optimizer).__name__}")
    made = type(optimizer).from_config(optimizer.get_config())
    return distributed.distribute(made, divide_tables=True)


def make_callback(keras: Any) -> Any:
    """BroadcastGlobalVariablesCallback of the given Keras."""

    class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
        """After the first batch, gives replicated variables and their optimizer's states the values of `root_rank`.

        Tables and the states that an optimizer keeps for them stay as they are.

        Args:
          root_rank: whose values.
          device: accepted because Horovod has it; ignored.
        """

        def __init__(self, root_rank: int = 0, device: str = "") -> None:
            super().__init__()
            ensure_initialised()
            self.root_rank = root_rank
            self.broadcast_done = False

        def on_batch_end(self, batch: Any, logs: Any = None) -> None:
            """See the class."""
            if self.broadcast_done:
                return
            self.broadcast_done = True
            if runtime.get().num_ranks == 1:
                return
            local = [variable for variable in self.model.variables if distributed.is_local(variable)]
            states = keras_compat.replicated_states(self.model.optimizer, local)
            broadcast_variables([*self.model.variables, *states], self.root_rank)

    return BroadcastGlobalVariablesCallback
