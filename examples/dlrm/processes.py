# SPDX-License-Identifier: Apache-2.0
"""Reads on several processes: each reads its share of the batches into memory that all share, which a GPU copies from.

Processes of their own, and not those of `multiprocessing`: those would import the trainer, and its framework, again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from .pinned import pinned
from .reader import Reader
from .shared_batch import Message, Task, unpack

_SLOTS = 2
"""Batches of a process that lie ready, or are being used."""

_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""For glibc's malloc: arrays of a batch use the memory of the one before, in place of new pages of the system's."""

_ROOT = Path(__file__).resolve().parents[2]

B = TypeVar("B")


class ReadingProcesses(Generic[B]):
    """Iterates once over the batches of a reader, in order. A batch's arrays are good until the next one is asked for.

    gpu: the number of the GPU that they are copied to, so that the driver is told to keep their memory in place. Use it
    in a `with` statement, which ends the processes.
    """

    def __init__(self, reader: Reader[Any, B], count: int, gpu: int | None = None) -> None:
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        self._slot_bytes = -(-(reader.batch_bytes + (1 << 16)) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._workers: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()
        self._memories: list[memoryview] = []
        try:
            for number in range(count):
                self._start(reader.share(number, count), gpu)
        except BaseException:
            self.close()
            raise

    def _start(self, reader: Reader[Any, B], gpu: int | None) -> None:
        size = _SLOTS * self._slot_bytes
        file = os.memfd_create("batches")
        try:
            os.ftruncate(file, size)
            command = [sys.executable, "-m", "examples.dlrm.read_process"]
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[file],
                cwd=_ROOT,
                env=os.environ | _KEEPS_MEMORY,
            )
            self._workers.append(worker)
            memory = mmap.mmap(file, size)
            assert worker.stdin is not None
            pickle.dump(Task(reader, file, _SLOTS, self._slot_bytes), worker.stdin)
            worker.stdin.flush()
        finally:
            os.close(file)
        self._memories.append(memoryview(memory))
        if gpu is not None:
            self._stack.enter_context(pinned(memory, gpu))

    def __enter__(self) -> ReadingProcesses[B]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[B]:
        turn = 0
        while True:
            worker, memory = self._workers[turn], self._memories[turn]
            message = self._receive(worker)
            if message is None:
                return
            if message.slot is None:
                yield unpack(message, memory)
            else:
                first = message.slot * self._slot_bytes
                yield unpack(message, memory[first : first + self._slot_bytes])
                self._release(worker, message.slot)
            turn = (turn + 1) % len(self._workers)

    def close(self) -> None:
        """Ends the processes. May be called twice."""
        self._stack.close()
        for worker in self._workers:
            worker.kill()
            worker.communicate()
        self._workers, self._memories = [], []

    def _receive(self, worker: subprocess.Popen[bytes]) -> Message | None:
        assert worker.stdout is not None
        try:
            answer: Any = pickle.load(worker.stdout)
        except EOFError:
            raise RuntimeError(f"a process that reads ended with status {worker.wait()}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _release(self, worker: subprocess.Popen[bytes], slot: int) -> None:
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has read all that it should, and ended
            worker.stdin.write(bytes([slot]))
            worker.stdin.flush()
