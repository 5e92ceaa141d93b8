# SPDX-License-Identifier: Apache-2.0
"""What the tables of this package are alike: parameters with a name, a placement, and gradients that lookups leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from sparse_operation_kit.placement import Placed, Placement
from sparse_operation_kit.stored_rows import StoredRows
from sparse_operation_kit.torch.gradient import PendingGradient

own_grad: Any = torch.Tensor.grad  # autograd's own slot, which TableParameter.grad stands before


class TableRows(Placed, Tensor):  # type: ignore[misc]  # Tensor.mode is a method
    """Rows of a table that this rank holds, [slots, dimension]."""

    _sok_name: str

    @property
    def name(self) -> str:
        """The table's name."""
        return self._sok_name

    @property
    def whole(self) -> Any:
        """The parameter that has the slots: the table itself, or its stack."""
        return self

    def slots_of(self, keys: Tensor) -> Tensor:
        """The slots [n] int64 of keys [n] that this rank holds; of others -1, or any."""
        slots: Tensor = self._placement.key_map(keys)
        return slots

    def exported(self) -> tuple[Tensor, Tensor]:
        """See `table_io.export`."""
        keys = self._placement.global_keys(torch.arange(self._placement.local_rows, dtype=torch.int64, device="cpu"))
        return keys, Tensor.detach(self).to("cpu", copy=True)

    def held(self) -> Any:
        """The `held.Table`, as what runs between steps sees it."""
        from sparse_operation_kit.torch.held import Table

        return Table(self)


class TableParameter(TableRows, torch.nn.Parameter):  # type: ignore[misc]  # as above
    """A table: its slots on this rank, [slots, dimension], as a ``torch.nn.Parameter``."""

    _gradient: Any  # torch.classes.sok.TableGradient: what lookups have left and nobody has looked at
    _gradient_number: int  # its number
    _unread: memoryview  # [0]: the number of its entries, which C++ writes
    _stamps: Any  # stamps.Stamps, or None
    _index: Any  # torch.classes.sok.IndexedTable of a table that has an index, else None
    _hooked: bool  # whether it has had hooks of its gradient
    _stored: StoredRows | None = None  # of a DynamicVariable with a store

    # nn.Parameter's constructor has nothing to do here; torch.Tensor's would refuse the keywords.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def _wrap(cls, rows: Tensor, place: Placement, name: str, trainable: bool, index: Any = None) -> Self:
        self: Self = torch.Tensor._make_subclass(cls, rows, trainable)
        self._placement = place
        self._sok_name = name
        self._stamps = None
        self._index = index
        self._hooked = False
        unread = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._gradient = torch.classes.sok.TableGradient(unread)
        self._gradient_number = self._gradient.number()  # a call takes 4 us
        self._unread = unread.numpy().data
        return self

    def with_rows(self, rows: Tensor) -> Self:
        """This table with other memory for its rows, of any device and dtype."""
        return self._wrap(rows, self._placement, self._sok_name, self.requires_grad)

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's rows, a PendingGradient unless something dense was added; None when there is
        none.
        """
        if self._unread[0] and not torch.compiler.is_compiling():  # who traces a graph asks every tensor of it
            self._collect()
        gradient: Tensor | None = own_grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        own_grad.__set__(self, value)
        if self._unread[0]:
            self._gradient.clear()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Any) -> Any:
        """As of any tensor."""
        self._hooked = True
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """As of any tensor."""
        self._hooked = True
        return super().register_post_accumulate_grad_hook(hook)

    def _collect(self) -> None:
        """Moves what lookups have left to where autograd has gradients."""
        options = (self.shape, self.dtype, self.device, self._gradient.take(), self._sok_name)
        gradient: Any = PendingGradient(*options, index=self._index)
        total: Any = own_grad.__get__(self)
        if total is not None:
            with torch.no_grad():
                total += gradient
            gradient = total
        own_grad.__set__(self, gradient)

    @property
    def device_rows(self) -> int:
        """How many rows are in the memory of a GPU that it is on, where others are in the host's; 0: all."""
        return 0

    def keyed_slots(self) -> Tensor:
        """The slots [n] int64 that have a key, ascending."""
        return torch.arange(self.shape[0], device=self.device)

    def add_column(self, width: int, initial: float, dtype: torch.dtype) -> Tensor:
        """See `new_column`."""
        return _column(self, width, initial, dtype)

    def has_column(self, state: Tensor) -> bool:
        """Whether a state that an optimizer keeps of the table is one of its columns as it is."""
        return True

    def new_state(self, key: str, initial: Tensor) -> Tensor:
        """A state of all slots, from that of one, [1, ...]. NotImplementedError naming `key` for one that it cannot
        keep.
        """
        return initial.expand(self.shape[0], *initial.shape[1:]).contiguous()

    # What state_dict() of a module or an optimizer has of the table, and what it takes of another.

    def shared(self) -> Tensor:
        """The entry of the rows in a state_dict."""
        raise NotImplementedError

    def taken(self, given: Tensor, assign: bool) -> Tensor:
        """What PyTorch copies to the table for an entry of a state_dict, or `assign` puts in its place. ValueError,
        with the reason, for an entry of another table or rank.
        """
        raise NotImplementedError

    def share_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`optimizer.state[table]` as a state_dict has it."""
        raise NotImplementedError

    def take_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What `share_states` gave, for the table as it is placed now. ValueError, with the reason, for others."""
        raise NotImplementedError


def new_column(table: Tensor, width: int, initial: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """What there is one of for each slot of a table: [slots, width], or [slots] where width is 0, `initial` everywhere.
    It grows with a dynamic table, and new slots begin with `initial` (which is 0 for int64).
    """
    if isinstance(table, TableParameter):
        return table.add_column(width, initial, dtype)
    return _column(table, width, initial, dtype)


def _column(table: Tensor, width: int, initial: float, dtype: torch.dtype) -> Tensor:
    shape = (table.shape[0], width) if width else table.shape[:1]
    if initial == 0.0:
        return torch.zeros(shape, dtype=dtype, device=table.device)
    return torch.full(shape, initial, dtype=dtype, device=table.device)


def has_column(table: Tensor, state: Tensor) -> bool:
    """See TableParameter; also of parameters that are no tables."""
    return not isinstance(table, TableParameter) or table.has_column(state)


def keys_of(table: TableParameter, indices: Any) -> Tensor:
    """`indices` as a tensor where the table is. TypeError unless they are integers of its key_type."""
    keys: Tensor = torch.as_tensor(indices, device=table.device)
    given = str(keys.dtype).removeprefix("torch.")
    if keys.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, not {given}")
    if getattr(table, "key_type", keys.dtype) == torch.int32 != keys.dtype:
        raise TypeError(f"indices of table '{table.name}' must be int32, its key_type, not {given}")
    return keys


def is_table(value: object) -> bool:
    """Whether `value` is a table of this package."""
    return isinstance(value, TableParameter)
