# SPDX-License-Identifier: Apache-2.0
"""The index of a dynamic table: any integer -> a slot (core/include/sok/hash_index.h)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import final

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer


@final
class HashIndex:
    """Key -> slot, for any int64 keys.

    Args:
      capacity: the most keys that it may ever hold; addresses are reserved for them.
      initial_rows: so many keys fit before it grows.
      device: the CUDA device that it is on; None: the CPU.
      name: of the table, for messages.

    A new key takes the slot that was erased last, else the lowest that was never given out; the C header says what that
    means for a batch. `struct` is the sok_index, so that it may be the index of a `Table`. Finding may run in several
    threads at once, everything else one at a time. Close it, or use it as a context manager.

    Raises:
      ValueError: a size that cannot be, or no such device. MemoryError.
      NotImplementedError: the core was built without CUDA.
    """

    def __init__(self, capacity: int, *, initial_rows: int = 0, device: int | None = None, name: str = "table") -> None:
        self.handle = ctypes.c_void_p()
        where = _abi.Device(_abi.CPU, 0) if device is None else _abi.Device(_abi.CUDA, device)
        size = ctypes.sizeof(_abi.HashIndexConfig)
        config = _abi.HashIndexConfig(size, where, capacity, initial_rows, name.encode())
        _library.check(_abi.library().sok_hash_index_create(ctypes.byref(config), ctypes.byref(self.handle)))
        self.struct = _abi.library().sok_hash_index_as_index(self.handle).contents

    @classmethod
    def of_table(cls, handle: int) -> HashIndex:
        """The index of a dynamic table, which closes it."""
        self = cls.__new__(cls)
        self.handle = ctypes.c_void_p(handle)
        self.struct = _abi.library().sok_hash_index_as_index(self.handle).contents
        return self

    @property
    def capacity(self) -> int:
        """The most keys that it may hold; 0 once it is closed."""
        return int(_abi.library().sok_hash_index_capacity(self.handle))

    @property
    def num_slots(self) -> int:
        """All slots given out so far are below it; on a GPU by some batches at most."""
        return int(_abi.library().sok_hash_index_num_slots(self.handle))

    @property
    def num_bytes(self) -> int:
        """Memory that it has."""
        return int(_abi.library().sok_hash_index_bytes(self.handle))

    def size(self, *, context: Context | None = None) -> int:
        """How many keys it holds."""
        result = ctypes.c_int64()
        _library.check(_abi.library().sok_hash_index_size(pointer(context), self.handle, ctypes.byref(result)))
        return result.value

    def find(self, keys: npt.ArrayLike, *, context: Context | None = None) -> Array:
        """The slots [n] int64 of keys [n] int32 or int64, -1 where it does not hold them."""
        return find([HashRequest(self, keys)], context=context)[0]

    def find_or_insert(self, keys: npt.ArrayLike, *, context: Context | None = None) -> tuple[Array, Array]:
        """The slots [n] int64 of keys [n], which it holds afterwards; and [n] uint8, 1 where a key is new.

        Raises:
          MemoryError: the new keys do not fit; it holds the keys that it held.
        """
        return find_or_insert([HashRequest(self, keys)], context=context)[0]

    def erase(self, keys: npt.ArrayLike, *, context: Context | None = None) -> Array:
        """The slots [n] int64 that keys [n] had, -1 where it did not hold them or a key occurred before."""
        return erase([HashRequest(self, keys)], context=context)[0]

    def reserve(self, rows: int, *, context: Context | None = None) -> None:
        """Grows for `rows` keys in all.

        Raises:
          ValueError: more than the capacity. MemoryError.
        """
        _library.check(_abi.library().sok_hash_index_reserve(pointer(context), self.handle, rows))

    def clear(self, *, context: Context | None = None) -> None:
        """Erases all keys; the first slot given out afterwards is 0."""
        _library.check(_abi.library().sok_hash_index_clear(pointer(context), self.handle))

    def export(
        self, first_slot: int = 0, num_slots: int | None = None, *, context: Context | None = None
    ) -> tuple[Array, Array, Array]:
        """(keys, slots, count): those in the slots [first_slot, first_slot + num_slots), ascending by slot. keys and
        slots have num_slots entries, of which the first count[0] are defined; default: up to the last slot in use.
        """
        n = max(0, self.num_slots - first_slot) if num_slots is None else num_slots
        arrays = (empty(context, n, np.int64), empty(context, n, np.int64), empty(context, 1, np.int64))
        views = map(_arrays.view, arrays)
        _library.check(_abi.library().sok_hash_index_export(pointer(context), self.handle, first_slot, *views))
        return arrays

    def close(self) -> None:
        """Gives its memory back. Calling it again does nothing."""
        handle, self.handle = self.handle, ctypes.c_void_p()
        _library.check(_abi.library().sok_hash_index_destroy(handle))

    def __enter__(self) -> HashIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


@dataclasses.dataclass(eq=False)
class HashRequest:
    """Keys [n] int32 or int64 of one index, in a call that may have many."""

    index: HashIndex
    keys: npt.ArrayLike


def find(requests: Sequence[HashRequest], *, context: Context | None = None) -> list[Array]:
    """`HashIndex.find` of several indices in one call; one array a request."""
    return [slots for slots, _ in _call(_abi.library().sok_hash_index_find, requests, context, with_new=False)]


def find_or_insert(requests: Sequence[HashRequest], *, context: Context | None = None) -> list[tuple[Array, Array]]:
    """`HashIndex.find_or_insert` of several indices in one call, which may name one more than once.

    Raises:
      MemoryError: the new keys of an index do not fit; all indices hold the keys that they held.
    """
    return _call(_abi.library().sok_hash_index_find_or_insert, requests, context, with_new=True)


def erase(requests: Sequence[HashRequest], *, context: Context | None = None) -> list[Array]:
    """`HashIndex.erase` of several indices in one call; one array a request."""
    return [slots for slots, _ in _call(_abi.library().sok_hash_index_erase, requests, context, with_new=False)]


def _call(
    function: Callable[..., int], requests: Sequence[HashRequest], context: Context | None, *, with_new: bool
) -> list[tuple[Array, Array]]:
    keys = [_arrays.read(request.keys, f"requests[{i}].keys") for i, request in enumerate(requests)]
    sizes = [0 if each is None else each.size for each in keys]
    slots = [empty(context, size, np.int64) for size in sizes]
    are_new = [empty(context, size if with_new else 0, np.uint8) for size in sizes]
    structs = (_abi.HashIndexRequest * len(requests))(
        *(
            _abi.HashIndexRequest(
                request.index.handle,
                _arrays.view(key),
                _arrays.view(slot),
                _arrays.view(is_new if with_new else None),
            )
            for request, key, slot, is_new in zip(requests, keys, slots, are_new, strict=True)
        )
    )
    _library.check(function(pointer(context), len(requests), structs))
    return list(zip(slots, are_new, strict=True))
