# SPDX-License-Identifier: Apache-2.0
"""A dynamic table on a GPU whose memory is taken: what is refused, and what is worth waiting for."""

import numpy as np
import pytest

from sparse_operation_kit import core

UNIFORM = core.Initializer("uniform", -1.0, 1.0, seed=11)


def insert(table, keys, context):
    return core.locate([table.table()], keys, [[len(keys)]], insert=True, context=context)


def test_where_there_is_no_memory_nothing_changes(memory, cupy, context, record):
    with core.DynamicTable(2**34, 256, initializer=UNIFORM, device=0, name="user") as table:
        insert(table, cupy.arange(100), context)
        keys = cupy.arange(50, 4_000_000)
        memory.used()
        with memory.limited(1 << 30), pytest.raises(MemoryError, match="table 'user': no memory for"):
            insert(table, keys, context)
        assert table.index.size(context=context) == table.index.num_slots == 100
        wanted = core.initialize(UNIFORM, 100, 256, keys=np.arange(100))
        assert cupy.asarray(table.column(0)).get().tobytes() == wanted.tobytes()
        assert insert(table, cupy.asarray(np.array([100])), context).get().tolist() == [100]
        record.check()


def test_it_waits_before_memory_runs_out(memory, cupy, context, record):
    """Many calls with the same keys, which the host counts as new until it hears of them, fit where one does."""
    with core.DynamicTable(2**34, 256, initializer=UNIFORM, device=0) as table:
        keys = cupy.arange(400_000)  # 400 MB of rows
        slots = cupy.zeros(400_000, np.int64)
        made = core.Context(device=0, empty=lambda shape, dtype: slots, errors=record)
        insert(table, keys[:1], core.Context(device=0, empty=cupy.empty, errors=record))
        memory.used()
        with memory.limited(1 << 30):
            for _ in range(20):
                insert(table, keys, made)
            cupy.cuda.runtime.deviceSynchronize()
            record.check()
        assert table.index.size(context=context) == 400_000
