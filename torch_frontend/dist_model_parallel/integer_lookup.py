# SPDX-License-Identifier: Apache-2.0
"""IntegerLookup: a vocabulary that grows as keys appear."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class IntegerLookup(nn.Module):
    """Numbers keys from 1 on in the order in which they first appear in a flattened batch; 0 is for what is unknown
    when the vocabulary is full.

    Args:
      max_tokens: how many keys get a number. An embedding of the numbers has max_tokens + 1 rows.

    Call it with int32 or int64 keys of any shape, any values: it returns int64 numbers of the same shape. In evaluation
    (``eval()``) new keys give 0 and are not learnt. The buffer `count` [max_tokens + 1] says how often each number was
    given. Each process has a vocabulary of its own; it is in the state_dict.

    Raises:
      ValueError: max_tokens that is not positive. TypeError: keys that are no integers.
    """

    table: Tensor
    size: Tensor
    count: Tensor

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        if max_tokens <= 0:
            raise ValueError(f"max_tokens should be positive, found {max_tokens}")
        self.max_tokens = int(max_tokens)
        # Keys, ascending, and their numbers; as many as `size` says.
        self.register_buffer("table", torch.zeros(2, self.max_tokens, dtype=torch.int64))
        self.register_buffer("size", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", torch.zeros(self.max_tokens + 1, dtype=torch.int64))

    @torch.no_grad()
    def forward(self, keys: Tensor) -> Tensor:
        """See the class."""
        if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
            raise TypeError(f"keys must be integers, got {keys.dtype}")
        flat = keys.reshape(-1).to(torch.int64)
        different, places = torch.unique(flat, return_inverse=True)
        if self.training and len(flat):
            self._learn(different, places)
        numbers = self._numbers(different)[places]
        self.count.index_add_(0, numbers, torch.ones_like(numbers))
        return numbers.reshape(keys.shape)

    def _numbers(self, different: Tensor) -> Tensor:
        """The number of each key, 0 where it has none."""
        size = int(self.size)
        if size == 0:
            return torch.zeros_like(different)
        known = self.table[0, :size]
        where = torch.searchsorted(known, different).clamp_(max=size - 1)
        return torch.where(known[where] == different, self.table[1, where], 0)

    def _learn(self, different: Tensor, places: Tensor) -> None:
        """Gives numbers to the keys that have none, in order, as long as there is room."""
        size = int(self.size)
        first = torch.full_like(different, len(places))
        first.scatter_reduce_(0, places, torch.arange(len(places), device=places.device), "amin")
        order = torch.argsort(first)
        new = different[order][self._numbers(different)[order] == 0][: self.max_tokens - size]
        if not len(new):
            return
        keys = torch.cat([self.table[0, :size], new])
        numbers = torch.cat([self.table[1, :size], torch.arange(size + 1, size + len(new) + 1, device=new.device)])
        keys, order = torch.sort(keys)
        self.table[:, : len(keys)] = torch.stack([keys, numbers[order]])
        self.size.fill_(len(keys))

    def get_vocabulary(self) -> list[int]:
        """The keys by their numbers, after -1, which stands for what is unknown."""
        keys, numbers = self.table[:, : int(self.size)].tolist()
        return [-1, *(key for _, key in sorted(zip(numbers, keys, strict=True)))]

    def extra_repr(self) -> str:
        return f"{self.max_tokens}"
