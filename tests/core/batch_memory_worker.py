# SPDX-License-Identifier: Apache-2.0
"""What test_batch_memory.py runs, with the fake device of communicator_build.py in place of a GPU, whose memory is the
host's."""

import ctypes
import sys
import threading
import time

import numpy as np

from sparse_operation_kit.core import _abi, _library

fake = _library.load()
fake.fake_stream_create.restype = ctypes.c_void_p
fake.fake_stream_synchronize.argtypes = [ctypes.c_void_p]
fake.fake_stream_sleep.argtypes = [ctypes.c_void_p, ctypes.c_double]


class Memory:
    def __init__(self):
        self.handle = ctypes.c_void_p()
        create = _abi.library().sok_batch_memory_create
        _library.check(create(_abi.Device(_abi.CUDA, 0), ctypes.byref(self.handle)))

    def fill(self, array):
        data = ctypes.c_void_p()
        fill = _abi.library().sok_batch_memory_fill
        _library.check(fill(self.handle, array.ctypes.data, array.nbytes, ctypes.byref(data)))
        return data.value

    def release(self, data, stream):
        _library.check(_abi.library().sok_batch_memory_release(self.handle, data, stream))

    def close(self):
        _library.check(_abi.library().sok_batch_memory_destroy(self.handle))


def contents(data, like):
    return np.frombuffer((ctypes.c_char * like.nbytes).from_address(data), like.dtype)


def fails(call, words):
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
        return
    raise AssertionError(words)


def copies():
    """What was copied is there when the call returns; a piece that is free is used again, unless it is too large."""
    memory, stream = Memory(), fake.fake_stream_create()
    array = np.arange(1000, dtype=np.int64)
    first, kept = memory.fill(array), array.copy()
    array[:] = -1
    assert np.array_equal(contents(first, kept), kept)
    second = memory.fill(array[:900])
    assert second != first
    memory.release(first, stream)
    fake.fake_stream_synchronize(stream)
    assert memory.fill(np.zeros(100)) != first  # it has more than twice of that
    assert memory.fill(kept[:600]) == first and np.array_equal(contents(first, kept[:600]), kept[:600])
    fails(lambda: memory.release(first + 8, stream), "given out")
    memory.release(second, stream)
    fails(lambda: memory.release(second, stream), "given out")
    fails(lambda: memory.fill(kept[:0]), "bytes is 0")


def pending():
    """While work may use a piece others are taken; of many that are pending the oldest, when that work is done."""
    memory, stream = Memory(), fake.fake_stream_create()
    array = np.ones(50)
    fake.fake_stream_sleep(stream, 1.0)
    begin = time.monotonic()
    pieces = [memory.fill(array) for _ in range(4)]
    for piece in pieces:
        memory.release(piece, stream)
    fifth = memory.fill(2 * array)  # four are pending: it is the first of them
    assert fifth == pieces[0] and time.monotonic() - begin >= 1.0
    assert np.array_equal(contents(fifth, array), 2 * array)
    memory.release(fifth, stream)
    memory.close()  # waits for what uses them


def threads():
    """Each has its own batches, of several sizes."""
    memory, wrong = Memory(), []

    def run(number):
        generator, stream = np.random.default_rng(number), fake.fake_stream_create()
        for _ in range(200):
            array = generator.integers(0, 2**60, int(generator.integers(1, 3000)))
            data = memory.fill(array)
            if not np.array_equal(contents(data, array), array):
                wrong.append(number)
            memory.release(data, stream)
        fake.fake_stream_synchronize(stream)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    memory.close()


if __name__ == "__main__":
    for check in (copies, pending, threads):
        check()
        print(f"passed {check.__name__}", flush=True)
    sys.exit(0)
