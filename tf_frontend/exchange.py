# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks: one method, all-to-all with counts."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf


class Exchange(Protocol):
    """Moves pieces of a tensor between ranks; differentiable."""

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        """Sends the first splits[0] entries to rank 0, the next splits[1] to rank 1, ...

        Args:
          tensor: [n, ...] what to send.
          splits: [num_ranks] int32 entries for each rank; None: n / num_ranks for each.
          name: of the operation. Ranks meet by name, so it must be the same on all of them, and in a graph it must not
            depend on how often that graph was traced.

        Returns:
          [m, ...] what came, by source rank.
        """
        ...


class HorovodExchange:
    """Exchange through `horovod.tensorflow.alltoall`."""

    def __init__(self) -> None:
        import horovod.tensorflow as hvd

        self._hvd: Any = hvd

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        received = self._hvd.alltoall(tensor, splits=splits, name=name)
        return received if splits is None else received[0]
