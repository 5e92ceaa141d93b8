# SPDX-License-Identifier: Apache-2.0
"""The tests' own kind of table (`permutation`) as a variable of this frontend, in place of `sok.Variable`."""

import contextlib
import ctypes
from typing import Any

import numpy as np
import permutation
import torch
from torch import Tensor

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import embedding, held, saving, variable

Static = sok.Variable


class Held(permutation.HeldByPlaces, held.Table):
    def __init__(self, table):
        super().__init__(table)
        self.places = table.places.numpy()


class Permuted(Static):
    """As sok.Variable, with an index. `places`: the slot of each slot of a static table."""

    places: Tensor
    _kept: tuple[Any, Any]

    def __new__(cls, *args, **options):
        static = Static(*args, **options)
        table = cls._of(Tensor.detach(static), static._placement, static._sok_name, static.requires_grad)
        table._initial = static._initial
        return table

    @classmethod
    def _of(cls, rows, place, name, trainable):
        places, num_slots = permutation.places_of(*place.local_shape)
        index = permutation.index(places, place.owner, place.num_ranks)
        numbers = permutation.column((num_slots, place.dimension), np.float32 if rows.itemsize == 4 else np.int16, 0)
        memory = torch.from_numpy(numbers).view(rows.dtype).fill_(permutation.FREE)
        indexed = torch.classes.sok.IndexedTable(ctypes.addressof(index.struct), memory)
        table = cls._wrap(indexed.rows(), place, name, trainable, indexed)
        table.places, table._kept = torch.from_numpy(places), (index, memory)
        Tensor.detach(table)[table.places] = rows
        return table

    def _by_key(self):
        return Tensor.detach(self)[self.places]

    def _fill(self, rows, initial):
        static = torch.empty(self._placement.local_shape, dtype=self.dtype)
        variable.fill(static, self._placement, initial.initializer, initial.seed, self._sok_name)
        rows[self.places] = static

    def detach(self):
        return Tensor.detach(self)

    def slots_of(self, keys):
        return self.places[self._placement.key_map(keys.cpu())]

    def keyed_slots(self):
        return self.places.sort().values

    def exported(self):
        return super().exported()[0], self._by_key()

    def held(self):
        return Held(self)

    def add_column(self, width, initial, dtype):
        shape = (len(self), width) if width else (len(self),)
        kind = np.float32 if dtype == torch.float32 else np.int64
        return torch.from_numpy(permutation.column(shape, kind, initial))

    def _layout(self):
        return saving.Layout.of(self._sok_name, self._placement)

    def shared(self):
        return saving.TableShard.wrap(self._by_key(), self._layout())

    def taken(self, given, assign):
        given = given._by_key() if isinstance(given, Permuted) else given
        rows = saving.rows_for(given, self._layout(), self._placement.local_shape)
        if assign:
            return self._of(rows, self._placement, self._sok_name, self.requires_grad)
        Tensor.detach(self)[self.places] = rows.to(self.dtype)
        return self

    def share_states(self, state):
        return saving.share(self._each(state, lambda value: value[self.places]), self._layout(), len(self.places))

    def take_states(self, state):
        taken = saving.take(state, self._layout(), len(self.places))

        def strewn(value):
            column = self.add_column(value.shape[1] if value.dim() > 1 else 0, permutation.FREE, torch.float32)
            column[self.places] = value
            return column

        return self._each(taken, strewn)

    @staticmethod
    def _each(state, function):
        return {k: function(v) if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()}

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self._of(self._by_key(), self._placement, self._sok_name, self.requires_grad)
            memo[id(self)]._initial = self._initial
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self._of, (self._by_key(), self._placement, self._sok_name, self.requires_grad)


@contextlib.contextmanager
def installed():
    """`sok.Variable` is this kind, for the tests within."""
    modules: tuple[Any, ...] = (sok, variable, embedding)
    try:
        for module in modules:
            module.Variable = Permuted
        yield
    finally:
        for module in modules:
            module.Variable = Static
