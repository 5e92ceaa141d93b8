# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks: all-to-all with counts, and the swap of these counts that comes before it."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf


class Exchange(Protocol):
    """Moves pieces of a tensor between ranks; differentiable.

    All ranks make the same calls in the same order. Tensors on the CPU travel by the engine that started the processes.
    """

    def all_to_all(
        self,
        tensor: tf.Tensor,
        send_splits: tf.Tensor | None = None,
        receive_splits: tf.Tensor | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        """Sends the first send_splits[0] entries to rank 0, the next send_splits[1] to rank 1, ...

        Args:
          tensor: [n, ...] what to send.
          send_splits: [num_ranks] int32 or int64 entries for each rank, in host memory; None: n / num_ranks for each.
          receive_splits: [num_ranks] as many come from each rank, in host memory; None: found out, which takes an
            exchange of its own where the engine does not do it.
          name: of the operation. Ranks meet by name, so it must be the same on all of them, and in a graph it must not
            depend on how often that graph was traced.

        Returns:
          [m, ...] what came, by source rank.
        """
        ...

    def swap_counts(self, sent: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends row r of `sent` to rank r.

        Args:
          sent: [num_ranks, k] int64, on the CPU or a GPU.
          name: as for all_to_all.

        Returns:
          (sent, received), both [num_ranks, k] int64 in host memory; row s of `received` came from rank s. On a GPU
          this is where a step waits: what was enqueued before it is done when the two are there.
        """
        ...


class HorovodExchange:
    """Exchange through `horovod.tensorflow.alltoall`."""

    def __init__(self) -> None:
        import horovod.tensorflow as hvd

        self._hvd: Any = hvd

    def all_to_all(
        self,
        tensor: tf.Tensor,
        send_splits: tf.Tensor | None = None,
        receive_splits: tf.Tensor | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        del receive_splits  # Horovod tells the ranks itself
        if send_splits is None:
            return self._hvd.alltoall(tensor, name=name)
        return self._hvd.alltoall(tensor, splits=tf.cast(send_splits, tf.int32), name=name)[0]

    def swap_counts(self, sent: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):
            sent = tf.identity(sent)
            received = self.all_to_all(sent, name=name)
        received.set_shape(sent.shape)
        return sent, received
