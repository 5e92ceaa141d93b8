# SPDX-License-Identifier: Apache-2.0
"""The exchange between GPUs over NCCL (core/include/sok/communicator.h)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from sparse_operation_kit.core import _abi, _arrays, _library
from sparse_operation_kit.core.context import Context

PATH_VARIABLE = "SOK_NCCL_LIBRARY"
"""Environment variable: the path of the libnccl.so.2 to use."""

REDUCTIONS = {
    "sum": _abi.REDUCE_SUM,
    "average": _abi.REDUCE_MEAN,
    "min": _abi.REDUCE_MIN,
    "max": _abi.REDUCE_MAX,
}
"""Those of all_reduce, and their numbers in the C interface."""

_NAME = "libnccl.so.2"


@dataclasses.dataclass(frozen=True)
class NcclProperties:
    """Which NCCL is used: its version, 10000 * major + 100 * minor + patch, and the file it was loaded from."""

    version: int
    path: str

    @property
    def version_text(self) -> str:
        """As "2.28.3"."""
        major, rest = divmod(self.version, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"


def packaged_nccl() -> pathlib.Path | None:
    """The NCCL that a Python package of NVIDIA's brought (nvidia-nccl-cu12, nvidia-nccl-cu13), if there is one."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = pathlib.Path(folder) / "nccl" / "lib" / _NAME
        if file.is_file():
            return file
    return None


@functools.cache
def _load_nccl() -> None:
    """Puts NCCL into the process when only a Python package has it: the core finds what is loaded by its name."""
    if os.environ.get(PATH_VARIABLE):
        return
    try:
        ctypes.CDLL(_NAME)  # what is in the process already, or what the dynamic linker finds
    except OSError:
        file = packaged_nccl()
        if file is not None:
            ctypes.CDLL(str(file))


def nccl_properties() -> NcclProperties:
    """Opens NCCL at the first call. Starts no CUDA.

    Raises:
      OSError: there is none, it is too old or lacks a function; the message says what to do.
      NotImplementedError: the core was built without CUDA.
    """
    if _abi.library().sok_built_with_cuda():
        _load_nccl()
    struct = _abi.NcclProperties(struct_size=ctypes.sizeof(_abi.NcclProperties))
    _library.check(_abi.library().sok_nccl_get_properties(ctypes.byref(struct)))
    return NcclProperties(struct.version, os.fsdecode(struct.path))


def device_uuid(cuda_device: int) -> str:
    """A text that this GPU has and no other: ranks with equal ones share a GPU, which NCCL refuses.

    Raises:
      ValueError: no such device. NotImplementedError: built without CUDA. OSError: the driver does not answer.
    """
    text = ctypes.create_string_buffer(64)
    _library.check(_abi.library().sok_device_get_uuid(_abi.Device(_abi.CUDA, cuda_device), text))
    return text.value.decode()


def _int64s(array: npt.NDArray[np.int64]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))


@final
class Communicator:
    """This rank's end of a communicator: one process a rank, with a GPU of its own.

    Args:
      device: this rank's CUDA device.
      id: what `make_id()` gave one of the ranks.
      num_ranks, rank: this process' place.
      timeout: seconds to wait for the other ranks; 0: the core's default.

    Made on all ranks together: it returns when all are connected. While it does, no other communicator may be made or
    used on the device. Where a peer dies or the network fails, pending exchanges end and every method raises OSError
    with the reason from then on. A process may end without closing it; a child of fork() cannot use it.

    Raises:
      OSError: NCCL is not there or failed, or ranks did not come in time.
      ValueError: a rank outside [0, num_ranks), no such device, bytes that are no id or that of another NCCL version.
      NotImplementedError: the core was built without CUDA.
    """

    def __init__(self, device: int, id: bytes, num_ranks: int, rank: int, timeout: float = 0) -> None:
        self._handle = ctypes.c_void_p()
        if len(id) != _abi.COMMUNICATOR_ID_SIZE:
            raise ValueError(f"id has {len(id)} bytes, must have {_abi.COMMUNICATOR_ID_SIZE}")
        nccl_properties()
        self.device = device
        self.num_ranks = num_ranks
        self.rank = rank
        self._counts = ctypes.c_int64 * num_ranks
        create = _abi.library().sok_communicator_create
        struct = _abi.CommunicatorId.from_buffer_copy(id)
        handle = ctypes.byref(self._handle)
        _library.check(create(_abi.Device(_abi.CUDA, device), ctypes.byref(struct), num_ranks, rank, timeout, handle))

    @staticmethod
    def make_id() -> bytes:
        """The id of a new communicator: one rank makes it and gives it to the others. Raises as nccl_properties()."""
        nccl_properties()
        struct = _abi.CommunicatorId()
        _library.check(_abi.library().sok_communicator_id_create(ctypes.byref(struct)))
        return bytes(struct)

    @property
    def handle(self) -> int:
        """The address of the sok_communicator, for ops of the frontends; 0 once it was closed."""
        return self._handle.value or 0

    def all_to_all(
        self,
        send: _arrays.Array,
        send_counts: Sequence[int],
        receive: _arrays.Array,
        receive_counts: Sequence[int],
        *,
        context: Context,
    ) -> None:
        """Sends send_counts[r] consecutive elements of `send` to each rank r; what comes goes into `receive`, by rank.

        Args:
          send: [n] on the device. receive: [m], changed in place, of the same dtype, apart from `send`.
          send_counts, receive_counts: [num_ranks] elements.
          context: of the communicator's device; the exchange is enqueued on its stream and nothing waits.
        """
        sent = _arrays.read(send, "send")
        received = _arrays.written(receive, "receive")
        self._enqueue(context.struct, _arrays.view(sent), send_counts, _arrays.view(received), receive_counts)

    def swap_counts(
        self,
        counts: _arrays.Array,
        *,
        context: Context,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sends a row of numbers to each rank and waits for what comes, and with it for the context's stream.

        Args:
          counts: [num_ranks, k] int64 on the device, of which row r goes to rank r. The last number of a row is not 0
            where this rank has failed; it is 1 whatever is given where the error record of the context is not empty.

        Returns:
          (sent, received), [num_ranks, k] each; row s of `received` came from rank s.
        """
        array = _arrays.read(counts, "counts")
        view = _arrays.view(array)
        sent, received = (np.zeros((self.num_ranks, view.shape[1]), np.int64) for _ in range(2))
        status = _abi.library().sok_swap_counts(
            ctypes.byref(context.struct), self._handle, view, _int64s(sent), _int64s(received)
        )
        _library.check(status)
        return sent, received

    def exchange(
        self,
        stream: int,
        send: int,
        send_counts: Sequence[int],
        receive: int,
        receive_counts: Sequence[int],
        item_size: int,
        errors: int | None = None,
    ) -> None:
        """all_to_all for callers with addresses: `item_size` (1, 2, 4 or 8) bytes an element; `errors`: the address of
        an error record, whose owner learns when the exchange is ended early.
        """
        context = _abi.Context(struct_size=ctypes.sizeof(_abi.Context), device=_abi.Device(_abi.CUDA, self.device))
        context.stream = stream
        context.errors = errors
        dtype = _DTYPES[item_size]
        sent = _abi.Tensor(send, dtype, 1, (sum(send_counts), 0))
        received = _abi.Tensor(receive, dtype, 1, (sum(receive_counts), 0))
        self._enqueue(context, sent, send_counts, received, receive_counts)

    def _enqueue(
        self,
        context: _abi.Context,
        send: _abi.Tensor,
        send_counts: Sequence[int],
        receive: _abi.Tensor,
        receive_counts: Sequence[int],
    ) -> None:
        # Lists of another length would be read past their ends.
        if len(send_counts) != self.num_ranks or len(receive_counts) != self.num_ranks:
            raise ValueError(
                f"there are {len(send_counts)} send_counts and {len(receive_counts)} receive_counts, must be "
                f"{self.num_ranks} of each"
            )
        status = _abi.library().sok_all_to_all(
            ctypes.byref(context),
            self._handle,
            send,
            self._counts(*send_counts),
            receive,
            self._counts(*receive_counts),
        )
        _library.check(status)

    def prepare_all_reduce(self) -> None:
        """Connects the ranks for all_reduce, on all of them together, under the conditions of the constructor; later
        calls do nothing. Waits. Raises OSError when the ranks did not come or the communicator has failed.
        """
        _library.check(_abi.library().sok_communicator_prepare_all_reduce(self._handle))

    def all_reduce(self, arrays: Sequence[_arrays.Array], reduction: str, *, context: Context) -> None:
        """Reduces arrays over the ranks in place, element by element; every rank gets the result.

        Args:
          arrays: [n_i] each on the device, all of one dtype; the same on all ranks.
          reduction: "sum", "average", "min" or "max".
          context: of the communicator's device; enqueued on its stream, and nothing waits.

        Raises:
          ValueError: an unknown reduction, arrays of several dtypes. RuntimeError: before prepare_all_reduce().
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"unknown reduction {reduction!r}: it must be one of {', '.join(REDUCTIONS)}")
        kept = [_arrays.written(array, "arrays") for array in arrays]
        views = (_abi.Tensor * len(kept))(*map(_arrays.view, kept))
        number = REDUCTIONS[reduction]
        call = _abi.library().sok_all_reduce
        _library.check(call(ctypes.byref(context.struct), self._handle, number, len(kept), views, views))

    def check(self) -> None:
        """Raises OSError with the reason once the communicator has failed. Does not wait."""
        _library.check(_abi.library().sok_communicator_check(self._handle))

    def abort(self) -> None:
        """Ends what is pending on this rank; the communicator has failed then."""
        _library.check(_abi.library().sok_communicator_abort(self._handle))

    def close(self) -> None:
        """Waits for what is pending and frees the communicator; on all ranks. Calling it again does nothing."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _library.check(_abi.library().sok_communicator_destroy(handle))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


_DTYPES = {1: _abi.UINT8, 2: _abi.FLOAT16, 4: _abi.INT32, 8: _abi.INT64}
