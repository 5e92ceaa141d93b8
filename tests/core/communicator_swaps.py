# SPDX-License-Identifier: Apache-2.0
"""As communicator_worker.py, for checks of sok_swap_counts."""

import ctypes
import functools
import os
import signal
import time

import numpy as np
from communicator_worker import (
    CHECK,
    FOLDER,
    NUM_RANKS,
    RANK,
    OnDevice,
    Record,
    Stream,
    fails,
    fails_in_a_capture,
    fake,
    join,
    send,
)

from sparse_operation_kit.core import _abi, _library


def zeros(k=1):
    return OnDevice(np.zeros((NUM_RANKS, k), np.int64))


def swap_counts():
    """More numbers than before and fewer, between exchanges of other kinds."""
    communicator, stream = join(), Stream()
    rng = np.random.default_rng(3)  # the same on all ranks
    for number in range(40):
        columns = int(rng.integers(1, 9)) if number % 10 else (1500 if number % 20 else 9000) + number
        whole = rng.integers(-2, 2**40, (NUM_RANKS, NUM_RANKS, columns))
        counts = OnDevice(whole[RANK].copy())
        kept = send(communicator, stream, rng.integers(0, 50, (NUM_RANKS, NUM_RANKS)), salt=number)
        sent, received = communicator.swap_counts(counts, context=stream.context)
        assert np.array_equal(sent, whole[RANK]) and np.array_equal(received, whole[:, RANK]), number
        assert kept[0].tolist() == kept[1].tolist()  # the stream has been waited for
    communicator.close()


def swap_of_a_failed_rank():
    """What a rank's record holds goes into the last column alone, of counts that need several messages too."""
    communicator, stream = join(), Stream()
    record = Record(taken=1 if RANK == 0 else 0)
    stream.context.struct.errors = ctypes.addressof(record)
    for k in (3, 5000):
        counts = np.full((NUM_RANKS, k), 5)
        counts[:, -1] = 0
        sent, received = communicator.swap_counts(OnDevice(counts), context=stream.context)
        assert (sent[:, :-1] == 5).all() and sent[:, -1].tolist() == [int(RANK == 0)] * NUM_RANKS
        assert (received[:, :-1] == 5).all() and received[:, -1].tolist() == [int(r == 0) for r in range(NUM_RANKS)]
    record.taken = 0
    counts = np.full((NUM_RANKS, 3), [0, 0, int(RANK == 1)])
    sent, received = communicator.swap_counts(OnDevice(counts), context=stream.context)
    assert sent.tolist() == counts.tolist()
    assert received.tolist() == [[0, 0, int(r == 1)] for r in range(NUM_RANKS)]
    communicator.close()


def swap_errors():
    """A rank that has failed, and one whose record says so, fill the records of the others and leave their own."""
    communicator, stream = join(), Stream()
    record, check = Record(), _abi.library().sok_error_record_check
    stream.context.struct.errors = ctypes.addressof(record)

    def share(failed=0):
        arguments = ctypes.byref(stream.context.struct), communicator.handle, failed
        _library.check(_abi.library().sok_share_errors(*arguments))

    for _ in range(200):
        share()
    stream.synchronize()
    _library.check(check(ctypes.byref(record)))
    for culprit in range(NUM_RANKS):
        share(int(culprit == RANK))
        stream.synchronize()
        if culprit == RANK:
            _library.check(check(ctypes.byref(record)))
        else:
            fails(lambda: _library.check(check(ctypes.byref(record))), f"rank {culprit} has failed", kind=RuntimeError)
        if culprit == RANK:
            record.value, record.limit, record.fault, record.taken = 12, 10, 1, 1
        share()
        stream.synchronize()
        wanted = (IndexError, "key 12") if culprit == RANK else (RuntimeError, f"rank {culprit} has failed")
        fails(lambda: _library.check(check(ctypes.byref(record))), wanted[1], kind=wanted[0])
    record.ended = 8  # an exchange was, on all of them: each keeps that reason, though all say that they have failed
    share()
    stream.synchronize()
    assert record.taken == 0
    stream.context.struct.errors = None
    fails(share, "context.errors", kind=ValueError)
    communicator.close()


def swap_of_a_dead_peer():
    """The last rank is killed while the others wait in a swap: they raise what names it, and later calls do so too."""
    communicator, stream = join(), Stream()
    communicator.swap_counts(zeros(), context=stream.context)
    if NUM_RANKS - 1 == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        fails(lambda: communicator.swap_counts(zeros(), context=stream.context), f"rank {NUM_RANKS - 1} (process ")
    communicator.close()


def swap_behind_what_never_ends():
    """Under SOK_NCCL_TIMEOUT=5 a swap whose peer never comes raises, and so do later ones, although its stream does not
    come to an end, for which the fake's abort waits.
    """
    communicator, stream = join(), Stream()
    done = FOLDER / "done"
    if RANK == 0:
        while not done.exists():
            time.sleep(0.01)
        os._exit(0)
    fake.fake_stream_sleep(stream.address, 60.0)
    start = time.monotonic()
    counts = zeros()  # kept: the stream reads it, should this process live longer than it sleeps
    fails(lambda: communicator.swap_counts(counts, context=stream.context), "pending for", "SOK_NCCL_TIMEOUT")
    done.touch()
    fails(lambda: communicator.swap_counts(counts, context=stream.context), "pending for")
    assert time.monotonic() - start < 30, "it waited for the stream"
    print(f"passed {CHECK} on rank {RANK}", flush=True)
    os._exit(0)  # the fake's stream is a thread that is still asleep


def wrong_swaps():
    communicator, stream = join(), Stream()
    wrong = {
        "counts has 0 columns": zeros(0),
        "counts has 1048577 columns": zeros(2**20 + 1),
        "counts is int32, must be int64": OnDevice(np.zeros((NUM_RANKS, 2), np.int32)),
        "counts has shape [3, 1]": OnDevice(np.zeros((3, 1), np.int64)),
        "counts has rank 1": OnDevice(np.zeros(NUM_RANKS, np.int64)),
    }
    for message, counts in wrong.items():
        fails(functools.partial(communicator.swap_counts, counts, context=stream.context), message, kind=ValueError)
    fails_in_a_capture(lambda: communicator.swap_counts(zeros(), context=stream.context), stream)
    communicator.swap_counts(zeros(), context=stream.context)
    communicator.close()


if __name__ == "__main__":
    globals()[CHECK]()
    print(f"passed {CHECK} on rank {RANK}", flush=True)
