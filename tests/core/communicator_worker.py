# SPDX-License-Identifier: Apache-2.0
"""What test_communicator.py runs in a process of its own for each rank: `communicator_worker.py CHECK RANK NUM_RANKS`,
with the fakes of communicator_build.py in place of a GPU and of NCCL. TEST_FOLDER is shared by the ranks.
"""

import ctypes
import functools
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np

from sparse_operation_kit import core
from sparse_operation_kit.core import _abi, _library

CHECK, RANK, NUM_RANKS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
FOLDER = pathlib.Path(os.environ["TEST_FOLDER"])
fake = _library.load()
fake.fake_stream_create.restype = ctypes.c_void_p
for _name in ("fake_stream_synchronize", "fake_stream_capture", "fake_stream_sleep"):
    getattr(fake, _name).argtypes = [ctypes.c_void_p, ctypes.c_int][: 1 if _name.endswith("synchronize") else 2]
fake.fake_stream_sleep.argtypes = [ctypes.c_void_p, ctypes.c_double]
nccl = ctypes.CDLL(os.environ["SOK_NCCL_LIBRARY"])


class OnDevice:
    """A NumPy array that says it lies on a device, as those of the fake device do."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__array_interface__


class Record(ctypes.Structure):
    """The memory of a sok_error_record."""

    _fields_ = (
        ("taken", ctypes.c_uint32),
        ("ended", ctypes.c_int32),
        ("fault", ctypes.c_int32),
        ("table", ctypes.c_int32),
        ("value", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("keeper", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    )


def shared_id():
    """The id that rank 0 made."""
    path = FOLDER / "id"
    if RANK == 0:
        (FOLDER / "id.new").write_bytes(core.Communicator.make_id())
        (FOLDER / "id.new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_bytes()


def join(**options):
    return core.Communicator(RANK, shared_id(), NUM_RANKS, RANK, **options)


class Stream:
    def __init__(self):
        self.address = fake.fake_stream_create()
        self.context = core.Context(device=RANK, stream=self.address, empty=np.empty)

    def synchronize(self):
        fake.fake_stream_synchronize(self.address)


def send(communicator, stream, counts, dtype=np.int64, salt=0):
    """Sends counts[r, d] elements from each rank r to each rank d; returns what came and what should have."""
    counts = np.asarray(counts)
    value = np.random.default_rng(salt).integers(0, 256, int(counts.sum())).astype(dtype)
    pieces = np.split(value, np.cumsum(counts.ravel())[:-1])
    of = [[pieces[r * NUM_RANKS + d] for d in range(NUM_RANKS)] for r in range(NUM_RANKS)]
    sent = np.concatenate(of[RANK])
    received = np.zeros(int(counts[:, RANK].sum()), dtype)
    arguments = (OnDevice(sent), counts[RANK].tolist(), OnDevice(received), counts[:, RANK].tolist())
    communicator.all_to_all(*arguments, context=stream.context)
    return received, np.concatenate([of[r][RANK] for r in range(NUM_RANKS)]), sent


def fails(call, *words, kind=OSError):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
        return
    raise AssertionError(f"no {kind.__name__}: {words}")


def fails_in_a_capture(call, stream):
    """While the stream is being captured; afterwards it is not."""
    fake.fake_stream_capture(stream.address, 1)
    fails(call, "captured in a CUDA graph", kind=RuntimeError)
    fake.fake_stream_capture(stream.address, 0)


# --- checks ----------------------------------------------------------------------------------------------------------


def exchanges():
    """Even, uneven and empty counts of every dtype, over two streams, each result awaited late."""
    communicator, streams = join(), [Stream(), Stream()]
    rng = np.random.default_rng(7)
    results = []
    for number in range(60):
        high = (1, 5, 3000, 40_000)[number % 4]
        counts = rng.integers(0, high, (NUM_RANKS, NUM_RANKS)) * rng.integers(0, 2, (NUM_RANKS, NUM_RANKS))
        dtype = (np.uint8, np.float16, np.float32, np.int32, np.int64, np.float64)[number % 6]
        results.append(send(communicator, streams[number % 2], counts, dtype, number))
    for stream in streams:
        stream.synchronize()
    for number, (received, expected, _) in enumerate(results):
        assert received.tobytes() == expected.tobytes(), number
    communicator.check()
    communicator.close()
    communicator.close()
    assert nccl.fake_nccl_destroys() == 1 and nccl.fake_nccl_aborts() == 0


def raw_exchange():
    """The binding by addresses, which the frontends use."""
    communicator, stream = join(), Stream()
    for item in (1, 2, 4, 8):
        sent = np.full(NUM_RANKS * item, RANK + 1, np.uint8)
        received = np.zeros(NUM_RANKS * item, np.uint8)
        ones = [1] * NUM_RANKS
        communicator.exchange(stream.address, sent.ctypes.data, ones, received.ctypes.data, ones, item)
        stream.synchronize()
        assert received.tolist() == [r + 1 for r in range(NUM_RANKS) for _ in range(item)]
    communicator.close()


def nothing_to_send():
    """With no elements for any peer NCCL is not called, and a copy to oneself is."""
    communicator, stream = join(), Stream()
    before = nccl.fake_nccl_groups()
    received, expected, _ = send(communicator, stream, np.diag(np.arange(NUM_RANKS) + 1))
    stream.synchronize()
    assert received.tolist() == expected.tolist() and len(received) == RANK + 1
    send(communicator, stream, np.zeros((NUM_RANKS, NUM_RANKS), int))
    assert nccl.fake_nccl_groups() == before
    counts = np.zeros((NUM_RANKS, NUM_RANKS), int)
    counts[0, 1] = 3
    transfers = nccl.fake_nccl_transfers()
    kept = send(communicator, stream, counts)
    assert nccl.fake_nccl_transfers() - transfers == (1 if RANK < 2 else 0)
    stream.synchronize()
    assert kept[0].tolist() == kept[1].tolist()
    communicator.close()


def large_parts():
    """A rank's own part goes through NCCL when it is large, and only then when something goes to a peer as well."""
    communicator, stream = join(), Stream()
    for diagonal, other, transfers in ((2**19, 5, 2 * NUM_RANKS), (2**19 - 1, 5, 2 * NUM_RANKS - 2), (2**19, 0, 0)):
        counts = np.full((NUM_RANKS, NUM_RANKS), other)
        np.fill_diagonal(counts, diagonal)
        before = nccl.fake_nccl_transfers()
        received, expected, sent = send(communicator, stream, counts)
        assert nccl.fake_nccl_transfers() - before == transfers
        stream.synchronize()
        assert received.tobytes() == expected.tobytes()
        del sent
    communicator.close()


def wrong_arguments():
    communicator, stream = join(), Stream()
    right = [np.zeros(4), [2, 2], np.zeros(4), [2, 2]]
    wrong = {
        "send_counts[1] is -1": (1, [5, -1]),
        "sum of send_counts is 5": (1, [3, 2]),
        "sum of send_counts does": (1, [2**63 - 1, 2**63 - 1]),
        "sum of receive_counts is 3": (3, [3, 0]),
        "send is int64, receive is float64": (0, np.zeros(4, np.int64)),
        "send has rank 2": (0, np.zeros((2, 2))),
        "must be 2 of each": (1, [4]),
    }
    for message, (position, value) in wrong.items():
        arguments = list(right)
        arguments[position] = value
        arguments = [OnDevice(a) if isinstance(a, np.ndarray) else a for a in arguments]
        call = functools.partial(communicator.all_to_all, *arguments, context=stream.context)
        fails(call, message, kind=ValueError)
    halves = np.zeros(6)
    pair = OnDevice(np.zeros(4)), [2, 2], OnDevice(np.zeros(4)), [2, 2]
    overlapping = OnDevice(halves[:4]), [2, 2], OnDevice(halves[2:]), [2, 2]
    elsewhere = core.Context(device=5, stream=stream.address, empty=np.empty)
    for arguments, context, message in (
        (overlapping, stream.context, "overlap"),
        (pair, elsewhere, "CUDA device 5"),
        (pair, core.Context(), "the CPU"),
    ):
        call = functools.partial(communicator.all_to_all, *arguments, context=context)
        fails(call, message, kind=ValueError)
    fails_in_a_capture(lambda: send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int)), stream)
    received, expected, _ = send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
    stream.synchronize()
    assert received.tolist() == expected.tolist()
    communicator.close()


def dead_peer():
    """The last rank is killed; the others get an error that names it, their records are set, NCCL was aborted."""
    communicator, stream = join(), Stream()
    ones = np.ones((NUM_RANKS, NUM_RANKS), int)
    send(communicator, stream, ones)
    stream.synchronize()
    if NUM_RANKS - 1 == RANK:
        (FOLDER / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    record = Record()
    stream.context.struct.errors = ctypes.addressof(record)
    start = time.monotonic()
    kept = send(communicator, stream, ones)
    stream.synchronize()  # returns since the exchange was ended
    assert time.monotonic() - start < 60
    del kept
    while nccl.fake_nccl_aborts() == 0:
        time.sleep(0.01)
    pid = (FOLDER / "pid").read_text()
    for call in (communicator.check, lambda: send(communicator, stream, ones)):
        fails(call, f"rank {NUM_RANKS - 1} (process {pid})", "of this host ended")
    check = _abi.library().sok_error_record_check
    assert check(ctypes.addressof(record), *[0, None][: len(check.argtypes) - 1]) == _library.UNAVAILABLE
    communicator.abort()
    communicator.close()
    assert nccl.fake_nccl_aborts() == 1 and nccl.fake_nccl_destroys() == 0


def late_peer():
    """A rank that comes after what the watch is patient for, and a stream that is busy as long, are no errors."""
    communicator, stream = join(), Stream()
    if RANK == 0:
        time.sleep(6)
    else:
        fake.fake_stream_sleep(stream.address, 5.0)
    results = [send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int), salt=s) for s in range(3)]
    stream.synchronize()
    communicator.check()
    for received, expected, _ in results:
        assert received.tolist() == expected.tolist()
    communicator.close()


def time_limit():
    """Under SOK_NCCL_TIMEOUT=5 a rank that lives but never comes is an error."""
    communicator, stream = join(), Stream()
    done = FOLDER / "done"
    if RANK == 0:
        while not done.exists():
            time.sleep(0.01)
        os._exit(0)
    kept = send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
    stream.synchronize()
    fails(communicator.check, "pending for", "SOK_NCCL_TIMEOUT")
    done.touch()
    communicator.close()
    del kept


def async_error():
    """NCCL reports that the network failed."""
    communicator, stream = join(), Stream()
    done = FOLDER / "done"
    if RANK == 0:
        while not done.exists():
            time.sleep(0.01)
        os._exit(0)
    nccl.fake_nccl_set_async_error(2)
    kept = send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
    stream.synchronize()
    fails(communicator.check, "NCCL reports unhandled system error (2): the fake says so")
    done.touch()
    communicator.close()
    del kept


def failing_call():
    """An exchange that NCCL refuses: the call itself raises, and so does every later one."""
    communicator, stream = join(), Stream()
    nccl.fake_nccl_fail_next_group(2)
    ones = np.ones((NUM_RANKS, NUM_RANKS), int)
    for _ in range(2):
        fails(lambda: send(communicator, stream, ones), "ncclGroupEnd: unhandled system error")
    assert nccl.fake_nccl_aborts() == 1
    communicator.close()


def call_that_hangs():
    """A call that NCCL does not let go is let go when its peer has died."""
    communicator, stream = join(), Stream()
    ones = np.ones((NUM_RANKS, NUM_RANKS), int)
    if RANK == 0:
        time.sleep(1)
        os._exit(0)
    kept = send(communicator, stream, ones)
    nccl.fake_nccl_hang_next_group()
    fails(lambda: send(communicator, stream, ones), "of this host ended")
    stream.synchronize()
    communicator.close()
    del kept


def first_call_that_hangs():
    """The same where nothing else of the communicator is pending."""
    communicator, stream = join(), Stream()
    if RANK == 0:
        time.sleep(1)
        os._exit(0)
    nccl.fake_nccl_hang_next_group()
    fails(lambda: send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int)), "of this host ended")
    communicator.close()


def abort():
    """From another thread, while the first waits for the exchange; the peer gets its error by this process' end."""
    communicator, stream = join(), Stream()
    if RANK == 0:
        kept = send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
        thread = threading.Timer(0.2, communicator.abort)
        thread.start()
        stream.synchronize()
        thread.join()
        fails(communicator.check, "this rank aborted it")
        del kept
    communicator.close()


def broken_device():
    """A device that fails while an exchange is pending makes the communicator fail, with the device's message."""
    communicator, stream = join(), Stream()
    kept = send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
    fake.fake_stream_sleep(stream.address, 3.0)
    kept = kept, send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
    fake.fake_device_break()
    start = time.monotonic()
    while time.monotonic() - start < 30:
        try:
            communicator.check()
        except OSError as error:
            assert "illegal memory access" in str(error)
            break
        time.sleep(0.05)
    else:
        raise AssertionError("no error")
    communicator.close()
    del kept


def fork():
    """The child may not use the communicator, and its end leaves the parent's alone."""
    communicator, stream = join(), Stream()
    ones = np.ones((NUM_RANKS, NUM_RANKS), int)
    kept = send(communicator, stream, ones)
    stream.synchronize()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            communicator.check()
        except RuntimeError as error:
            status = 0 if "fork()" in str(error) else 2
        communicator.close()
        sys.exit(status)
    assert os.waitpid(child, 0)[1] == 0
    received, expected, _ = send(communicator, stream, ones, salt=3)
    stream.synchronize()
    assert received.tolist() == expected.tolist()
    communicator.close()
    del kept


def exit_without_close():
    """With an exchange that never ends, and without: the process ends at once and with its own status."""
    communicator, stream = join(), Stream()
    kept = send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
    stream.synchronize()
    if RANK == 0:
        kept = kept, send(communicator, stream, np.ones((NUM_RANKS, NUM_RANKS), int))
    globals()["alive"] = communicator, kept
    (FOLDER / f"ended{RANK}").write_text(str(time.time()))
    sys.exit(7)


def many_threads():
    """Threads share a communicator: their exchanges take turns. All have the same counts, so any order will do."""
    communicator, streams = join(), [Stream() for _ in range(4)]
    ones = np.ones((NUM_RANKS, NUM_RANKS), int)
    bad = []

    def run(stream):
        for _ in range(50):
            received, expected, _ = send(communicator, stream, ones)
            stream.synchronize()
            if received.tolist() != expected.tolist():
                bad.append(received)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    communicator.close()


if __name__ == "__main__":
    globals()[CHECK]()
    print(f"passed {CHECK} on rank {RANK}", flush=True)
