# SPDX-License-Identifier: Apache-2.0
"""A process that reads batches into memory that it shares with who started it (`processes`). It imports no framework.

Its input has a `Task`, and then a byte for each slot of the memory that is free again. Its output has a `Message` for
each batch, and then None, or the exception that ended reading.
"""

from __future__ import annotations

import mmap
import pickle
import sys
from typing import Any

import pyarrow as pa

from .shared_batch import Task, pack


def main() -> None:
    """The process."""
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    task: Task = pickle.load(orders)
    pa.set_cpu_count(1)  # there are as many processes as there are cores for
    memory = memoryview(mmap.mmap(task.memory, task.slots * task.slot_bytes))
    free = list(range(task.slots))
    answer: Any = None
    try:
        for batch in task.reader:
            if not free:
                freed = orders.read(1)
                if not freed:
                    return  # nobody wants more
                free += freed
            slot = free.pop()
            message = pack(batch, slot, memory[slot * task.slot_bytes : (slot + 1) * task.slot_bytes])
            if message.slot is None:
                free.append(slot)
            pickle.dump(message, answers)
            answers.flush()
    except BrokenPipeError:
        return
    except Exception as error:
        answer = error
    pickle.dump(answer, answers)
    answers.flush()


if __name__ == "__main__":
    main()
