# SPDX-License-Identifier: Apache-2.0
"""A kind of table for the tests alone: its index strews the slots that a static table has over more of them, and its
columns lie in reserved address ranges."""

import weakref

import numpy as np

from sparse_operation_kit import core
from sparse_operation_kit.held import HeldTable

FREE = 512.0
"""What stands in slots that no key has; a number, exact in each dtype, so that tables can be compared."""


def places_of(rows, dimension):
    """(the slot [rows] of each slot of a static table, how many slots there are)."""
    num_slots = rows + rows // 2 + 3
    return np.random.default_rng((rows, dimension)).permutation(num_slots)[:rows], num_slots


def index(places, owner, num_ranks):
    """The `core.Index` of such a table."""
    return core.Index(lambda keys, insert: places[keys if owner >= 0 else keys // num_ranks])


def column(shape, dtype, initial=FREE):
    """A NumPy array in a reserved range of its own, `initial` everywhere."""
    memory = core.ReservedRange(max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
    memory.grow(memory.reserved_bytes)
    array = memory.array(shape, dtype)
    weakref.finalize(array.base, memory.close)
    array[...] = initial
    return array


class HeldByPlaces(HeldTable):
    """What a table of this kind is to what runs between steps; before a frontend's `held.Table` among the bases.

    places: as of places_of
    """

    places: np.ndarray

    def entries(self, size):
        for first in range(0, self.num_entries, size):
            numbers = np.arange(first, min(first + size, self.num_entries))
            yield np.asarray(self.placement.global_keys(numbers)), self.places[numbers]

    def keys(self, slots):
        back = np.full(self.places.max(initial=-1) + 1, -1)
        back[self.places] = np.arange(len(self.places))
        numbers = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        return np.asarray(self.placement.global_keys(back[numbers]))

    def slots(self, keys):
        return self.places[self.placement.key_map(keys)]

    def changed(self, stamp):
        changed = np.isin(self.places, super().changed(stamp))  # type: ignore[safe-super]  # the frontend's
        return self.places[changed]
