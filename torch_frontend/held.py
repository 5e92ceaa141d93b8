# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer states as columns over slots, read and written between steps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparse_operation_kit.held import Array, HeldTable, Slots
from sparse_operation_kit.torch import stamps
from sparse_operation_kit.torch.table_io import assign
from sparse_operation_kit.torch.variable import Variable


class Column:
    """A tensor: on the CPU read in place, elsewhere copied in pieces."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def read(self, slots: Slots) -> Array:
        """See held.Column."""
        rows = self._tensor[self._indices(slots)].cpu()
        return np.asarray((rows.float() if rows.dtype == torch.bfloat16 else rows).numpy())

    def write(self, slots: Slots, values: Array) -> None:
        """See held.Column."""
        new = torch.from_numpy(np.ascontiguousarray(values)).to(self._tensor.device, self._tensor.dtype)
        self._tensor[self._indices(slots)] = new

    def _indices(self, slots: Slots) -> slice | Tensor:
        return slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self._tensor.device)


class Table(HeldTable):
    """This rank's rows of a `sok.Variable`."""

    def __init__(self, variable: Variable) -> None:
        dtype = str(variable.dtype).removeprefix("torch.")
        super().__init__(variable.name, variable.placement, dtype, Column(variable))
        self.variable = variable

    def track(self) -> None:
        """See HeldTable."""
        stamps.start(self.variable)

    def changed(self, stamp: int) -> Array:
        """See HeldTable."""
        held = stamps.of(self.variable)
        assert held is not None
        return np.asarray(torch.nonzero(held >= stamp).flatten().cpu().numpy())

    def overwrite(self, keys: Array, rows: Array) -> None:
        """See HeldTable."""
        assign(self.variable, torch.from_numpy(keys), torch.from_numpy(rows))
