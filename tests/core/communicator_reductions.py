# SPDX-License-Identifier: Apache-2.0
"""As communicator_worker.py, for checks of sok_all_reduce."""

import ctypes
from typing import Any

import numpy as np
from communicator_worker import CHECK, NUM_RANKS, RANK, OnDevice, Stream, fails, fails_in_a_capture, join, nccl, send

from sparse_operation_kit.core import _abi, _library


def reductions():
    """Arrays of each dtype and size, in place, between exchanges; before the ranks are connected for them, an error."""
    communicator, stream = join(), Stream()
    rng = np.random.default_rng(11)  # the same on all ranks
    reduce = communicator.all_reduce
    ones = OnDevice(np.ones(3))
    fails(lambda: reduce([ones], "sum", context=stream.context), "prepare_all_reduce", kind=RuntimeError)
    communicator.prepare_all_reduce()
    before = nccl.fake_nccl_groups()
    communicator.prepare_all_reduce()
    assert nccl.fake_nccl_groups() == before
    ways: dict[str, Any] = {"sum": np.sum, "min": np.min, "max": np.max, "average": np.mean}
    results, kept = [], []
    for number in range(24):
        dtype = (np.float32, np.float64, np.int32, np.int64)[number % 4]
        way = list(ways)[number % (4 if number % 4 < 2 else 3)]  # integers have no mean
        sizes = [1, 0, 5, 30_000][: 1 + number % 4]
        whole = [rng.integers(-1000, 1000, (NUM_RANKS, n)).astype(dtype) for n in sizes]
        mine = [np.array(of[RANK]) for of in whole]
        before = nccl.fake_nccl_groups()
        reduce([OnDevice(array) for array in mine], way, context=stream.context)
        assert nccl.fake_nccl_groups() == before + 1  # all arrays of a call together
        results.append((mine, [ways[way](of, axis=0).astype(dtype) for of in whole], number))
        kept.append(send(communicator, stream, rng.integers(0, 50, (NUM_RANKS, NUM_RANKS)), salt=number))
    stream.synchronize()
    for mine, expected, number in results:
        for array, right in zip(mine, expected, strict=True):
            np.testing.assert_allclose(array, right, rtol=1e-6, err_msg=str(number))
    communicator.close()


def wrong_reductions():
    """What is wrong is an error before anything is enqueued, and the ranks go on."""
    communicator, stream = join(), Stream()
    communicator.prepare_all_reduce()
    before = nccl.fake_nccl_transfers()

    def reduce(arrays, way="sum"):
        communicator.all_reduce([OnDevice(array) for array in arrays], way, context=stream.context)

    ones, integers = np.ones(4, np.float32), np.ones(4, np.int32)
    fails(lambda: reduce([ones], "product"), "product", "average", kind=ValueError)
    fails(lambda: reduce([integers], "average"), "floating point", "int32", kind=ValueError)
    fails(lambda: reduce([ones, integers]), "send[1]", "float32", kind=ValueError)
    call, views = _abi.library().sok_all_reduce, _abi.Tensor * 1
    context = ctypes.byref(stream.context.struct)

    def raw(send, receive, reduction=0, number=1):
        _library.check(call(context, communicator.handle, reduction, number, send, receive))

    def view(address, n):
        return views(_abi.Tensor(address, _abi.FLOAT32, 1, (n, 0)))

    address = ones.ctypes.data
    fails(lambda: raw(view(address, 4), view(address, 3)), "4 elements", "3", kind=ValueError)
    fails(lambda: raw(view(address, 2), view(address + 4, 2)), "overlap", kind=ValueError)
    fails(lambda: raw(view(address, 4), view(address, 4), reduction=9), "reduction is 9", kind=ValueError)
    fails(lambda: raw(None, None), "NULL", kind=ValueError)
    fails(lambda: raw(None, None, number=-1), "num_arrays is -1", kind=ValueError)
    fails_in_a_capture(lambda: reduce([ones]), stream)
    reduce([])
    assert nccl.fake_nccl_transfers() == before
    reduce([ones], "sum")
    stream.synchronize()
    assert ones.tolist() == [NUM_RANKS] * 4
    communicator.close()


if __name__ == "__main__":
    globals()[CHECK]()
    print(f"passed {CHECK} on rank {RANK}", flush=True)
