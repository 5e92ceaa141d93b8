# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables: rows of any integer keys, in columns that grow in place (core/include/sok/dynamic_table.h)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core._arrays import Array
from sparse_operation_kit.core.context import Context, empty, pointer
from sparse_operation_kit.core.hash_index import HashIndex
from sparse_operation_kit.core.initializer import Initializer
from sparse_operation_kit.core.reserved_range import Memory
from sparse_operation_kit.core.table import Table

EVICTIONS = {
    None: _abi.EVICT_NOTHING,
    "lru": _abi.EVICT_LRU,
    "lfu": _abi.EVICT_LFU,
    "epoch_lru": _abi.EVICT_EPOCH_LRU,
    "epoch_lfu": _abi.EVICT_EPOCH_LFU,
    "customized": _abi.EVICT_CUSTOMIZED,
}


def eviction_number(eviction: str | None) -> int:
    """The sok_eviction of this name. ValueError: there is none."""
    if eviction not in EVICTIONS:
        raise ValueError(f"eviction must be one of {list(EVICTIONS)}, not {eviction!r}")
    return EVICTIONS[eviction]


class DynamicTableCounts(NamedTuple):
    """What has happened to a table: keys located by calls that insert (duplicates counted), insertions, evictions,
    keys that were not admitted, each once a call, and rows that expired. With device_rows: of the lookups those whose
    rows were in the device's memory, and in the host's, and rows that came from there.
    """

    lookups: int
    insertions: int
    evictions: int
    refusals: int
    expirations: int
    device_hits: int
    host_hits: int
    moves: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """Which keys that a table lacks get rows in `core.locate` with admit=True (sok_admission in the C header): in the
    `threshold`th call that has them; with filter=True, with the probability `filter_ratio`. Of the keys that wait at
    most `max_candidates` are counted; 0: as many as the table's capacity.
    """

    threshold: int = 0
    max_candidates: int = 0
    filter_ratio: float = 1.0


@final
class DynamicTable:
    """Any int64 key -> a row, and what else there is one of for each row.

    Args:
      capacity: the most keys that it may ever hold; addresses are reserved for them.
      dimension: elements a row.
      dtype: of the rows: float32, float16 or `core.BFLOAT16`.
      initializer: of rows of new keys.
      initial_rows: so many keys fit before it grows.
      device: the CUDA device that it is on; None: the CPU.
      eviction: which rows go where `capacity` of them are there and new keys come: "lru", "lfu", "epoch_lru",
        "epoch_lfu" or "customized" (sok_eviction in the C header); None: that is a MemoryError.
      admission: which new keys get rows; None: all.
      time_to_live: seconds after which rows that no inserting call has used go; 0: never.
      device_rows: on a GPU: rows of so many slots are in its memory, all others in the host's, from where they come
        when they are asked for, in exchange for others (sok_dynamic_table_config). 0: all.
      half_life: generations after which the counts of "lfu" are halved; 0: never.
      name: appears in messages.

    `index` finds, exports and counts keys. Inserting is `core.locate` of `table()` with insert=True. Everything
    but finding and reading runs alone. Close it, or use it as a context manager.

    Raises:
      ValueError: a size or dtype that cannot be, or no such device. MemoryError.
      NotImplementedError: the core was built without CUDA.
    """

    def __init__(
        self,
        capacity: int,
        dimension: int,
        *,
        dtype: npt.DTypeLike = np.float32,
        initializer: Initializer | None = None,
        initial_rows: int = 0,
        device: int | None = None,
        eviction: str | None = None,
        half_life: int = 0,
        admission: Admission | None = None,
        time_to_live: float = 0.0,
        device_rows: int = 0,
        name: str = "table",
    ) -> None:
        self.handle = ctypes.c_void_p()
        self.name, self.dtype, self.dimension, self.device = name, np.dtype(dtype), dimension, device
        size = ctypes.sizeof(_abi.HashIndexConfig)
        where = _abi.Device(_abi.CPU, 0) if device is None else _abi.Device(_abi.CUDA, device)
        index = _abi.HashIndexConfig(size, where, capacity, initial_rows, name.encode())
        initial = (Initializer() if initializer is None else initializer).struct()
        code = _arrays.number_of(self.dtype)
        config = _abi.DynamicTableConfig(
            ctypes.sizeof(_abi.DynamicTableConfig),
            index,
            dimension,
            -1 if code is None else code,
            initial,
            eviction_number(eviction),
            0,
            half_life,
            _abi.Admission(*dataclasses.astuple(admission or Admission())),
            time_to_live,
            device_rows,
        )
        _library.check(_abi.library().sok_dynamic_table_create(ctypes.byref(config), ctypes.byref(self.handle)))
        self._bind()

    def _bind(self) -> None:
        self.struct = _abi.library().sok_dynamic_table_as_index(self.handle).contents
        self.index = HashIndex.of_table(_abi.library().sok_dynamic_table_hash_index(self.handle))

    @property
    def candidates(self) -> DynamicTable | None:
        """The keys that wait for rows, whose ranks (`scores`) count the calls that asked for them. None: none wait.
        It is not to be closed, and may be used as long as the table is open.
        """
        handle = _abi.library().sok_dynamic_table_candidates(self.handle)
        if handle is None:
            return None
        table = DynamicTable.__new__(DynamicTable)
        table.handle = ctypes.c_void_p(handle)
        table.name, table.dtype, table.dimension = f"{self.name} (candidates)", np.dtype(np.float32), 1
        table.device = self.device
        table._bind()
        return table

    @property
    def num_bytes(self) -> int:
        """Memory that the index and the columns have, also where nothing has touched it yet."""
        return int(_abi.library().sok_dynamic_table_bytes(self.handle))

    @property
    def host_bytes(self) -> int:
        """Of those, bytes in the host's memory, where the table is on a GPU."""
        return int(_abi.library().sok_dynamic_table_host_bytes(self.handle))

    def table(self) -> Table:
        """It as the stages take it, with the slots of now."""
        return Table(self.column(0), _abi.ANY_KEY, name=self.name, index=self)

    def columns(self) -> _abi.Columns:
        """The sok_columns, with the slots of now."""
        held: _abi.Columns = _abi.library().sok_dynamic_table_columns(self.handle)
        return held

    @property
    def generation(self) -> int:
        """How often it was inserted into and erased from: what `Gradient` takes for slots just located."""
        return int(_abi.library().sok_dynamic_table_generation(self.handle))

    def generation_before(self, seconds: float) -> int:
        """The last generation that is known to have begun so many seconds ago or earlier; 0: none is."""
        return int(_abi.library().sok_dynamic_table_generation_before(self.handle, seconds))

    @property
    def running_since(self) -> int:
        """The last generation before the running step, which uses rows whose last use is later; 0 without scores."""
        return int(_abi.library().sok_dynamic_table_running_since(self.handle))

    @property
    def use_times(self) -> Array:
        """[n, 2] int64, ascending: generations, and when they began in nanoseconds of UTC since 1970. A row is as old
        as the first whose generation is not before that of its last use (`scores`), or used now. It may be assigned.
        """
        call = _abi.library().sok_dynamic_table_use_times
        times = np.zeros((call(self.handle, 0, None), 2), np.int64)
        call(self.handle, len(times), times.ctypes.data_as(ctypes.POINTER(_abi.UseTime)))
        return times

    @use_times.setter
    def use_times(self, times: npt.ArrayLike) -> None:
        array = np.ascontiguousarray(np.asarray(times, np.int64).reshape(-1, 2))
        call = _abi.library().sok_dynamic_table_set_use_times
        _library.check(call(self.handle, len(array), array.ctypes.data_as(ctypes.POINTER(_abi.UseTime))))

    def erase(self, keys: npt.ArrayLike, *, context: Context | None = None) -> Array:
        """Erases keys [n] int32 or int64. Returns the slots that they had, -1 where the table did not hold one, or it
        occurred before. A gradient for one of these rows is refused from now on.
        """
        array = _arrays.read(keys, "keys")
        slots = empty(context, 0 if array is None else array.shape[0], np.int64)
        views = (_arrays.view(array), _arrays.view(slots))
        _library.check(_abi.library().sok_dynamic_table_erase(pointer(context), self.handle, *views))
        return slots

    def end_step(self) -> None:
        """The step is over: rows located until now may be evicted. `core.apply` says so itself."""
        _library.check(_abi.library().sok_dynamic_table_end_step(self.handle))

    def set_epoch(self, epoch: int) -> None:
        """The epoch of what is used from now on, for "epoch_lru" and "epoch_lfu". ValueError: negative."""
        _library.check(_abi.library().sok_dynamic_table_set_epoch(self.handle, epoch))

    @property
    def scores(self) -> Any:
        """[num_slots] int64, without a copy: what rows are evicted by, the rank of each row times 2^32 plus the
        generation of its last use; 2^63 - 1 where a slot has lost its key. Empty where nothing is evicted. A NumPy
        array, or on a GPU as of `column`.
        """
        view = _abi.library().sok_dynamic_table_scores(self.handle)
        if view.rank == 0:
            return np.zeros(0, np.int64)
        on_device = self.device is not None
        memory = Memory(view.data, (view.shape[0],), np.dtype(np.int64), on_device=on_device, owner=self)
        return memory if on_device else np.asarray(memory)

    def set_scores(self, slots: npt.ArrayLike, scores: npt.ArrayLike, *, context: Context | None = None) -> None:
        """Gives slots [n] int64 scores [n] int64, such as `scores` had; -1 and slots without a key are passed over.

        Raises:
          ValueError: what is no score; a table that evicts nothing. IndexError: what is no slot.
        """
        arrays = (_arrays.read(slots, "slots"), _arrays.read(scores, "scores"))
        _library.check(
            _abi.library().sok_dynamic_table_set_scores(pointer(context), self.handle, *map(_arrays.view, arrays))
        )

    def counts(self) -> DynamicTableCounts:
        """What has happened to the table since it was made."""
        held = _abi.DynamicTableCounts(ctypes.sizeof(_abi.DynamicTableCounts))
        _library.check(_abi.library().sok_dynamic_table_get_counts(self.handle, ctypes.byref(held)))
        return DynamicTableCounts(*(getattr(held, name) for name in DynamicTableCounts._fields))

    def clear(self, *, context: Context | None = None) -> None:
        """Erases all keys, and keeps the memory."""
        _library.check(_abi.library().sok_dynamic_table_clear(pointer(context), self.handle))

    def shrink(self, *, context: Context | None = None) -> int:
        """Gives memory back that no row uses, and returns how many bytes. Rows move to the lowest slots, and gradients
        of what was located before are refused. MemoryError: there is none for the new index; nothing has changed.
        """
        freed = ctypes.c_int64()
        _library.check(_abi.library().sok_dynamic_table_shrink(pointer(context), self.handle, ctypes.byref(freed)))
        self._bind()
        return freed.value

    def add_column(
        self, width: int, dtype: npt.DTypeLike = np.float32, initial: float = 0.0, *, context: Context | None = None
    ) -> int:
        """Adds `width` float32 or int64 numbers a slot, `initial` at first (0 for int64). Returns the column's number.

        Raises:
          ValueError: another dtype, no width. MemoryError.
        """
        number, code = ctypes.c_int32(), _arrays.number_of(np.dtype(dtype))
        arguments = (self.handle, -1 if code is None else code, width, initial, ctypes.byref(number))
        _library.check(_abi.library().sok_dynamic_table_add_column(pointer(context), *arguments))
        return number.value

    def column(self, number: int) -> Any:
        """[num_slots, width] of a column, without a copy: 0 is the rows. A NumPy array, or on a GPU an object with
        `__cuda_array_interface__`. It may be used as long as the table is open; where the table has grown, ask again.
        """
        view = _abi.library().sok_dynamic_table_column(self.handle, number)
        if view.rank == 0:
            raise IndexError(f"{self.name}: there is no column {number}")
        dtype = self.dtype if number == 0 else np.dtype(np.int64 if view.dtype == _abi.INT64 else np.float32)
        shape, on_device = (view.shape[0], view.shape[1]), self.device is not None
        memory = Memory(view.data, shape, dtype, on_device=on_device, owner=self)
        return memory if on_device else np.asarray(memory)

    def read(self, keys: npt.ArrayLike, *, context: Context | None = None) -> Array:
        """[n, dimension] of keys [n] int32 or int64; the initial rows of keys that it does not hold."""
        array = _arrays.read(keys, "keys")
        rows = empty(context, (0 if array is None else array.shape[0], self.dimension), self.dtype)
        views = (_arrays.view(array), _arrays.view(rows))
        _library.check(_abi.library().sok_dynamic_table_read(pointer(context), self.handle, *views))
        return rows

    def find_or_insert(self, keys: npt.ArrayLike, *, context: Context | None = None) -> Array:
        """Rows [n, dimension] of keys, which it holds afterwards.

        Raises:
          MemoryError: the new keys do not fit; it holds what it held.
        """
        array, dtype = _arrays.read(keys, "keys"), self.dtype
        rows = empty(context, (0 if array is None else array.shape[0], self.column(0).shape[1]), dtype)
        views = map(_arrays.view, (array, rows, None, None))
        _library.check(_abi.library().sok_dynamic_table_read_and_evict(pointer(context), self.handle, *views, None))
        return rows

    def read_and_evict(self, keys: npt.ArrayLike, *, context: Context | None = None) -> tuple[Array, Array, Array]:
        """(rows [n, dimension] of keys, which it holds afterwards; the keys [m] int64 that it gave up for them; their
        rows [m, dimension], as they were).

        Raises:
          MemoryError: the new keys do not fit; it holds what it held.
        """
        array, dtype = _arrays.read(keys, "keys"), self.dtype
        shape = (0 if array is None else array.shape[0], self.column(0).shape[1])
        found = (empty(context, shape, dtype), empty(context, shape[:1], np.int64), empty(context, shape, dtype))
        count = ctypes.c_int64()
        views = map(_arrays.view, (array, *found))
        _library.check(
            _abi.library().sok_dynamic_table_read_and_evict(pointer(context), self.handle, *views, ctypes.byref(count))
        )
        return found[0], found[1][: count.value], found[2][: count.value]

    def close(self) -> None:
        """Gives its memory back. Calling it again does nothing."""
        handle, self.handle, self.index.handle = self.handle, ctypes.c_void_p(), ctypes.c_void_p()
        _library.check(_abi.library().sok_dynamic_table_destroy(handle))

    def __enter__(self) -> DynamicTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def prefetch(tables: Sequence[DynamicTable], keys: Sequence[npt.ArrayLike], *, context: Context | None = None) -> None:
    """Brings rows of keys [any] int32 or int64, an array a table, to the memory of the device before a step asks for
    them; does nothing where all rows are in one. It goes on beside what is enqueued on the context's stream
    (sok_dynamic_table_prefetch).
    """
    arrays = [_arrays.read(each, "keys") for each in keys]
    handles = (ctypes.c_void_p * len(tables))(*(table.handle for table in tables))
    views = (_abi.Tensor * len(arrays))(*map(_arrays.view, arrays))
    _library.check(_abi.library().sok_dynamic_table_prefetch(pointer(context), len(arrays), handles, views))
