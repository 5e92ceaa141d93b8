# SPDX-License-Identifier: Apache-2.0
"""The processes of a training in TensorFlow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import sparse_operation_kit.tensorflow as sok


class TensorflowRanks:
    """Implements training.Ranks; after sok.init()."""

    def __init__(self) -> None:
        self.rank = sok.rank()
        self.num_ranks = sok.num_ranks()

    def sum(self, array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See training.Ranks."""
        total: npt.NDArray[np.float64] = sok.communication.allreduce(array).numpy()
        return total
