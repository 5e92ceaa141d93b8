# SPDX-License-Identifier: Apache-2.0
"""Batches that processes read are those that one thread reads; what goes wrong in a process reaches the consumer."""

import ctypes
import dataclasses
import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from criteo_bags import bags_of

from examples.dlrm import columns, dataset, pinned
from examples.dlrm.arrays import ArrayColumn, ArrayLayout, Ragged
from examples.dlrm.devices import choose_gpu
from examples.dlrm.errors import DataError
from examples.dlrm.features import CriteoLayout
from examples.dlrm.feed import Feed, processes_for
from examples.dlrm.processes import ReadingProcesses
from examples.dlrm.reader import Reader

LAYOUT = CriteoLayout(columns.table_rows(300))


def alike(batch, other):
    assert (batch.index, batch.global_rows) == (other.index, other.global_rows)
    np.testing.assert_array_equal(batch.labels, other.labels)
    np.testing.assert_array_equal(batch.dense, other.dense)
    assert bags_of(batch) == bags_of(other)
    assert batch.ids.offset_per_key() == other.ids.offset_per_key()


@pytest.mark.parametrize(("count", "first"), [(1, 0), (3, 2)])
def test_the_batches_are_those_of_a_thread(generated, count, first):
    reader = Reader(dataset.find(generated[0]).train, 300, LAYOUT, rank=1, num_ranks=2, first_batch=first)
    wanted = list(reader)
    assert len(wanted) == 17 - first
    with ReadingProcesses(reader, count) as batches:
        seen = 0
        for batch, other in zip(batches, wanted, strict=True):
            alike(batch, other)
            assert batch.ids.values().ctypes.data % 64 == 0
            seen += 1
    assert seen == len(wanted)


def test_batches_that_do_not_fit_come_too(tmp_path):
    rows = [list(range(row % 50 * 100)) for row in range(64)]
    pq.write_table(pa.table({"keys": rows}), tmp_path / "lists.parquet")
    layout = ArrayLayout([ArrayColumn("keys", (None,))])
    reader = Reader(dataset.find(tmp_path, ("keys",)).train, 16, layout)
    with ReadingProcesses(reader, 2) as batches:
        for batch, other in zip(batches, reader, strict=True):
            found, wanted = batch.arrays["keys"], other.arrays["keys"]
            assert isinstance(found, Ragged) and isinstance(wanted, Ragged)
            np.testing.assert_array_equal(found.values, wanted.values)


def test_what_was_prepared_stays(generated):
    reader = Reader(dataset.find(generated[0]).train, 300, LAYOUT)
    with Feed(reader, lambda batch: dataclasses.replace(batch, dense=batch.dense.copy()), processes=2) as feed:
        prepared = list(feed)
        assert feed.seconds > 0
    for batch, other in zip(prepared, reader, strict=True):
        np.testing.assert_array_equal(batch.dense, other.dense)


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_keeps_its_place(tmp_path, criteo_lines, processes):
    lines = criteo_lines(40)
    lines[20][16] = "no id"
    file = tmp_path / "bad.csv"
    file.write_text("".join(",".join(line) + "\n" for line in lines))
    reader = Reader(dataset.find(file).train, 8, LAYOUT)
    seen = []
    with (
        pytest.raises(DataError, match=r"bad.csv, row 21, column C3: not a hexadecimal") as caught,
        Feed(reader, lambda batch: batch.index, processes=processes) as feed,
    ):
        seen.extend(feed)
    assert (caught.value.row, caught.value.column) == (21, "C3")


def test_leaving_early_ends_the_processes(generated):
    processes = ReadingProcesses(Reader(dataset.find(generated[0]).train, 10, LAYOUT), 2)
    with processes as batches:
        workers = list(processes._workers)
        next(iter(batches))
    assert all(worker.poll() is not None for worker in workers)


def test_a_process_that_dies_is_an_error(generated):
    processes = ReadingProcesses(Reader(dataset.find(generated[0]).train, 10, LAYOUT), 1)
    with processes as batches, pytest.raises(RuntimeError, match="a process that reads ended with status -9"):
        for number, _ in enumerate(batches):
            if number == 0:
                os.kill(processes._workers[0].pid, signal.SIGKILL)


def test_bad_arguments(generated):
    reader = Reader(dataset.find(generated[0]).train, 10, LAYOUT)
    with pytest.raises(ValueError, match="count must be at least 1"):
        ReadingProcesses(reader, 0)


def test_a_gpu_for_each_rank_or_none():
    assert [choose_gpu("auto", rank, 2, 2) for rank in (0, 1)] == [0, 1]
    assert choose_gpu("gpu", 1, 2, 4) == 1
    assert choose_gpu("auto", 0, 2, 1) is choose_gpu("auto", 0, 1, 0) is choose_gpu("cpu", 0, 1, 8) is None
    with pytest.raises(ValueError, match="this host has 2 ranks and 1 GPUs"):
        choose_gpu("gpu", 0, 2, 1)
    assert processes_for(None, 1) == 0
    assert 1 <= processes_for(0, 1) <= 16


def test_pinning_asks_the_driver_in_the_right_order(monkeypatch):
    """With a stand-in for the driver, which this machine may not have."""
    import mmap

    calls = []

    class Driver:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, name):
            def call(*arguments):
                calls.append(name)
                return 0

            return call

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    with pinned.pinned(mmap.mmap(-1, 8192), 0):
        assert calls[-3:] == ["cuMemHostRegister_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
    assert calls[-3:] == ["cuMemHostUnregister", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
