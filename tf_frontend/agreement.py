# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other before a step changes a row: whether one of them cannot do its part.

It costs one number from each rank. In a tf.function it travels beside the rows and their gradients: nothing but the
update waits for it, and what it needs is known before, unless the gradients are the user's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow import communication, devices, runtime
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.exchange import ordered
from sparse_operation_kit.tensorflow.gradient import PendingGradient
from sparse_operation_kit.tensorflow.table_variable import TableVariable

_NAME = "sok_step"


class Agreement:
    """Of the ranks about one step of these tables; to be used as a context around all of it.

    Ranks take part whose step has a distributed table, which all of them have then; a localized one may be known to its
    own rank alone. Over NCCL the update itself tells the others (`SokApply`), so that the host waits for no GPU.

    An exception within the context is told to the others where the step runs eagerly; where it is being traced, no step
    runs that they could stop.
    """

    def __init__(self, tables: Sequence[TableVariable]) -> None:
        self._asks = False
        self.communicator: tf.Tensor | None = None
        """By which the update tells the others."""
        self._device = ""
        if any(table.placement.num_ranks > 1 and table.placement.owner < 0 for table in tables):
            exchange, self._device = runtime.get().exchange, tables[0].handle.device
            self.communicator = None if exchange is None else exchange.communicator(tables[0].handle)
            self._asks = exchange is not None and self.communicator is None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tells of an exception within the block, unless the ranks have agreed by then."""
        try:
            yield
        except Exception:
            exchange = runtime.get().exchange
            if tf.executing_eagerly() and exchange is not None:
                if self._asks:
                    self._highest(self._of_this_rank(tf.errors.ABORTED))
                elif self.communicator is not None:
                    exchange.tell_failure(self._device)
            raise

    def update(self, make: Callable[[list[tf.Tensor]], Any]) -> Any:
        """Gives `make`, which makes SokApply, the communicator to tell the others by."""
        told, self.communicator = self.communicator, None  # it tells of its own errors
        return make([]) if told is None else ordered(lambda: make([told]))

    def reach(
        self, gradients: Sequence[Any] = (), check: Callable[[Sequence[bool]], Any] | None = None
    ) -> list[tf.Operation]:
        """Asks all ranks, once.

        Args:
          gradients: of the step.
          check: gives SokCheckUpdates, of those gradients that are marked.

        Returns:
          What the update has to wait for in a graph. Eagerly it raises what is wrong.
        """
        if not self._asks:
            return []
        # What lookups of this package left fits their tables. Where a lookup fails, on all ranks, none asks.
        pending = [each for each in gradients if isinstance(each, PendingGradient)]
        looked_up = {id(slots): slots for each in pending for slots in each.located}
        with tf.control_dependencies([] if tf.executing_eagerly() else list(looked_up.values())):
            result = None if check is None else check([not isinstance(each, PendingGradient) for each in gradients])
            failed = self._of_this_rank(0) if result is None else result.failed
        self._asks = False
        highest = self._highest(failed)
        with tf.device(devices.HOST):
            message = tf.constant("") if result is None else result.message
            raised = ops.sok_raise_together(received=highest, message=message, num_ranks=runtime.num_ranks())
        return [] if raised is None else [raised]

    def _of_this_rank(self, code: int) -> tf.Tensor:
        """As SokCheckUpdates gives it."""
        state = runtime.get()
        with tf.device(devices.HOST):
            return tf.constant([code * state.num_ranks + state.rank if code else 0], tf.int64)

    def _highest(self, failed: tf.Tensor) -> tf.Tensor:
        with tf.device(devices.HOST):
            return communication.allreduce(tf.identity(failed), "max", name=_NAME)
